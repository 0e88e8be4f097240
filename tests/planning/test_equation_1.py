"""Eq. (1) and the paper's worked examples."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsi.planning.equation_1 import best_si_lookahead, minimal_lookahead, plan, servers_needed, to_fraction


def test_a_drafter_of_five_percent_with_four_targets_needs_lookahead_five() -> None:
    chosen = plan(target_ms=1, drafter_ms=0.05, gpus=5)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (4, 5, 5)
    assert chosen.inequality == "ceil(1 / (5 * 0.05)) = 4 <= 4"


def test_seven_gpus_with_two_for_each_target_give_sp_three_and_lookahead_seven() -> None:
    chosen = plan(target_ms=20, drafter_ms=1, gpus=7, target_gpus=2)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (3, 7, 7)


def test_a_drafter_of_ten_percent_and_lookahead_two_need_six_gpus() -> None:
    assert 1 + servers_needed(target=1, drafter=0.1, lookahead=2) == 6


def test_the_boundary_is_exact_where_floats_round_up() -> None:
    assert ceil(1.1 / (11 * 0.1)) == 1
    assert ceil(0.3 / 0.1 / 1) == 3
    assert ceil(2.1 / (3 * 0.7)) == 2  # what floating point says
    assert servers_needed(2.1, 0.7, 3) == 1
    assert minimal_lookahead(2.1, 0.7, 3) == 1
    assert (to_fraction(0.05), to_fraction(Fraction(1, 3))) == (Fraction(1, 20), Fraction(1, 3))


def test_more_targets_than_could_be_busy_are_left_out() -> None:
    chosen = plan(target_ms=20, drafter_ms=5, gpus=100)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (4, 1, 5)


decimals = st.integers(1, 10**5).map(lambda n: n / 1000)


@given(decimals, decimals, st.integers(1, 64))
def test_the_minimal_lookahead_satisfies_eq_1_and_the_one_below_does_not(
    target: float, drafter: float, sp: int
) -> None:
    lookahead = minimal_lookahead(target, drafter, sp)
    assert servers_needed(target, drafter, lookahead) <= sp
    assert lookahead == 1 or servers_needed(target, drafter, lookahead - 1) > sp


def test_si_takes_longer_blocks_from_better_drafters() -> None:
    assert [best_si_lookahead(27, 1, p) for p in (0.0, 0.63, 0.93, 1.0)] == [1, 5, 19, 200]


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"target_ms": 0}, "target latency 0 ms: must be above 0"),
        ({"drafter_ms": -1}, "drafter latency -1 ms: must be above 0"),
        ({"target_ms": float("nan")}, "target latency nan ms: must be above 0"),
        ({"gpus": 2, "target_gpus": 2}, r"2 GPUs: one target \(2\) and one drafter \(1\) need 3"),
        ({"target_gpus": 0}, "0 GPUs per target, 1 per drafter: each needs at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(numbers: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(**{"target_ms": 20, "drafter_ms": 1, "gpus": 7} | numbers)  # type: ignore[arg-type]


def test_lookahead_and_sp_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="SP degree 0"):
        minimal_lookahead(20, 1, 0)
    with pytest.raises(ValueError, match="lookahead 0"):
        servers_needed(20, 1, 0)
