"""How long a server may be silent at work."""

import pytest

from dsi.fleets.hang_limits import FACTOR, FIRST_SECONDS, MIN_SECONDS, UNMEASURED_SECONDS, HangLimits


def test_hang_limits_are_a_multiple_of_the_slowest_forward_of_that_size() -> None:
    limits = HangLimits()
    for seconds in (0.3, 0.5, 0.4):
        limits.observe("target", 4, seconds)
    assert limits.seconds("target", 7) == pytest.approx(FACTOR * 0.5, rel=0.02)


def test_hang_limits_have_a_floor() -> None:
    limits = HangLimits()
    limits.observe("drafter", 1, 0.001)
    assert limits.seconds("drafter", 1) == MIN_SECONDS


def test_hang_limits_before_the_first_forward_of_a_role() -> None:
    limits = HangLimits()
    limits.observe("drafter", 1, 0.001)
    assert limits.seconds("target", 1) == UNMEASURED_SECONDS


def test_hang_limits_before_the_first_forward_of_a_role_whose_latency_is_expected() -> None:
    limits = HangLimits()
    limits.expect("target", 0.01)
    assert limits.seconds("target", 1) == FIRST_SECONDS
    assert limits.seconds("target", 500) == pytest.approx(FACTOR * 0.01 * 500)
    limits.observe("target", 1, 0.01)
    assert limits.seconds("target", 1) == MIN_SECONDS


def test_hang_limits_extrapolate_to_longer_prompts() -> None:
    limits = HangLimits()
    limits.observe("target", 1, 0.5)
    assert limits.seconds("target", 1000) == FACTOR * 0.5 * 2**9
    limits.observe("target", 512, 4.0)
    assert limits.seconds("target", 1000) == FACTOR * 4.0
    assert limits.seconds("target", 100) == FACTOR * 4.0  # no more than a larger one


def test_hang_limits_forget_one_bad_moment() -> None:
    limits = HangLimits()
    limits.observe("target", 1, 60.0)
    for _ in range(500):
        limits.observe("target", 1, 0.4)
    assert limits.seconds("target", 1) < FACTOR


def test_hang_limits_that_are_given_count() -> None:
    limits = HangLimits(7.0)
    limits.observe("target", 1, 60.0)
    assert limits.seconds("target", 1) == 7.0
