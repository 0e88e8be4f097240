"""A pair measured on this machine's cores, and an engine planned from it."""

import os
from importlib.resources import files

import pytest

from dsi.engine.build_processes import load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.engine.profile_cpu import concurrent_forward_ms, measured_contention
from dsi.engine.profile_host import extrapolated, extrapolated_widths, profile_host, thread_counts


def test_thread_counts_are_powers_of_two_and_all_cores() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(7) == [1, 2, 4, 6, 7]


def test_concurrent_forwards_are_timed_in_their_own_processes() -> None:
    model = load_model_pair(EngineConfig(threads=1)).target.backend
    cores = len(os.sched_getaffinity(0))
    assert concurrent_forward_ms(model, min(2, cores)) > 0
    assert measured_contention(model, min(2, cores)) >= 0


@pytest.mark.slow
def test_profile_host_measures_two_drafters_alone_and_in_one_tree() -> None:
    small = str(files("dsi") / "assets" / "builtin_pair" / "drafter")
    profile = profile_host(EngineConfig(drafter=("builtin", small)), 1)
    assert [drafter.drafter for drafter in profile.all] == ["builtin", small, f"builtin+{small}"]
    rates = [drafter.acceptance["match"] for drafter in profile.all]
    assert rates[0] == rates[1] == rates[2]  # the same model twice is accepted no more often
    assert profile.alternatives[-1].drafters == 2


def test_profile_host_refuses_cores_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cores 1001: must be between 1 and 1000"):
        profile_host(EngineConfig(), 1001)
    monkeypatch.setattr("dsi.engine.profile_host.available_cores", lambda: [0])
    with pytest.raises(ValueError, match="cores 8: this machine has 1"):
        profile_host(EngineConfig(), 8)


def test_extrapolated_forwards_follow_amdahls_law() -> None:
    assert extrapolated({1: 10.0, 2: 6.0}, [1, 2, 4, 8]) == pytest.approx({1: 10, 2: 6, 4: 4, 8: 3})
    assert extrapolated({1: 10.0, 2: 11.0}, [2, 4]) == {2: 11, 4: 10}  # what does not scale is not extrapolated
    assert extrapolated({1: 10.0, 2: 4.0}, [4]) == {4: 2.5}  # nor does it scale better than perfectly
    widths = {1: {1: 10.0, 8: 20.0}, 2: {1: 5.0, 8: 15.0}}
    assert extrapolated_widths(widths, [1, 4]) == {1: widths[1], 4: pytest.approx({1: 2.5, 8: 12.5})}


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_profile_host_extrapolates_more_cores_than_there_are() -> None:
    cores = len(os.sched_getaffinity(0))
    profile = profile_host(EngineConfig(), 4 * cores)
    assert set(profile.by_mp) == set(thread_counts(4 * cores))
    assert profile.sources["mp"] == f"beyond {cores} cores extrapolated"
    widths = [set(dict(latency.by_width)) for latency in profile.by_mp.values()]
    assert all(own == widths[0] for own in widths)


@pytest.mark.slow
def test_planned_engine_writes_the_targets_text() -> None:
    with Engine.load(plan="auto") as engine, Engine.load(algorithm="nonsi") as plain:
        assert engine.plans[0].ms == min(plan.ms for plan in engine.plans)
        assert engine.algorithm == "auto"
        texts = [loaded.generate("Once upon a time", max_new_tokens=24).tokens for loaded in (engine, plain)]
    assert texts[0] == texts[1]


def test_planned_engine_refuses_other_options() -> None:
    with pytest.raises(ValueError, match="finds its own arrangement"):
        Engine.load(plan="auto", sp=2)
    with pytest.raises(ValueError, match="plan 'best': must be auto"):
        Engine.load(plan="best")
