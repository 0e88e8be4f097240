"""What an engine is built from is checked before anything is loaded."""

import re
from typing import Any

import pytest

from dsi.core.spec import SpecConfig
from dsi.engine.config import EngineConfig, fill_spec, make_configs, make_spec, parse_fleet


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sp": 0}, "SP degree 0: must be at least 1"),
        ({"target_mp": 0}, "target mp 0: must be at least 1"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32, bfloat16 or int8"),
        ({"threads": 0}, "threads 0: must be at least 1"),
        ({"vocab": "magic"}, "vocab 'magic': must be same, tli, slem or auto"),
        ({"target": "no/such/folder"}, "no/such/folder: there is no such model folder"),
        ({"drafter": ("ngram", "/nowhere")}, "/nowhere: there is no such model folder"),
        ({"drafter_device": "cpu"}, "drafter device 'cpu': the targets need devices as well"),
        ({"hang_seconds": 0.0}, "hang seconds 0: must be above 0"),
        (
            {"target_devices": "cpu,cpu", "hang_seconds": 1.0},
            "hang seconds 1: is for servers in processes and on Ray, not on devices",
        ),
        ({"start_seconds": 1.0}, "start seconds 1: is for servers on Ray; say --fleet ray"),
        ({"target_resources": "cpus=2"}, "target resources 'cpus=2': are for --fleet ray"),
        ({"fleet": "ray", "start_seconds": 0.0}, "start seconds 0: must be above 0"),
        (
            {"fleet": "ray", "target_devices": "cpu,cpu"},
            "fleet 'ray': takes no devices; say what each server needs instead",
        ),
        ({"target_devices": "cpu,cpu", "threads": 1}, "target devices 'cpu,cpu': take one drafter, and no threads"),
        (
            {"target_devices": "cpu,cpu", "drafter": "ngram"},
            "ngram: is no model, and needs no device; leave out the devices to use it",
        ),
        ({"plan": "best"}, "plan 'best': must be auto"),
        ({"plan": "auto", "sp": 2}, "plan 'auto': finds its own arrangement of one drafter; leave the rest out"),
        ({"plan": "auto", "drafter": "ngram"}, "ngram: is no model, so there are no forwards to measure"),
    ],
)
def test_config_refuses_what_cannot_be_built(fields: dict[str, Any], sentence: str) -> None:
    EngineConfig(drafter=("vicuna-68m", "ngram"), sp=1)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        EngineConfig(**fields)


@pytest.mark.parametrize("fleet", ["roy", "ray=", "", "rays=1"])
def test_config_refuses_an_unknown_fleet(fleet: str) -> None:
    with pytest.raises(ValueError, match="must be ray, or ray=ADDRESS"):
        EngineConfig(fleet=fleet)


def test_parse_fleet_returns_the_address() -> None:
    assert (parse_fleet("ray"), parse_fleet("ray=10.0.0.1:6379")) == (None, "10.0.0.1:6379")


def test_config_takes_one_drafter_or_several() -> None:
    assert EngineConfig(drafter="ngram").drafter == ("ngram",)  # type: ignore[arg-type]
    assert EngineConfig(drafter=["builtin", "ngram"]).drafter == ("builtin", "ngram")  # type: ignore[arg-type]


def test_config_collects_the_resources_of_servers() -> None:
    requested = EngineConfig(fleet="ray", target_resources="cpus=2,gpus=1").requested_resources
    assert (requested["target"].cpus, requested["target"].gpus, len(requested)) == (2, 1, 1)


def test_make_configs_splits_the_arguments_of_engine_load() -> None:
    config, spec = make_configs(None, None, {"sp": 2, "lookahead": "5", "min_draft": "auto", "algorithm": "si"})
    assert (config.sp, spec.algorithm, spec.lookahead, spec.min_draft) == (2, "si", 5, None)
    changed, kept = make_configs(config, spec, {"dtype": "bfloat16", "sp": None})
    assert (changed.sp, changed.dtype, kept) == (2, "bfloat16", spec)


def test_make_configs_takes_former_names() -> None:
    config, spec = make_configs(None, None, {"texts": 8, "patience": 3, "needs": {}})
    assert (config.max_num_seqs, dict(config.resources), spec.min_draft) == (8, {}, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lookahead": "many"}, "lookahead 'many': must be a whole number or auto"),
        ({"lookahead": 0}, "lookahead 0: must be at least 1"),
        ({"min_draft": -1}, "min draft -1: must be at least 0"),
        ({"algorithm": "auto", "lookahead": 3}, "lookahead 3 with the algorithm auto: it finds its own"),
        ({"algorithm": "auto", "patience": 2}, "min draft 2 with the algorithm auto: it finds its own"),
    ],
)
def test_make_configs_refuses_bad_numbers(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make_configs(None, None, arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"colour": "red"}, "unexpected keyword argument 'colour': must be one of algorithm, chances, drafter"),
        ({"branches": 2}, "no longer a keyword argument: 'branches'; trees are faster than runner-ups, use tree"),
        ({"lookahed": 3}, "unexpected keyword argument 'lookahed': did you mean lookahead?"),
        ({"target_device": None}, "unexpected keyword argument 'target_device': did you mean target_devices?"),
    ],
)
def test_make_configs_refuses_unknown_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}"):
        make_configs(None, None, arguments)


def test_make_spec_refuses_unknown_arguments() -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'max_tokens': did you mean max_targets\?"):
        make_spec(SpecConfig(), {"max_tokens": 3})


def test_fill_spec_keeps_what_a_request_says() -> None:
    filled = fill_spec(SpecConfig("dsi", 4), SpecConfig("dsi", 8, 2))
    assert (filled.lookahead, filled.min_draft) == (4, 2)
    with pytest.raises(ValueError, match="lookahead 8 with the algorithm auto"):
        fill_spec(SpecConfig("auto"), SpecConfig("dsi", 8))


def test_make_configs_chooses_auto_unless_numbers_of_dsi_are_given() -> None:
    assert make_configs(None, None, {})[1].algorithm == "auto"
    for numbers in ({"lookahead": 3}, {"min_draft": 0}, {"tree": 16}):
        assert make_configs(None, None, numbers)[1].algorithm == "dsi"
    assert make_configs(None, None, {"lookahead": 3, "algorithm": "si"})[1].algorithm == "si"
    assert make_configs(None, None, {"lookahead": "auto"})[1].algorithm == "auto"
    with pytest.raises(ValueError, match="lookahead 3 with the algorithm auto: it finds its own"):
        make_configs(None, None, {"lookahead": 3, "algorithm": "auto"})
