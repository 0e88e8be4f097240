"""The latency model: derived from curves, and scaled."""

import json
from fractions import Fraction

import pytest

from dsi.planning.latency import LatencyModel, monotone, without_noise


def test_latency_model_reads_measured_curves() -> None:
    latency = LatencyModel.measured(
        {1: 10.0, 64: 16.3},
        1.0,
        by_busy_targets=((1, 10.0), (7, 13.0)),
        drafter_by_busy_targets=((2, 1.2), (4, 1.5)),
    )
    assert latency.target_ms == 10.0
    assert latency.per_token_ms == pytest.approx(0.1)
    assert latency.contention_of(3) == latency.contention_of(7) == pytest.approx(0.05)
    assert [latency.drafter_beside(targets) for targets in (1, 2, 7)] == [1.0, 1.2, 1.5]
    assert latency.with_targets(7).contention == pytest.approx(0.05)
    assert latency.with_targets(7).drafter_ms == 1.5


def test_with_targets_takes_nothing_to_compute_beside_a_drafter_in_turns() -> None:
    latency = LatencyModel(10.0, 1.0, by_busy_targets=((1, 10.0), (2, 12.0)), drafter_by_busy_targets=((1, 1.8),))
    at_work = latency.with_targets(2)
    assert (at_work.under("dsi").drafter_ms, at_work.under("si").drafter_ms) == (1.8, 1.0)
    assert at_work.under("si").contention == 0
    assert at_work.with_targets(2) == at_work
    assert LatencyModel(10.0, 1.0).with_targets(2).alone is None


def test_latency_model_scales_exactly() -> None:
    latency = LatencyModel(Fraction(1, 3), 2, 4, 5, per_token_ms=1, by_width=((1, Fraction(1, 3)),))
    scaled = latency.scaled(target=Fraction(3), drafter=2)
    assert (scaled.target_ms, scaled.drafter_ms, scaled.prefill_ms) == (1, 4, (12, 10))
    assert (scaled.per_token_ms, scaled.by_width) == (3, ((1, 1),))
    assert latency.target(1000).tpot == Fraction(1, 3000)


def test_without_noise_takes_less_load_to_be_no_slower_than_more() -> None:
    assert without_noise({2: 2.5, 1: 6.0, 3: 2.7, 4: 2.6}) == ((1, 2.5), (2, 2.5), (3, 2.6), (4, 2.6))


def test_monotone_curve_never_falls() -> None:
    assert monotone({4: 9.0, 1: 8.0, 2: 9.5}) == ((1, 8.0), (2, 9.5), (4, 9.5))


def test_latency_model_under_turn_taking_algorithms_uses_every_core() -> None:
    alone = LatencyModel(10.0, 2.0, by_width=((1, 10.0), (8, 12.0)))
    latency = LatencyModel(20.0, 2.5, by_width=((1, 20.0), (8, 30.0)), alone=alone)
    assert latency.under("si") == latency.under("nonsi") == alone
    assert latency.under("dsi") is latency.under("pearl") is latency
    assert alone.under("si") is alone
    assert latency.scaled(2, 3).under("si") == alone.scaled(2, 3)
    assert LatencyModel.from_json(json.loads(json.dumps(latency.json()))) == latency
