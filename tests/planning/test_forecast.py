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
def test_dsi_and_si_as_theory_says(target: int, drafter: int, sp: int, lookahead: int, acceptance: float) -> None:
    setting = SimulationConfig(
        LatencyModel(target, drafter), acceptance, sp, 100, thread_pool=False, spec=SpecConfig(lookahead=lookahead)
    )
    latencies = LatencyModel(target, drafter)
    dsi = float(theory.dsi(LONG, latencies, acceptance, lookahead, sp)) / LONG
    si = float(theory.si(LONG, latencies, acceptance, lookahead)) / LONG
    assert predicted_ms(setting, "dsi") == pytest.approx(dsi, rel=0.005)
    assert predicted_ms(setting, "si") == pytest.approx(si, rel=0.005)
    assert predicted_ms(setting, "nonsi") == pytest.approx(target)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "way",
    [
        SpecConfig("dsi", 2, 0, max_targets=3),
        SpecConfig("dsi", 5, 4, max_targets=1),
        SpecConfig("dsi", 4, 1, max_targets=2),
    ],
)
def test_what_theory_leaves_out_as_the_simulator_says(way: SpecConfig, acceptance: float) -> None:
    """Contention, forwards that cannot be stopped at once, wide ones that take longer, patience."""
    setting = SimulationConfig(
        LatencyModel(20.0, 2.0, contention=0.1, cancel_points=8, by_width=((1, 20.0), (4, 24.0), (64, 30.0))),
        acceptance,
        way.max_targets or 1,
        400,
        thread_pool=False,
    )
    rehearsed = fmean(setting.run(way, seed).ms for seed in range(12)) / 400
    assert predicted_ms(setting, way) == pytest.approx(rehearsed, rel=0.06)


def test_several_drafters_go_on_while_one_branch_stands() -> None:
    setting = SimulationConfig(LatencyModel(20.0, 2.0), 0.7, 4, 300, drafters=2, thread_pool=False)
    way = SpecConfig("dsi", 3, 0, max_targets=4)
    rehearsed = fmean(setting.run(way, seed).ms for seed in range(12)) / 300
    assert predicted_ms(setting, way) == pytest.approx(rehearsed, rel=0.08)
    assert predicted_ms(setting, way) < predicted_ms(replace(setting, drafters=1), way)


def test_virtual_time_in_fractions_is_foretold_as_well() -> None:
    setting = SimulationConfig(
        LatencyModel(Fraction(20), Fraction(7, 3)), 0.5, 2, 50, thread_pool=False, spec=SpecConfig(lookahead=2)
    )
    assert predicted_ms(setting, "dsi") == pytest.approx(
        float(theory.dsi(LONG, LatencyModel(Fraction(20), Fraction(7, 3)), 0.5, 2, 2)) / LONG, rel=0.005
    )


def test_a_stretch_counts_as_much_as_the_one_before_it_is_likely() -> None:
    known = RenewalModel((Segment(0, (10.0,)), Segment(5, (20.0,))), (1.0,))
    assert known.ms(0.0) == pytest.approx(10.0)
    assert known.ms(0.5) == pytest.approx(0.5 * (10 + 20 / 32) / (1 + 1 / 32) + 0.5 * 1.0)


def test_the_long_run_is_measured_between_the_ends_of_blocks() -> None:
    rises, cycle = split_period([7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0], 0.5)
    assert list(cycle) == [3.0, 0.0, 0.0]
    assert list(rises) == [7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 3.0, 0.0, 0.0]
    assert list(split_period([7.0, 0.0, 3.0, 0.0, 3.0], 2.0)[1]) == [4.0, 0.0]


def test_a_useless_drafter_leaves_plain_decoding() -> None:
    known = latency_table(
        SimulationConfig(LatencyModel(20.0, 2.0, contention=0.3), 0.5, 2, 100, thread_pool=False), drafter_scales=(1.0,)
    )
    way, ms = best_config(known, 0.0)
    assert not way.speculates
    assert ms == pytest.approx(20.0)
    way, ms = best_config(known, 0.95)
    assert way.speculates
    assert ms < 8


def test_jitter_hardly_changes_the_mean() -> None:
    setting = SimulationConfig(
        LatencyModel(20.0, 2.0, jitter=0.3), 0.7, 3, 300, thread_pool=False, spec=SpecConfig(lookahead=3)
    )
    rehearsed = fmean(setting.run("dsi", seed).ms for seed in range(12)) / 300
    assert predicted_ms(setting, "dsi") == pytest.approx(rehearsed, rel=0.05)
    assert predicted_ms(replace(setting, acceptance=0.0), "nonsi") == pytest.approx(20.0)


@pytest.mark.parametrize("block", [24, 30, 60])
def test_long_blocks_repeat_themselves_too(block: int) -> None:
    setting = SimulationConfig(
        LatencyModel(30.0, 0.3), 0.93, 1, 100, thread_pool=False, spec=SpecConfig(lookahead=block)
    )
    si = float(theory.si(LONG, LatencyModel(30, 0.3), 0.93, block)) / LONG
    assert predicted_ms(setting, "si") == pytest.approx(si, rel=0.005)
