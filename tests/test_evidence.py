"""A plan from measurements of this machine, and an engine by it."""

import os

import pytest

from dsi.evidence import arranged, at_once, crowding, measured, shares
from dsi.loading import load_apart
from dsi.speech import Engine


def test_threads_that_are_tried() -> None:
    assert shares(1) == [1]
    assert shares(2) == [1, 2]
    assert shares(7) == [1, 2, 4, 6, 7]


def test_forwards_at_once_are_timed_in_processes_of_their_own() -> None:
    model = load_apart("builtin", "builtin", threads=1).target.backend
    cores = len(os.sched_getaffinity(0))
    assert at_once(model, min(2, cores)) > 0
    assert crowding(model, min(2, cores)) >= 0


def test_more_cores_than_there_are() -> None:
    with pytest.raises(ValueError, match="cores 1000: must be between 1 and"):
        measured("builtin", "builtin", 1000)


def test_an_engine_as_planned_writes_the_targets_text() -> None:
    with Engine.load(plan="auto") as engine, Engine.load(algorithm="nonsi") as plain:
        assert engine.plan[0].ms == min(offer.ms for offer in engine.plan)
        assert engine.algorithm in ("auto", "si", "nonsi")
        written = [each.generate("Once upon a time", max_new_tokens=24).tokens for each in (engine, plain)]
    assert written[0] == written[1]


def test_a_plan_leaves_nothing_else_to_say() -> None:
    with pytest.raises(ValueError, match="finds its own arrangement"):
        Engine.load(plan="auto", sp=2)
    with pytest.raises(ValueError, match="plan 'best': must be auto"):
        Engine.load(plan="best")


def test_arrangements_where_guesses_overlap_adapt() -> None:
    found = arranged("builtin", "builtin")
    overlaps = found.offers[0].algorithm in ("dsi", "pearl")
    assert (found.algorithm == "auto") == overlaps
    assert (found.threads is None) == overlaps
