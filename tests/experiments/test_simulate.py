from dataclasses import replace

import pytest

from dsi.experiments.simulate import best, simulate
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=4, tokens=40)


def test_auto_is_simulated_like_any_other() -> None:
    setting = SimulationConfig(LatencyModel(20.0, 2.0, target_ttft_ms=50.0, drafter_ttft_ms=4.0), 0.3, 3, 60)
    found, plain = simulate(setting, "auto", repeats=3), simulate(setting, "nonsi", repeats=3)
    assert found.title == "auto"
    assert found.lookahead is None
    assert found.mean_ms < plain.mean_ms


def test_non_si_is_the_targets_latency_times_the_tokens() -> None:
    result = simulate(SETTING, "nonsi", repeats=3)
    assert (result.mean_ms, result.stdev_ms, result.tokens_per_second) == (800, 0, 50)
    assert (result.target_forwards, result.hidden, result.drafted, result.lookahead) == (40, 0, 0, None)
    assert result.busy["target-1"] == pytest.approx(1)
    assert result.busy["target-2"] == result.busy["drafter"] == 0


def test_si_with_a_perfect_drafter_is_blocks_in_a_row() -> None:
    result = simulate(replace(SETTING, acceptance=1.0).with_spec(lookahead=4), "si", repeats=2)
    assert result.mean_ms == 8 * (4 * 2 + 20)  # five tokens at a time
    assert (result.drafted, result.wasted_drafts, result.hidden) == (32, 0, 0)


def test_dsi_with_a_perfect_drafter_hides_all_but_the_last_forward() -> None:
    result = simulate(replace(SETTING, acceptance=1.0, sp=11).with_spec(lookahead=1), "dsi", repeats=2)
    assert result.mean_ms == 39 * 2 + 20
    # The first forward and the last are waited for in part: 98 ms of 40 forwards of 20 ms.
    assert result.hidden == pytest.approx(1 - 98 / 800)
    assert result.stale_forwards == 0


def test_nothing_is_hidden_where_one_target_does_it_all() -> None:
    setting = replace(SETTING, acceptance=0.5, sp=1).with_spec(lookahead=1)
    for algorithm in ("dsi", "pearl"):
        result = simulate(setting, algorithm, repeats=3)
        assert result.hidden == pytest.approx(0)
        assert result.mean_ms == pytest.approx(20 * result.target_forwards)
        assert result.stale_forwards == 0  # what never began was not given up


def test_every_algorithm_meets_the_same_luck() -> None:
    """The same seeds: SI and DSI accept the same guesses wherever both make them."""
    dsi, si = (simulate(replace(SETTING, acceptance=0.5), name, repeats=20, seed=7) for name in ("dsi", "si"))
    assert dsi.mean_ms < si.mean_ms
    assert simulate(SETTING, "dsi", repeats=5, seed=7) == simulate(SETTING, "dsi", repeats=5, seed=7)


def test_the_best_of_several_lookaheads_is_taken() -> None:
    tried = {k: simulate(SETTING.with_spec(lookahead=k), "si", 10).mean_ms for k in (1, 5, 12)}
    chosen = best(SETTING, "si", (1, 5, 12), (0,), repeats=10)
    assert (chosen.mean_ms, chosen.lookahead) == min((ms, k) for k, ms in tried.items())


def test_patience_is_only_for_dsi() -> None:
    counted: list[int] = []
    for algorithm in ("nonsi", "si", "pearl", "dsi"):
        runs: list[None] = []
        best(SETTING, algorithm, (2, 3), (0, 1, 2), repeats=1, progress=lambda: runs.append(None))  # noqa: B023
        counted.append(len(runs))
    assert counted == [1, 2, 2, 6]


def test_waited_runs_are_labelled_and_agree_with_virtual_time() -> None:
    setting = replace(SETTING, tokens=20)
    waited, virtual = (simulate(setting, "dsi", repeats=2, real_time=kind) for kind in (True, False))
    assert (waited.label, virtual.label) == ("waited", "simulated")
    assert 0.97 < waited.mean_ms / virtual.mean_ms < 1.5


@pytest.mark.parametrize(("algorithm", "expected"), [("nonsi", None), ("si", 6), ("pearl", 10), ("dsi", 3)])
def test_a_lookahead_that_suits_the_algorithm(algorithm: str, expected: int | None) -> None:
    assert SETTING.lookahead_for(algorithm) == expected
    assert SETTING.with_spec(lookahead=7).lookahead_for(algorithm) == (None if algorithm == "nonsi" else 7)


def test_decision_7_a_stale_forward_costs_and_patience_gives_back() -> None:
    """Acceptance .63, target 27 times the drafter: whole forwards against full preemption, at SP 1 and 4."""

    def speed(sp: int, pieces: int, patiences: tuple[int, ...] = (0,)) -> float:
        setting = SimulationConfig(LatencyModel(27.0, 1.0, cancel_points=pieces), 0.63, sp, tokens=100)
        return si / best(setting, "dsi", (4, 9, 14), patiences, repeats=30).mean_ms

    si = best(SimulationConfig(LatencyModel(27.0, 1.0), 0.63, 1, tokens=100), "si", (5,), (0,), repeats=30).mean_ms
    assert speed(1, pieces=1) == pytest.approx(0.49, rel=0.06)
    assert speed(1, pieces=0) == pytest.approx(0.76, rel=0.06)
    assert speed(4, pieces=1) == pytest.approx(1.04, rel=0.06)
    assert speed(1, pieces=8, patiences=(6, 9)) == pytest.approx(1.00, rel=0.06)


def test_of_many_requests_the_time_is_of_one_and_the_speed_of_all() -> None:
    result = simulate(replace(SETTING, requests=4), "nonsi", repeats=2)
    assert (result.mean_ms, result.tokens_per_second, result.requests) == (800, 200, 4)
    assert (result.target_forwards, result.hidden) == (160, 0)


def test_what_is_hidden_is_told_of_each_request() -> None:
    plenty = replace(SETTING, acceptance=1.0, sp=50, drafter_copies=4, requests=4).with_spec(lookahead=1)
    one = simulate(replace(plenty, requests=1), "dsi", repeats=1)
    many = simulate(plenty, "dsi", repeats=1)
    assert many.hidden == pytest.approx(one.hidden, abs=0.05)


def test_what_failures_cost_is_told_against_the_same_runs_without() -> None:
    result = simulate(replace(SETTING, failures_per_hour=10_000, repair_s=1), "dsi", repeats=5)
    sound = simulate(SETTING, "dsi", repeats=5)
    assert (result.unfailing_ms, sound.unfailing_ms, sound.failure_cost) == (sound.mean_ms, None, 1)
    assert result.failures > 0
    assert result.failure_cost == result.mean_ms / sound.mean_ms > 1


def test_zero_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats 0"):
        simulate(SETTING, "dsi", repeats=0)
