"""One run in which all is right foretells the others."""

from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import pytest

from dsi.core.spec import SpecConfig
from dsi.planning import theory
from dsi.planning.auto import best_config, latency_table
from dsi.planning.forecast import RenewalModel, Segment, predicted_ms, split_period
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

LONG = 4000  # tokens, so that the ends of a text do not count


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize(("target", "drafter", "sp", "lookahead"), [(20, 2, 4, 3), (20, 6, 2, 2), (8, 1, 7, 1)])
def test_predicted_ms_agrees_with_theory(target: int, drafter: int, sp: int, lookahead: int, acceptance: float) -> None:
    config = SimulationConfig(
        LatencyModel(target, drafter), acceptance, sp, 100, thread_pool=False, spec=SpecConfig(lookahead=lookahead)
    )
    latencies = LatencyModel(target, drafter)
    dsi = float(theory.dsi(LONG, latencies, acceptance, lookahead, sp)) / LONG
    si = float(theory.si(LONG, latencies, acceptance, lookahead)) / LONG
    assert predicted_ms(config, "dsi") == pytest.approx(dsi, rel=0.005)
    assert predicted_ms(config, "si") == pytest.approx(si, rel=0.005)
    assert predicted_ms(config, "nonsi") == pytest.approx(target)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig("dsi", 2, 0, max_targets=3),
        SpecConfig("dsi", 5, 4, max_targets=1),
        SpecConfig("dsi", 4, 1, max_targets=2),
    ],
)
def test_predicted_ms_agrees_with_simulation_where_theory_does_not_apply(spec: SpecConfig, acceptance: float) -> None:
    """Contention, forwards that cannot be cancelled at once, wide ones that take longer, min_draft."""
    config = SimulationConfig(
        LatencyModel(20.0, 2.0, contention=0.1, cancel_points=8, by_width=((1, 20.0), (4, 24.0), (64, 30.0))),
        acceptance,
        spec.max_targets or 1,
        400,
        thread_pool=False,
    )
    simulated = fmean(config.run(spec, seed).ms for seed in range(12)) / 400
    assert predicted_ms(config, spec) == pytest.approx(simulated, rel=0.06)


@pytest.mark.slow
def test_predicted_ms_of_several_drafters_agrees_with_simulation() -> None:
    config = SimulationConfig(LatencyModel(20.0, 2.0), 0.7, 4, 300, drafters=2, thread_pool=False)
    spec = SpecConfig("dsi", 3, 0, max_targets=4)
    simulated = fmean(config.run(spec, seed).ms for seed in range(12)) / 300
    assert predicted_ms(config, spec) == pytest.approx(simulated, rel=0.08)
    assert predicted_ms(config, spec) < predicted_ms(replace(config, drafters=1), spec)


def test_predicted_ms_accepts_fractions() -> None:
    config = SimulationConfig(
        LatencyModel(Fraction(20), Fraction(7, 3)), 0.5, 2, 50, thread_pool=False, spec=SpecConfig(lookahead=2)
    )
    assert predicted_ms(config, "dsi") == pytest.approx(
        float(theory.dsi(LONG, LatencyModel(Fraction(20), Fraction(7, 3)), 0.5, 2, 2)) / LONG, rel=0.005
    )


def test_renewal_model_weighs_segments_by_probability() -> None:
    model = RenewalModel((Segment(0, (10.0,)), Segment(5, (20.0,))), (1.0,))
    assert model.ms(0.0) == pytest.approx(10.0)
    assert model.ms(0.5) == pytest.approx(0.5 * (10 + 20 / 32) / (1 + 1 / 32) + 0.5 * 1.0)


def test_split_period_ends_at_block_starts() -> None:
    start, cycle = split_period([7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0], 0.5)
    assert list(cycle) == [3.0, 0.0, 0.0]
    assert list(start) == [7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0]
    assert list(split_period([7.0, 0.0, 3.0, 0.0, 3.0], 2.0)[1]) == [4.0, 0.0]


def test_latency_table_chooses_no_speculation_for_a_useless_drafter() -> None:
    model = latency_table(
        SimulationConfig(LatencyModel(20.0, 2.0, contention=0.3), 0.5, 2, 100, thread_pool=False), drafter_scales=(1.0,)
    )
    spec, ms = best_config(model, 0.0)
    assert not spec.speculates
    assert ms == pytest.approx(20.0)
    spec, ms = best_config(model, 0.95)
    assert spec.speculates
    assert ms < 8


def test_predicted_ms_ignores_jitter() -> None:
    config = SimulationConfig(
        LatencyModel(20.0, 2.0, jitter=0.3), 0.7, 3, 300, thread_pool=False, spec=SpecConfig(lookahead=3)
    )
    simulated = fmean(config.run("dsi", seed).ms for seed in range(12)) / 300
    assert predicted_ms(config, "dsi") == pytest.approx(simulated, rel=0.05)
    assert predicted_ms(replace(config, acceptance=0.0), "nonsi") == pytest.approx(20.0)


@pytest.mark.parametrize("block", [24, 30, 60])
def test_predicted_ms_finds_the_period_of_long_blocks(block: int) -> None:
    config = SimulationConfig(
        LatencyModel(30.0, 0.3), 0.93, 1, 100, thread_pool=False, spec=SpecConfig(lookahead=block)
    )
    si = float(theory.si(LONG, LatencyModel(30, 0.3), 0.93, block)) / LONG
    assert predicted_ms(config, "si") == pytest.approx(si, rel=0.005)
