"""A pair measured on this machine's cores, and an engine planned from it."""

import os
from importlib.resources import files

import pytest

from dsi.engine.build_processes import load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.engine.profile_cpu import concurrent_forward_ms, measured_contention
from dsi.engine.profile_host import profile_host, thread_counts


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


def test_profile_host_refuses_more_cores_than_there_are() -> None:
    with pytest.raises(ValueError, match="cores 1000: must be between 1 and"):
        profile_host(EngineConfig(), 1000)


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
