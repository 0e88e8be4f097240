"""What the planner reads from a profile."""

import pytest

from dsi.experiments.profile import Profile
from dsi.planning.curves import rates, steps_ms
from dsi.planning.latency import monotone

LATENCY = {
    "target": {"tpot_ms": {"mean": 8.0}},
    "curve": [{"new_tokens": 1, "ms": 8.0}, {"new_tokens": 4, "ms": 9.5}],
}


def profile(**parts: object) -> Profile:
    return Profile("a", "b", "c", parts)


def test_forwards_by_their_new_tokens() -> None:
    assert steps_ms(profile(latency=LATENCY), "file") == ((1, 8.0), (4, 9.5))
    assert steps_ms(profile(latency={**LATENCY, "curve": []}), "file") == ((1, 8.0),)
    with pytest.raises(ValueError, match=r"file: latency\.curve must be"):
        steps_ms(profile(latency={**LATENCY, "curve": [{"ms": 1}]}), "file")


def test_a_wider_forward_is_never_faster() -> None:
    assert monotone({4: 9.0, 1: 8.0, 2: 9.5}) == ((1, 8.0), (2, 9.5), (4, 9.5))


def test_rates_are_those_of_the_rules_where_they_were_measured() -> None:
    results = [
        {"rule": "match", "temperature": 0.0, "places": {"mean": 0.9}},
        {"rule": "match", "temperature": 1.0, "places": {"mean": 0.6}},
        {"rule": "reject", "temperature": 1.0, "places": {"mean": 0.7}},
        {"rule": "block", "temperature": 1.0, "places": None},
    ]
    assert rates(profile(rules={"results": results}), "file") == {"match": 0.6, "reject": 0.7}
    assert rates(profile(acceptance={"rate": 0.8}), "file") == {"match": 0.8}
