"""The exact expectations against a simulator that shares no code with them."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.messages import DRAFTER, TARGET
from dsi.core.policies import policy_for
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models.protocol import ForwardRequest, Model
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait
from dsi.planning import theory
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import PROMPT, SimulationConfig

ALGORITHMS: dict[str, Callable[..., float]] = {
    "nonsi": lambda tokens, latency, *_: theory.nonsi(tokens, latency),
    "si": lambda tokens, latency, p, lookahead, _: float(theory.si(tokens, latency, p, lookahead)),
    "dsi": lambda tokens, latency, p, lookahead, sp: float(theory.dsi(tokens, latency, p, lookahead, sp)),
}


@dataclass
class Scripted:
    """A drafter that is right exactly where the script says so."""

    target: Model
    script: tuple[bool, ...]

    def answer(self, request: ForwardRequest) -> Tokens:
        (truth,) = self.target.answer(request)
        place = len(request.tokens) - len(PROMPT)
        return (truth if self.script[place] else truth + 1,)


def expected(algorithm: str, case: "Case") -> Fraction:
    """The mean over every course that events can take, weighed by its chance: no sampling error at all."""
    total = Fraction(0)
    for script in product((True, False), repeat=case.tokens - 1):
        chance = case.p ** sum(script) * (1 - case.p) ** (len(script) - sum(script))
        total += chance * took(algorithm, case, script)
    return total


@dataclass(frozen=True)
class Case:
    tokens: int
    lookahead: int
    sp: int
    p: Fraction
    drafter: Fraction
    target_ttft: Fraction
    drafter_ttft: Fraction

    @property
    def latency(self) -> LatencyModel:
        return LatencyModel(Fraction(1), self.drafter, self.target_ttft, self.drafter_ttft)


def took(algorithm: str, case: Case, script: tuple[bool, ...]) -> Fraction:
    toy = ToyTarget(0)
    aim, fast = Latency(Fraction(1), case.target_ttft), Latency(case.drafter, case.drafter_ttft)
    servers = [Server(f"target-{i}", TARGET, Wait(toy, aim)) for i in range(case.sp)]
    servers.append(Server(DRAFTER, DRAFTER, Wait(Scripted(toy, script), fast)))
    policy = policy_for(SpecConfig(algorithm, case.lookahead))
    [done] = EngineLoop(SimulatedFleet(servers, thread_pool=True)).run(Request(PROMPT, case.tokens, policy))
    return Fraction(done.elapsed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hundredths = st.integers(1, 100).map(lambda n: Fraction(n, 100))
    drafter, target_ttft = draw(hundredths), 1 + draw(st.integers(0, 300)) / Fraction(100)
    longer = draw(hundredths) * (target_ttft - drafter)  # the drafter reads the prompt no slower
    return Case(
        tokens=draw(st.integers(1, 6)),
        lookahead=draw(st.integers(1, 5)),
        sp=draw(st.integers(1, 5)),
        p=draw(st.integers(0, 10)) / Fraction(10),
        drafter=drafter,
        target_ttft=target_ttft,
        drafter_ttft=drafter + draw(st.sampled_from([Fraction(0), longer])),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_theory_agrees_exactly_with_simulation_of_short_texts(algorithm: str, case: Case) -> None:
    exact = ALGORITHMS[algorithm](case.tokens, case.latency, float(case.p), case.lookahead, case.sp)
    assert exact == pytest.approx(float(expected(algorithm, case)), rel=1e-12)


@pytest.mark.parametrize("algorithm", ["si", "dsi"])
@pytest.mark.parametrize(
    ("drafter", "p", "lookahead", "sp", "tokens"),
    [(0.02, 0.7, 8, 7, 60), (0.1, 0.9, 2, 3, 50), (0.37, 0.5, 1, 2, 40), (0.7, 0.95, 4, 1, 40)],
)
def test_theory_agrees_within_sampling_error_with_simulation_of_long_texts(
    algorithm: str, drafter: float, p: float, lookahead: int, sp: int, tokens: int
) -> None:
    config = SimulationConfig(
        LatencyModel(1, drafter, target_ttft_ms=3, drafter_ttft_ms=drafter * 2),
        p,
        sp,
        tokens,
        spec=SpecConfig(lookahead=lookahead),
    )
    times = [config.run(algorithm, seed).ms for seed in range(150)]
    exact = ALGORITHMS[algorithm](tokens, LatencyModel(1, drafter, 3, drafter * 2), p, lookahead, sp)
    assert abs(fmean(times) - exact) < 4 * stdev(times) / sqrt(len(times))


def test_theory_accepts_arrays_of_acceptance_rates() -> None:
    rates = np.array([0.0, 0.3, 1.0])
    latency = LatencyModel(1, 0.25)
    for algorithm in (theory.si, theory.dsi):
        together = algorithm(20, latency, rates, 3)
        assert list(together) == [algorithm(20, latency, rate, 3) for rate in rates]


@pytest.mark.parametrize("drafter", [Fraction(1, 100), Fraction(7, 50), Fraction(1, 2), Fraction(1)])
def test_theory_dsi_does_not_change_with_lookaheads_beyond_a_verification(drafter: Fraction) -> None:
    latency, rates = LatencyModel(1, drafter), np.arange(11) / 10
    last = int(1 / drafter) + 2
    times = [theory.dsi(100, latency, rates, k, 7) for k in (last, last + 1, 2 * last, 200)]
    assert all(np.array_equal(times[0], each) for each in times[1:])


def test_theory_refuses_a_drafter_slower_than_its_target() -> None:
    with pytest.raises(ValueError, match=r"the drafter takes 2: must not be more than the target's 1"):
        theory.nonsi(5, LatencyModel(1, 2))
    with pytest.raises(ValueError, match=r"the drafter's first forward takes 3: .* the target's 2"):
        theory.dsi(5, LatencyModel(1, 0.5, 2, 3), 0.5, 1)
