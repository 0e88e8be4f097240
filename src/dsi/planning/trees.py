"""Which draft tree pays: size, depth and shape by expected tokens per time, from latencies and chances by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import TREE_BRANCHES, Chances, levels, num_accepted, rank_chances
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import forward_ms

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # draft tokens that a verification may carry
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20)
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
def best_si_tree(latency: LatencyModel, acceptance: float, runner_up: float) -> tuple[SpecConfig, float]:
    """SI with the fastest tree that is no chain, and its milliseconds per token."""
    chances = rank_chances(acceptance, runner_up, TREE_BRANCHES)
    turns = latency.under("si")
    most = MAX_FORWARD * forward_ms(turns, 1)
    sizes = [size for size in SIZES if forward_ms(turns, 1 + size) <= most] or SIZES[:1]
    ms, size, depth = min(
        (si_tree_ms(latency, chances, size, depth), size, depth) for size in sizes for depth in DEPTHS if depth <= size
    )
    return SpecConfig("si", depth, max_targets=1, tree=size, chances=chances), ms


@dataclass(frozen=True)
class TreePredictions:
    """Predicts SI with trees from a latency model, for `auto`."""

    latency: LatencyModel

    def best(self, scale: float, acceptance: float, runner_up: float) -> SpecConfig:
        latency = self._scaled(scale)
        return best_si_tree(latency, round(acceptance, 2), round(runner_up, 1))[0]

    def ms(self, spec: SpecConfig, scale: float, acceptance: float, runner_up: float) -> float:
        chances = rank_chances(acceptance, runner_up, len(spec.chances))
        return si_tree_ms(self._scaled(scale), chances, spec.tree, spec.lookahead or 1)

    def _scaled(self, scale: float) -> LatencyModel:
        return self.latency if scale == 1 else self.latency.scaled(drafter=scale)
