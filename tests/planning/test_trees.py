"""The tree that pays: predictions against virtual time, chains where they are best, and `auto` with trees."""

from dataclasses import replace
from fractions import Fraction
from math import inf
from statistics import fmean

import pytest

from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import num_accepted, rank_chances
from dsi.paper.claims import bound
from dsi.planning.auto import best_config, cached_latency_table
from dsi.planning.equation_1 import best_si_lookahead, servers_needed
from dsi.planning.forecast import predicted_ms
from dsi.planning.latency import LatencyModel
from dsi.planning.search import PairProfile, search_processors
from dsi.planning.simulation import SimulationConfig
from dsi.planning.trees import (
    TreePredictions,
    around,
    best_si_tree,
    dsi_tree_ms,
    dsi_trees,
    is_chain,
    least_dsi_ms,
    si_tree_ms,
)

LATENCY = LatencyModel(20.0, 1.0, by_width=tuple((width, 20.0 + 0.1 * width) for width in range(1, 65)))
SLOW_ROWS = LatencyModel(20.0, 1.0, by_width=tuple((width, 20.0 * width) for width in range(1, 17)))


def simulated(spec: SpecConfig, acceptance: float, runner_up: float, tokens: int = 300) -> float:
    config = SimulationConfig(LATENCY, acceptance, 1, tokens, spec, runner_up_acceptance=runner_up, thread_pool=False)
    return fmean(config.run(spec, seed).ms for seed in range(6)) / tokens


@pytest.mark.slow
@pytest.mark.parametrize(("size", "depth"), [(4, 3), (16, 5)])
@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_prediction_is_what_virtual_time_gives(acceptance: float, size: int, depth: int) -> None:
    chances = rank_chances(acceptance, 0.5, 3)
    spec = SpecConfig("si", depth, max_targets=1, tree=size, chances=chances)
    assert si_tree_ms(LATENCY, chances, size, depth) == pytest.approx(simulated(spec, acceptance, 0.5), rel=0.04)


@pytest.mark.parametrize("lookahead", [1, 4, 9])
def test_prediction_of_a_chain_is_the_forecast(lookahead: int) -> None:
    config = SimulationConfig(LATENCY, 0.7, 1, 100, SpecConfig("si", lookahead), thread_pool=False)
    assert si_tree_ms(LATENCY, (0.7,), lookahead, lookahead) == pytest.approx(predicted_ms(config), rel=0.01)


def test_best_tree_is_wide_where_rows_are_cheap_and_small_where_they_are_not() -> None:
    wide, narrow = best_si_tree(LATENCY, 0.6, 0.5), best_si_tree(SLOW_ROWS, 0.6, 0.5)
    assert wide is not None
    assert narrow is not None
    assert wide[0].tree >= 31
    assert narrow[0].tree == 2
    block = best_si_lookahead(20.0, 1.0, 0.6)
    assert wide[1] < 0.75 * si_tree_ms(LATENCY, (0.6,), block, block)


def test_si_tree_ms_counts_what_a_level_takes_beyond_a_draft_token() -> None:
    slower = replace(LATENCY, drafter_level_ms=0.5)
    chances = rank_chances(0.8, 0.5, 3)
    tokens = 1 + num_accepted(chances, 12, 4)
    assert si_tree_ms(slower, chances, 12, 4) - si_tree_ms(LATENCY, chances, 12, 4) == pytest.approx(4 * 0.5 / tokens)


def test_si_tree_ms_counts_what_the_engine_does_for_a_tree_and_its_nodes() -> None:
    slower = replace(LATENCY, tree_ms=0.5, tree_node_ms=0.25)
    chances = rank_chances(0.8, 0.5, 3)
    tokens = 1 + num_accepted(chances, 12, 4)
    assert si_tree_ms(slower, chances, 12, 4) - si_tree_ms(LATENCY, chances, 12, 4) == pytest.approx(3.5 / tokens)


def test_tree_predictions_without_simulations_choose_si_alone() -> None:
    """As in a process with CUDA: with many targets DSI would be faster, and is not looked at."""
    config = SimulationConfig(LATENCY, 0.7, 8, 100, thread_pool=False)
    predictions = TreePredictions(config, on_servers=True, simulates=False)
    spec = predictions.best(1.0, 0.6, 0.4, inf)
    assert spec is not None
    assert spec.algorithm == "si"


def test_best_tree_is_never_a_chain() -> None:
    assert best_si_tree(SLOW_ROWS, 1.0, 0.5) is None
    for acceptance in (0.5, 0.8, 0.95):
        best = best_si_tree(LATENCY, acceptance, 0.5)
        assert best is not None
        assert not is_chain(best[0].chances, best[0].tree, best[0].lookahead or 1)


def test_auto_with_trees_simulates_none_where_rows_cost_too_much() -> None:
    """Two cores: a drafter beside one target, for which a row costs as much as a forward."""
    config = SimulationConfig(SLOW_ROWS, 0.5, 1, 60, runner_up_acceptance=0.6, thread_pool=False)
    for acceptance in (0.3, 0.5, 0.7, 0.9):
        rates = replace(config, acceptance=acceptance)
        chain = best_config(cached_latency_table(rates), acceptance)[1]
        assert least_dsi_ms(rates) > 0.999 * chain
        best = TreePredictions(config).best(1.0, acceptance, 0.6, chain)
        assert best is None or best.algorithm == "si"
    trees = config.with_spec(tree=64).run("auto", 3)
    assert not trees.completion.decisions[-1][1].spec.tree


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "runner_up", "gain"), [(0.5, 0.6, 1.7), (0.93, 0.2, 0.98)])
def test_auto_with_trees_is_nearly_the_best_configuration(acceptance: float, runner_up: float, gain: float) -> None:
    """It has to learn the rates, and is never slower than with chains alone; `benchmarks/adaptive.py` has a grid."""
    latency = LatencyModel(5.0, 1.0, cancel_points=8)
    config = SimulationConfig(latency, acceptance, 4, 150, runner_up_acceptance=runner_up, thread_pool=False)
    chains, trees = (fmean(config.with_spec(tree=size).run("auto", seed).ms for seed in range(3)) for size in (0, 32))
    fixed = [*dsi_trees(latency, 4), best_config(cached_latency_table(config), acceptance)[0]]
    best = min(fmean(config.run(spec, seed).ms for seed in range(3)) for spec in fixed)
    assert chains / trees > gain
    assert trees < best / 0.95


@pytest.mark.slow
@pytest.mark.parametrize("targets", [1, 4])
def test_dsi_tree_prediction_is_what_virtual_time_gives(targets: int) -> None:
    """With other texts, and longer ones; no tree is faster than the bound."""
    latency = LatencyModel(10.0, 1.0, per_token_ms=0.02, cancel_points=8)
    config = SimulationConfig(latency, 0.6, targets, 250, runner_up_acceptance=0.4, thread_pool=False)
    for spec in dsi_trees(latency, targets):
        texts = fmean(config.run(spec, seed).ms for seed in range(3)) / config.tokens
        assert dsi_tree_ms(config, spec) == pytest.approx(texts, rel=0.08)
        assert least_dsi_ms(config) < dsi_tree_ms(config, spec)


def test_around_weighs_the_simulated_rates_next_to_one() -> None:
    assert around(0.8) == {0.8: 1.0}
    assert around(0.7) == pytest.approx({0.6: 0.5, 0.8: 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.4, 0.63])
def test_dsi_with_trees_is_faster_than_proposition_1_lets_a_chain_be(acceptance: float) -> None:
    """With chains each rejection costs a target forward."""
    target_ms, drafter_ms, tokens = Fraction(20), Fraction(1), 60
    most = float(target_ms) * bound(drafter_ms / target_ms, tokens, acceptance)
    latency, targets = LatencyModel(target_ms, drafter_ms), servers_needed(target_ms, drafter_ms, 1) + 1
    config = SimulationConfig(latency, acceptance, targets, tokens, runner_up_acceptance=0.5)
    chain, tree = (
        fmean(config.run(SpecConfig("dsi", 1, tree=size), seed).ms for seed in range(10)) for size in (0, 16)
    )
    assert chain == pytest.approx(most, rel=0.1)
    assert tree < most / 1.5


@pytest.mark.slow
def test_plan_compares_trees_with_chains() -> None:
    profile = PairProfile({1: LATENCY}, {"match": 0.6}, runner_up_acceptance=0.5)
    plans = search_processors(profile, 4, seeds=range(2))
    best = {(plan.algorithm, bool(plan.spec.tree)): plan.ms for plan in reversed(plans)}
    assert best["si", True] < 0.8 * best["si", False]
    assert best["dsi", True] < best["dsi", False]
    assert not any(
        plan.spec.tree for plan in search_processors(replace(profile, runner_up_acceptance=0.0), 2, seeds=[0])
    )
