"""The paper's theorems, checked on a simulator that could contradict them.

It knows nothing of them: it has servers, latencies and a policy, and adds nothing up.
"""

from fractions import Fraction
from math import ceil, sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.generation import Generation, Policy
from dsi.core.messages import DRAFTER, Time
from dsi.core.policies import autoregressive, distributed, speculative
from dsi.core.request import Request
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.spans import Span
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

HUNDREDTHS = st.integers(1, 100).map(lambda n: Fraction(n, 100))


def took(setting: SimulationConfig, policy: Policy, seed: int) -> Time:
    [done] = EngineLoop(setting.simulated(seed)).run(Request((1, 2, 3), setting.tokens, policy))
    return done.elapsed


def never_slower(setting: SimulationConfig, policy: Policy, seed: int) -> bool:
    return bool(took(setting, policy, seed) <= took(setting, autoregressive(), seed))


@given(
    drafter=HUNDREDTHS,
    acceptance=st.floats(0, 1),
    lookahead=st.integers(1, 12),
    sp=st.integers(1, 8),
    tokens=st.integers(1, 40),
    drafters=st.integers(1, 3),
    slow_start=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=400)
def test_theorem_1_dsi_is_never_slower_than_non_si(
    drafter: Fraction,
    acceptance: float,
    lookahead: int,
    sp: int,
    tokens: int,
    drafters: int,
    slow_start: int,
    seed: int,
) -> None:
    """On every path with constant latencies, and, beyond the paper, with any number of targets."""
    setting = SimulationConfig(
        LatencyModel(Fraction(1), drafter, target_ttft_ms=Fraction(slow_start)),
        acceptance,
        sp,
        tokens,
        drafters=drafters,
    )
    assert never_slower(setting, distributed(lookahead, setting.drafter_names), seed)


def hesitant(lookahead: int) -> Policy:
    """A planted mistake: the root is verified only when a block is full, as if verification were free."""

    def policy(g: Generation) -> None:
        tip = g.tip()
        unverified = tip.num_unverified()
        if unverified > lookahead or (unverified and not g.room(tip)):
            g.verify(tip, unverified)
        if g.room(tip) and not g.jobs.drafting(DRAFTER):
            g.draft(tip, g.room(tip))

    return policy


def test_theorem_1_check_catches_a_policy_that_breaks_it() -> None:
    setting = SimulationConfig(LatencyModel(Fraction(1), Fraction(1, 2)), 0.2, sp=8, tokens=40)
    caught = [seed for seed in range(20) if not never_slower(setting, hesitant(3), seed)]
    assert len(caught) == 20
    assert all(never_slower(setting, distributed(3), seed) for seed in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("drafter", [Fraction(1, 50), Fraction(1, 7), Fraction(1, 2), Fraction(9, 10)])
@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_theorem_2_dsi_is_not_slower_than_si_in_expectation(
    acceptance: float, drafter: Fraction, lookahead: int
) -> None:
    """The same lookahead for both, and as many targets as Eq. (1) asks for, plus the one that ends."""
    sp = ceil(1 / (lookahead * drafter)) + 1
    setting = SimulationConfig(LatencyModel(Fraction(1), drafter), acceptance, sp, tokens=40)
    pairs = [
        (took(setting, distributed(lookahead), seed), took(setting, speculative(lookahead), seed)) for seed in range(15)
    ]
    assert fmean(dsi for dsi, _ in pairs) <= fmean(si for _, si in pairs)


def proposition_1(acceptance: float, drafter: float, tokens: int) -> float:
    p, rest = acceptance, tokens - 1
    return drafter * p * rest + ((1 - p) * rest + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acceptance", "drafter"),
    [(0.5, Fraction(1, 10)), (0.9, Fraction(1, 3)), (0.1, Fraction(9, 10)), (0.8, Fraction(1, 20))],
)
def test_proposition_1_bounds_the_expected_time_and_is_reached(acceptance: float, drafter: Fraction) -> None:
    setting = SimulationConfig(LatencyModel(Fraction(1), drafter), acceptance, ceil(1 / drafter) + 1, tokens=50)
    times = [float(took(setting, distributed(1), seed)) for seed in range(100)]
    error = stdev(times) / sqrt(len(times))
    bound = proposition_1(acceptance, float(drafter), 50)
    assert fmean(times) <= bound + 3 * error
    assert fmean(times) >= bound - 3 * error - 0.03 * bound


@pytest.mark.slow
@given(HUNDREDTHS, st.floats(0, 1), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=100)
def test_eq_1_says_how_many_targets_are_ever_busy(
    drafter: Fraction, acceptance: float, lookahead: int, seed: int
) -> None:
    """One more at most: the verification of a new root, or on what remains at the end, is no full block."""
    log: list[Span] = []
    setting = SimulationConfig(LatencyModel(Fraction(1), drafter), acceptance, sp=110, tokens=30)
    EngineLoop(setting.simulated(seed, log)).run(Request((1, 2, 3), 30, distributed(lookahead)))
    spans = [span for span in log if span.kind == "verify" and span.end > span.start]
    peak = max(sum(other.start <= span.start < other.end for other in spans) for span in spans)
    assert peak <= ceil(1 / (lookahead * drafter)) + 1


@pytest.mark.slow
def test_distributed_is_faster_with_two_drafters() -> None:
    one = SimulationConfig(
        LatencyModel(Fraction(1), Fraction(1, 10)), 0.6, sp=12, tokens=50, spec=SpecConfig(lookahead=1)
    )
    two = SimulationConfig(
        LatencyModel(Fraction(1), Fraction(1, 10)), 0.6, sp=12, tokens=50, drafters=2, spec=SpecConfig(lookahead=1)
    )
    alone, together = (fmean(float(setting.run("dsi", seed).ms) for seed in range(30)) for setting in (one, two))
    assert together < 0.85 * alone


def test_distributed_with_one_target_and_min_draft_is_si() -> None:
    """The two ends of one family: at SP 1, min_draft = lookahead verifies the same blocks as SI."""
    setting = SimulationConfig(LatencyModel(Fraction(7), Fraction(1)), 0.0, sp=1, tokens=30)
    for seed in range(5):
        assert took(setting, distributed(4, min_draft=4), seed) == took(setting, speculative(4), seed)
