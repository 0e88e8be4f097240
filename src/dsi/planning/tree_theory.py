"""The expected time of SI and DSI with draft trees, computed exactly: nothing is sampled, and nothing is simulated.

The target's token after a node is the drafter's choice of rank r with chance `chances[r]` and none of its choices
with the rest, independently from node to node. A drafter forward takes as long for many nodes as for one. What a
verification takes depends on its new tokens (`LatencyModel.by_width` or `per_token_ms`), and the keys and values of
accepted draft tokens are kept.
"""

from __future__ import annotations

from functools import lru_cache
from math import floor
from typing import Any, NamedTuple

import numpy as np

from dsi.core.tree_shape import Chances, best_paths
from dsi.planning import theory
from dsi.planning.equation_1 import to_fraction
from dsi.planning.latency import LatencyModel

Array = Any


class Round(NamedTuple):
    """One round of SI: a tree is drafted level by level, and verified in one forward."""

    levels: int  # drafter forwards
    nodes: int  # draft tokens
    chances: Array  # that exactly 0, 1, ... of them are accepted

    @property
    def accepted(self) -> float:
        """How many draft tokens are accepted on average."""
        return float(self.chances @ np.arange(len(self.chances)))


@lru_cache(1 << 15)
def best_round(chances: Chances, size: int, depth: int) -> Round:
    """The round of the best tree of a size and depth.

    The text runs through at most one node of each level, so the chance that it gets there is the sum of theirs.
    A tree of choices that are never right still has its first one.
    """
    if depth < 1:
        return Round(0, 0, np.ones(1))
    paths = best_paths(chances, size, depth) or (((0,), 0.0),)
    reached = np.zeros(2 + max(len(path) for path, _ in paths))
    reached[0] = 1.0
    for path, chance in paths:
        reached[len(path)] += chance
    return Round(len(reached) - 2, len(paths), reached[:-1] - reached[1:])


def si(tokens: int, latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """SI: draft the best tree of a size and depth, verify it, repeat."""
    theory.check_drafter(latency)
    drafts, verifications = si_forwards(tokens, latency, chances, size, depth)
    return drafts * float(latency.drafter_ms) + verifications + _prefill_ms(tokens, latency, chances, size, depth)


def si_forwards(tokens: int, latency: LatencyModel, chances: Chances, size: int, depth: int) -> tuple[float, float]:
    """The expected number of drafter forwards and time of target forwards under SI, without what prefills add.

    With r tokens to go, a tree is at most r - 1 deep: the target adds a token of its own.
    """
    left = np.zeros((tokens + 1, 2))  # still to come, by tokens to go
    for togo in range(1, tokens + 1):
        drafted = best_round(chances, size, min(depth, togo - 1))
        after = left[togo - len(drafted.chances) : togo][::-1]
        left[togo] = (drafted.levels, verification_ms(latency, drafted.nodes)) + drafted.chances @ after
    drafts, verifications = left[tokens]
    return float(drafts), float(verifications)


def verification_ms(latency: LatencyModel, nodes: int) -> float:
    """A forward over the target's last token and so many draft tokens."""
    for width, ms in latency.by_width:
        if nodes + 1 <= width:
            return float(ms)
    if latency.by_width:
        return float(latency.by_width[-1][1])
    return float(latency.target_ms + latency.per_token_ms * nodes)


def _prefill_ms(tokens: int, latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """What the first forwards, over the prompt, take longer than those they stand for; draft tokens are included."""
    first = best_round(chances, size, min(depth, tokens - 1))
    target_ms, drafter_ms = latency.prefill_ms
    longer = float(target_ms) - verification_ms(latency, first.nodes)
    return longer + (float(drafter_ms - latency.drafter_ms) if first.levels else 0.0)


def si_per_token(latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """The time per token of a long text: that of a round over the tokens it gives."""
    theory.check_drafter(latency)
    drafted = best_round(chances, size, depth)
    took = drafted.levels * float(latency.drafter_ms) + verification_ms(latency, drafted.nodes)
    return took / (1 + drafted.accepted)


def dsi(tokens: int, latency: LatencyModel, chances: Chances) -> float:
    """DSI with lookahead 1, as many targets as can be of use, and every place continued: Proposition 1 with trees.

    Level k below a new root is drafted k drafter forwards after it, whichever nodes turn out right, and verified at
    once. So a token that is among the drafter's choices comes one drafter forward after the token before it, and any
    other one target forward: as in Proposition 1, with the sum of the chances for the acceptance rate. No tree is
    faster: a node is verified no earlier than it is drafted, and it is drafted after all nodes on its path.

    The latencies do not depend on the number of new tokens. Trees of `places` nodes are enough.
    """
    return float(theory.dsi(tokens, latency, min(1.0, sum(chances)), 1))


def dsi_limited(tokens: int, latency: LatencyModel, chances: Chances, size: int) -> float:
    """The same with trees of a limited size: with as many of the choices as it can continue everywhere.

    Which other nodes are worth their place depends on all the text since the last rejection, so there is no exact
    time for the likeliest nodes of a limited tree: it is simulated. That of all choices is a lower bound.
    """
    likely = tuple(sorted(chances, reverse=True))
    count = max([1, *(n for n in range(1, len(likely) + 1) if places(latency, n) <= size)])
    return dsi(tokens, latency, likely[:count])


def places(latency: LatencyModel, branches: int) -> int:
    """How many draft tokens a verification must carry if every place is continued with so many choices.

    While a target verifies the first unverified place, the drafter adds floor(target / drafter) levels and begins
    another. A drafter forward expands the nodes of the last level but one: `1 / branches` of these.
    """
    slowest = max(to_fraction(latency.target_ms), to_fraction(latency.prefill_ms[0]))
    levels: int = floor(slowest / to_fraction(latency.drafter_ms)) + 1
    return int(branches**levels)
