"""What an engine is built from is checked before anything is loaded."""

import re
from typing import Any

import pytest

from dsi.engine.config import EngineConfig, parse_fleet


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sp": 0}, "SP degree 0: must be at least 1"),
        ({"target_mp": 0}, "target mp 0: must be at least 1"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32 or bfloat16"),
        ({"threads": 0}, "threads 0: must be at least 1"),
        ({"vocab": "magic"}, "vocab 'magic': must be same, tli, slem or auto"),
        ({"target": "no/such/folder"}, "no/such/folder: there is no such model folder"),
        ({"drafter": ("ngram", "/nowhere")}, "/nowhere: there is no such model folder"),
        ({"drafter_device": "cpu"}, "drafter device 'cpu': the targets need devices as well"),
        ({"hang_seconds": 1.0}, "hang seconds 1: is for servers on Ray; say --fleet ray"),
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
