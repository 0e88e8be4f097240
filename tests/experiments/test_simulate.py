from dataclasses import replace

import pytest

from dsi.experiments.simulate import best, simulate
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

CONFIG = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=4, tokens=40)


def test_simulate_runs_auto() -> None:
    config = SimulationConfig(LatencyModel(20.0, 2.0, target_ttft_ms=50.0, drafter_ttft_ms=4.0), 0.3, 3, 60)
    found, plain = simulate(config, "auto", repeats=3), simulate(config, "nonsi", repeats=3)
    assert found.title == "auto"
    assert found.lookahead is None
    assert found.mean_ms < plain.mean_ms


def test_simulate_nonsi_is_target_latency_times_tokens() -> None:
    result = simulate(CONFIG, "nonsi", repeats=3)
    assert (result.mean_ms, result.stdev_ms, result.tokens_per_second) == (800, 0, 50)
    assert (result.target_forwards, result.hidden, result.drafted, result.lookahead) == (40, 0, 0, None)
    assert result.busy["target-1"] == pytest.approx(1)
    assert result.busy["target-2"] == result.busy["drafter"] == 0


def test_simulate_si_with_a_perfect_drafter_is_blocks_in_a_row() -> None:
    result = simulate(replace(CONFIG, acceptance=1.0).with_spec(lookahead=4), "si", repeats=2)
    assert result.mean_ms == 8 * (4 * 2 + 20)  # five tokens at a time
    assert (result.drafted, result.wasted_drafts, result.hidden) == (32, 0, 0)


def test_simulate_dsi_with_a_perfect_drafter_hides_all_but_the_last_forward() -> None:
    result = simulate(replace(CONFIG, acceptance=1.0, sp=11).with_spec(lookahead=1), "dsi", repeats=2)
    assert result.mean_ms == 39 * 2 + 20
    # The first forward and the last are waited for in part: 98 ms of 40 forwards of 20 ms.
    assert result.hidden == pytest.approx(1 - 98 / 800)
    assert result.stale_forwards == 0


def test_simulate_hides_nothing_with_one_target() -> None:
    config = replace(CONFIG, acceptance=0.5, sp=1).with_spec(lookahead=1)
    for algorithm in ("dsi", "pearl"):
        result = simulate(config, algorithm, repeats=3)
        assert result.hidden == pytest.approx(0)
        assert result.mean_ms == pytest.approx(20 * result.target_forwards)
        assert result.stale_forwards == 0  # what never began was not given up


def test_simulate_gives_every_algorithm_the_same_draft_tokens() -> None:
    """The same seeds: SI and DSI accept the same guesses wherever both make them."""
    dsi, si = (simulate(replace(CONFIG, acceptance=0.5), name, repeats=20, seed=7) for name in ("dsi", "si"))
    assert dsi.mean_ms < si.mean_ms
    assert simulate(CONFIG, "dsi", repeats=5, seed=7) == simulate(CONFIG, "dsi", repeats=5, seed=7)


def test_best_takes_the_fastest_lookahead() -> None:
    tried = {k: simulate(CONFIG.with_spec(lookahead=k), "si", 10).mean_ms for k in (1, 5, 12)}
    chosen = best(CONFIG, "si", (1, 5, 12), (0,), repeats=10)
    assert (chosen.mean_ms, chosen.lookahead) == min((ms, k) for k, ms in tried.items())


def test_best_varies_min_draft_only_for_dsi() -> None:
    counted: list[int] = []
    for algorithm in ("nonsi", "si", "pearl", "dsi"):
        runs: list[None] = []
        best(CONFIG, algorithm, (2, 3), (0, 1, 2), repeats=1, progress=lambda: runs.append(None))  # noqa: B023
        counted.append(len(runs))
    assert counted == [1, 2, 2, 6]


def test_simulate_in_real_time_is_labelled_and_agrees_with_virtual_time() -> None:
    config = replace(CONFIG, tokens=20)
    waited, virtual = (simulate(config, "dsi", repeats=2, real_time=kind) for kind in (True, False))
    assert (waited.label, virtual.label) == ("waited", "simulated")
    assert 0.97 < waited.mean_ms / virtual.mean_ms < 1.5


@pytest.mark.parametrize(("algorithm", "expected"), [("nonsi", None), ("si", 6), ("pearl", 10), ("dsi", 3)])
def test_simulate_chooses_a_lookahead_that_suits_the_algorithm(algorithm: str, expected: int | None) -> None:
    assert CONFIG.lookahead_for(algorithm) == expected
    assert CONFIG.with_spec(lookahead=7).lookahead_for(algorithm) == (None if algorithm == "nonsi" else 7)


@pytest.mark.slow
def test_simulate_stale_forwards_cost_what_min_draft_gives_back() -> None:
    """Acceptance .63, target 27 times the drafter: whole forwards against full preemption, at SP 1 and 4."""

    def speed(sp: int, pieces: int, patiences: tuple[int, ...] = (0,)) -> float:
        config = SimulationConfig(LatencyModel(27.0, 1.0, cancel_points=pieces), 0.63, sp, tokens=100)
        return si / best(config, "dsi", (4, 9, 14), patiences, repeats=12).mean_ms

    si = best(SimulationConfig(LatencyModel(27.0, 1.0), 0.63, 1, tokens=100), "si", (5,), (0,), repeats=12).mean_ms
    assert speed(1, pieces=1) == pytest.approx(0.49, rel=0.06)
    assert speed(1, pieces=0) == pytest.approx(0.76, rel=0.06)
    assert speed(4, pieces=1) == pytest.approx(1.04, rel=0.06)
    assert speed(1, pieces=8, patiences=(6, 9)) == pytest.approx(1.00, rel=0.06)


def test_simulate_gives_the_latency_of_one_request_and_the_throughput_of_all() -> None:
    result = simulate(replace(CONFIG, requests=4), "nonsi", repeats=2)
    assert (result.mean_ms, result.tokens_per_second, result.requests) == (800, 200, 4)
    assert (result.target_forwards, result.hidden) == (160, 0)


def test_simulate_measures_the_hidden_share_of_each_request() -> None:
    plenty = replace(CONFIG, acceptance=1.0, sp=50, drafter_copies=4, requests=4).with_spec(lookahead=1)
    one = simulate(replace(plenty, requests=1), "dsi", repeats=1)
    many = simulate(plenty, "dsi", repeats=1)
    assert many.hidden == pytest.approx(one.hidden, abs=0.05)


def test_simulate_compares_failures_with_the_same_runs_without() -> None:
    result = simulate(replace(CONFIG, failures_per_hour=10_000, repair_s=1), "dsi", repeats=5)
    sound = simulate(CONFIG, "dsi", repeats=5)
    assert (result.unfailing_ms, sound.unfailing_ms, sound.failure_cost) == (sound.mean_ms, None, 1)
    assert result.failures > 0
    assert result.failure_cost == result.mean_ms / sound.mean_ms > 1


def test_simulate_refuses_zero_repeats() -> None:
    with pytest.raises(ValueError, match="repeats 0"):
        simulate(CONFIG, "dsi", repeats=0)
