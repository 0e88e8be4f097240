from math import inf

import pytest

from dsi.core.generation import Generation
from dsi.core.messages import Draft
from dsi.core.policies import distributed, policy_for
from dsi.core.spec import SpecConfig, default_max_lead


def test_spec_config_lead_limit_is_given_or_follows_the_targets() -> None:
    assert SpecConfig().lead_limit == inf
    assert SpecConfig(lookahead=3, max_lead=7, max_targets=2).lead_limit == 7
    assert SpecConfig(lookahead=3, max_targets=2).lead_limit == default_max_lead(2, 3) == 9
    assert SpecConfig(lookahead=1, min_draft=6, max_targets=2).lead_limit == default_max_lead(2, 1, 6) == 7


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SpecConfig("nonsi"), "no speculation"),
        (SpecConfig(lookahead=4), "lookahead 4, min draft 0"),
        (SpecConfig("dsi", 4, 1, max_targets=2), "SP 2, lookahead 4, min draft 1"),
        (SpecConfig(lookahead=1, tree=16), "lookahead 1, min draft 0, trees of 16"),
        (SpecConfig("si", 4, tree=16), "SI, lookahead 4, trees of 16"),
    ],
)
def test_spec_config_str(spec: SpecConfig, text: str) -> None:
    assert str(spec) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "medusa"}, "algorithm 'medusa': must be one of nonsi, si, pearl, dsi, auto"),
        ({"rule": "typical"}, "rule 'typical': must be one of"),
        ({"max_targets": 0}, "max targets 0: must be at least 1"),
        ({"max_lead": float("nan")}, "max lead nan: must be at least 1"),
    ],
)
def test_spec_config_names_the_wrong_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [SpecConfig("dsi"), SpecConfig("auto", 3)])
def test_policy_for_refuses_what_is_not_decided(spec: SpecConfig) -> None:
    with pytest.raises(ValueError, match="algorithm"):
        policy_for(spec)


def test_distributed_takes_its_old_names_for_one_release() -> None:
    old = Generation((7,), 50, distributed(5, patience=2, horizon=3))
    new = Generation((7,), 50, distributed(5, min_draft=2, max_lead=3))
    [before], [after] = ([job for job in g.start().start if isinstance(job, Draft)] for g in (old, new))
    assert (before.count, before.first_block) == (after.count, after.first_block) == (3, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wings'"):
        distributed(5, wings=2)


@pytest.mark.parametrize("name", ["branches", "spare_targets", "spare", "min_ratio", "doubt"])
def test_distributed_names_trees_where_runner_ups_are_asked_for(name: str) -> None:
    with pytest.raises(TypeError, match=rf"no longer takes {name}: .* use policy_for\(SpecConfig\(.*tree=16\)\)"):
        distributed(5, **{name: 2})  # type: ignore[arg-type]
