"""TTFT, TPOT and the curve, on models whose latency is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dsi.core.sequence import Tokens
from dsi.experiments import latency
from dsi.experiments.latency import PairLatencies, Spread, Timing, curve, latencies, timing
from dsi.models.kv_sequence import common_prefix_length
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget


@dataclass
class Slow:
    """A model that takes a base and so much for each token that it has not read; the clock is its own."""

    base: float
    each: float
    clock: list[float]
    read: list[int] = field(default_factory=list)

    def answer(self, request: ForwardRequest) -> Tokens:
        kept = min(common_prefix_length(self.read, request.tokens), request.start - 1)
        self.clock[0] += self.base + self.each * (len(request.tokens) - kept)
        self.read = list(request.tokens)
        return ToyTarget(1).answer(request)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], Slow]:
    clock = [0.0]
    monkeypatch.setattr(latency, "perf_counter", lambda: clock[0])
    return lambda base, each: Slow(base, each, clock)


def test_timing_has_one_prefill_per_text(slow: Callable[[float, float], Slow]) -> None:
    prompts = [(1, 2, 3), (1, 2, 3, 4, 5)]
    result = timing(lambda: slow(0.010, 0.001), prompts, tokens=4)
    assert (result.tpot_ms.mean, result.ttft_ms.mean) == pytest.approx((11, 14))
    assert (result.tpot_ms.stdev, result.ttft_ms.stdev) == pytest.approx((0, 2**0.5), abs=1e-9)
    assert result.ratio == pytest.approx(14 / 11)


def test_curve_is_the_time_by_new_tokens(slow: Callable[[float, float], Slow]) -> None:
    result = curve(slow(0.010, 0.002), (1, 2, 3))
    assert result == {width: pytest.approx(10 + 2 * width) for width in (1, 2, 4, 8, 16, 32, 64)}
    assert list(curve(slow(0.010, 0.002), (1, 2, 3), context=12)) == [1, 2, 4, 8]


def test_latencies_of_both_models_and_the_slope(slow: Callable[[float, float], Slow]) -> None:
    calls: list[None] = []
    result = latencies(
        lambda: slow(0.010, 0.002),
        lambda: slow(0.001, 0),
        [(1, 2, 3)] * 3,
        5,
        progress=lambda: calls.append(None),
    )
    assert (result.per_token_ms, result.drafter_share) == pytest.approx((2, 1 / 12))
    document = result.json()
    assert document["target"]["ttft_over_tpot"] == pytest.approx(16 / 12)
    assert document["curve"][1] == {"new_tokens": 2, "ms": pytest.approx(14)}
    assert len(calls) == 6


def test_per_token_ms_of_a_falling_curve_is_zero() -> None:
    some = Timing(Spread(2.0, 0.0), Spread(1.0, 0.0))
    assert [PairLatencies(some, some, points).per_token_ms for points in ({1: 3.0, 2: 2.0}, {1: 3.0})] == [
        0,
        0,
    ]


def test_timing_measures_real_time() -> None:
    class Sleepy(ToyTarget):
        def answer(self, request: ForwardRequest) -> Tokens:
            time.sleep(0.002)
            return super().answer(request)

    result = timing(Sleepy, [(1, 2)], tokens=5)
    assert 2 <= result.tpot_ms.mean < 30


def test_latencies_refuse_one_token() -> None:
    with pytest.raises(ValueError, match="tokens 1: must be at least 2"):
        latencies(ToyTarget, ToyTarget, [(1, 2)], tokens=1)
