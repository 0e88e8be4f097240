"""Which draft tree pays: size, depth and shape by expected tokens per time, from latencies and chances by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import TREE_BRANCHES, Chances, best_paths, levels, num_accepted, rank_chances
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import forward_ms

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # draft tokens that a verification may carry
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20)
ACCEPTANCE_STEPS, RUNNER_UP_STEPS = 25, 5
CAUTION = 0.1  # added to predictions for `auto`: a tree's forwards and the engine's work for it take a bit more
MAX_FORWARD = 3.0  # times as long as the narrowest, which a verification may take


def si_tree_ms(latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """Milliseconds per token of SI with the best tree of a size, in a long text."""
    turns = latency.under("si")
    rows = levels(chances, size, depth)
    drafting = sum(float(turns.drafter_ms + turns.drafter_per_token_ms * (row - 1)) for row in rows)
    messages = 2 * float(turns.drafter_delay_ms) + (2 + 2 * bool(rows)) * float(turns.network_ms)
    verifying = forward_ms(turns, 1 + size) + float(turns.engine_ms)
    return (drafting + messages + verifying) / (1 + num_accepted(chances, size, depth))


@lru_cache(4096)
def best_si_tree(latency: LatencyModel, acceptance: float, runner_up: float) -> tuple[SpecConfig, float] | None:
    """SI with the fastest tree that is no chain, and its milliseconds per token; None where chains are best."""
    chances = rank_chances(acceptance, runner_up, TREE_BRANCHES)
    turns = latency.under("si")
    most = MAX_FORWARD * forward_ms(turns, 1)
    sizes = [size for size in SIZES if forward_ms(turns, 1 + size) <= most] or SIZES[:1]
    shapes = [(size, depth) for size in sizes for depth in DEPTHS if depth <= size]
    trees = [(si_tree_ms(latency, chances, *shape), *shape) for shape in shapes if not is_chain(chances, *shape)]
    if not trees:
        return None
    ms, size, depth = min(trees)
    return SpecConfig("si", depth, max_targets=1, tree=size, chances=chances), ms


def is_chain(chances: Chances, size: int, depth: int) -> bool:
    """Whether the best tree of this size has first choices alone."""
    return not any(path[-1] for path, _ in best_paths(chances, size, depth))


@dataclass(frozen=True)
class TreePredictions:
    """Predicts SI with trees from a latency model, for `auto`."""

    latency: LatencyModel

    def best(self, scale: float, acceptance: float, runner_up: float) -> SpecConfig | None:
        best = best_si_tree(self._scaled(scale), *coarse(acceptance, runner_up))
        return best and best[0]

    def ms(self, spec: SpecConfig, scale: float, acceptance: float, runner_up: float) -> float:
        acceptance, runner_up = coarse(acceptance, runner_up)
        return (1 + CAUTION) * _predicted_ms(self._scaled(scale), spec, acceptance, runner_up)

    def _scaled(self, scale: float) -> LatencyModel:
        return self.latency if scale == 1 else self.latency.scaled(drafter=scale)


def coarse(acceptance: float, runner_up: float) -> tuple[float, float]:
    """Rates in steps for which predictions are kept: `auto` asks after every verification."""
    return round(ACCEPTANCE_STEPS * acceptance) / ACCEPTANCE_STEPS, round(RUNNER_UP_STEPS * runner_up) / RUNNER_UP_STEPS


@lru_cache(4096)
def _predicted_ms(latency: LatencyModel, spec: SpecConfig, acceptance: float, runner_up: float) -> float:
    chances = rank_chances(acceptance, runner_up, len(spec.chances))
    return si_tree_ms(latency, chances, spec.tree, spec.lookahead or 1)
