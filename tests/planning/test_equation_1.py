"""Eq. (1) and the paper's worked examples."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from dsi.planning.equation_1 import best_si_lookahead, minimal_lookahead, plan, servers_needed, to_fraction


def test_plan_gives_lookahead_5_to_a_drafter_of_5_percent_with_4_targets() -> None:
    chosen = plan(target_ms=1, drafter_ms=0.05, gpus=5)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (4, 5, 5)
    assert chosen.inequality == "ceil(1 / (5 * 0.05)) = 4 <= 4"


def test_plan_gives_sp_3_and_lookahead_7_for_7_gpus_with_2_per_target() -> None:
    chosen = plan(target_ms=20, drafter_ms=1, gpus=7, target_gpus=2)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (3, 7, 7)


def test_servers_needed_is_5_for_a_drafter_of_10_percent_and_lookahead_2() -> None:
    assert 1 + servers_needed(target=1, drafter=0.1, lookahead=2) == 6


def test_servers_needed_is_exact_where_floats_round_up() -> None:
    assert ceil(1.1 / (11 * 0.1)) == 1
    assert ceil(0.3 / 0.1 / 1) == 3
    assert ceil(2.1 / (3 * 0.7)) == 2  # what floating point says
    assert servers_needed(2.1, 0.7, 3) == 1
    assert minimal_lookahead(2.1, 0.7, 3) == 1
    assert (to_fraction(0.05), to_fraction(Fraction(1, 3))) == (Fraction(1, 20), Fraction(1, 3))


def test_plan_leaves_out_targets_that_cannot_be_busy() -> None:
    chosen = plan(target_ms=20, drafter_ms=5, gpus=100)
    assert (chosen.sp, chosen.lookahead, chosen.gpus_used) == (4, 1, 5)


decimals = st.integers(1, 10**5).map(lambda n: n / 1000)


@given(decimals, decimals, st.integers(1, 64))
def test_minimal_lookahead_is_the_least_that_satisfies_eq_1(target: float, drafter: float, sp: int) -> None:
    lookahead = minimal_lookahead(target, drafter, sp)
    assert servers_needed(target, drafter, lookahead) <= sp
    assert lookahead == 1 or servers_needed(target, drafter, lookahead - 1) > sp


def test_best_si_lookahead_grows_with_acceptance() -> None:
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
def test_plan_refuses_impossible_numbers(numbers: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(**{"target_ms": 20, "drafter_ms": 1, "gpus": 7} | numbers)  # type: ignore[arg-type]


def test_equation_1_refuses_lookahead_and_sp_below_1() -> None:
    with pytest.raises(ValueError, match="SP degree 0"):
        minimal_lookahead(20, 1, 0)
    with pytest.raises(ValueError, match="lookahead 0"):
        servers_needed(20, 1, 0)
