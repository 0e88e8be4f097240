"""A plan from measurements of this machine, and an engine by it."""

import os
from importlib.resources import files

import pytest

from dsi.engine.build import load_apart
from dsi.engine.engine import Engine
from dsi.engine.profile_cpu import at_once, crowding, measured, shares


def test_threads_that_are_tried() -> None:
    assert shares(1) == [1]
    assert shares(2) == [1, 2]
    assert shares(7) == [1, 2, 4, 6, 7]


def test_forwards_at_once_are_timed_in_processes_of_their_own() -> None:
    model = load_apart("builtin", "builtin", threads=1).target.backend
    cores = len(os.sched_getaffinity(0))
    assert at_once(model, min(2, cores)) > 0
    assert crowding(model, min(2, cores)) >= 0


def test_two_drafters_are_measured_alone_and_in_one_tree() -> None:
    small = str(files("dsi") / "assets" / "builtin_pair" / "drafter")
    found = measured("builtin", ["builtin", small], 1)
    assert [each.name for each in found.all] == ["builtin", small, f"builtin+{small}"]
    rates = [each.rates["match"] for each in found.all]
    assert rates[0] == rates[1] == rates[2]  # which is the same model: together they know no more
    assert found.others[-1].drafters == 2


def test_more_cores_than_there_are() -> None:
    with pytest.raises(ValueError, match="cores 1000: must be between 1 and"):
        measured("builtin", "builtin", 1000)


def test_an_engine_as_planned_writes_the_targets_text() -> None:
    with Engine.load(plan="auto") as engine, Engine.load(algorithm="nonsi") as plain:
        assert engine.plan[0].ms == min(offer.ms for offer in engine.plan)
        overlaps = engine.plan[0].algorithm in ("dsi", "pearl")
        assert engine.algorithm == ("auto" if overlaps else engine.plan[0].algorithm)
        written = [each.generate("Once upon a time", max_new_tokens=24).tokens for each in (engine, plain)]
    assert written[0] == written[1]


def test_a_plan_leaves_nothing_else_to_say() -> None:
    with pytest.raises(ValueError, match="finds its own arrangement"):
        Engine.load(plan="auto", sp=2)
    with pytest.raises(ValueError, match="plan 'best': must be auto"):
        Engine.load(plan="best")
