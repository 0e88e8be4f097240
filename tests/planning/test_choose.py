"""Chosen by rehearsal: what is slower is not chosen."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dsi.planning.choose import choose
from dsi.planning.latency import LatencyModel


def costs(target: float = 20.0, drafter: float = 1.0, wide: float = 22.0, crowd: float = 1.0) -> LatencyModel:
    busy = ((1, target), (7, target * crowd))
    points = {"cancel_points": 6, "drafter_cancel_points": 1}
    return LatencyModel.measured({1: target, 64: wide}, drafter, by_busy_targets=busy, **points)


def test_dsi_comes_first_where_targets_do_not_crowd_each_other() -> None:
    first, *others = choose(costs(), 0.8, most=7)
    assert first.algorithm == "dsi"
    assert first.sp > 1
    assert [each.ms for each in others] == sorted(each.ms for each in others)
    assert first.ms < others[0].ms


def test_a_useless_drafter_leaves_plain_decoding() -> None:
    """Where a wide forward costs as much as many narrow ones, guessing has no use."""
    first, *_ = choose(costs(drafter=19.0, wide=400.0), 0.05, most=2)
    assert first.algorithm in ("nonsi", "dsi")
    assert first.ms == pytest.approx(20.0, rel=0.02)


def test_fewer_targets_are_chosen_where_they_crowd_each_other() -> None:
    free, crowded = (choose(costs(crowd=crowd), 0.8, most=7, tokens=40) for crowd in (1.0, 6.0))
    degrees = [{each.algorithm: each for each in found}["dsi"].sp for found in (free, crowded)]
    assert degrees[1] < degrees[0]


def test_a_pool_rehearses_the_same() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert choose(costs(), 0.8, 2, map=pool.map) == choose(costs(), 0.8, 2)


def test_what_is_read_from_the_costs() -> None:
    found = LatencyModel.measured(
        {1: 10.0, 64: 16.3},
        1.0,
        by_busy_targets=((1, 10.0), (7, 13.0)),
        drafter_by_busy_targets=((2, 1.2), (4, 1.5)),
    )
    assert found.target_ms == 10.0
    assert found.per_token_ms == pytest.approx(0.1)
    assert found.contention_of(3) == found.contention_of(7) == pytest.approx(0.05)
    assert [found.drafter_beside(targets) for targets in (1, 2, 7)] == [1.0, 1.2, 1.5]
