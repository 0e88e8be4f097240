"""The expected time of SI and DSI with draft trees, computed exactly: nothing is sampled, and nothing is simulated.

The target's token after a node is the drafter's choice of rank r with chance `chances[r]` and none of its choices
with the rest, independently from node to node. A drafter forward takes as long for many nodes as for one. What a
verification takes depends on its new tokens (`LatencyModel.by_width` or `per_token_ms`), and the keys and values of
accepted draft tokens are kept. For DSI the chances may be arrays, and then so is the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, comb, floor
from typing import Any, NamedTuple

import numpy as np

from dsi.core.tree_shape import Chances, best_paths
from dsi.planning import theory
from dsi.planning.equation_1 import to_fraction
from dsi.planning.latency import LatencyModel

Array = Any  # a float or an array of floats
Unverified = dict[tuple[int, ...], Array]  # drafter forwards until each alternate is verified, oldest first: its chance


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
    if depth < size and (unlimited := best_round(chances, size, size)).levels <= depth:
        return unlimited
    paths = best_paths(chances, size, depth) or (((0,), 0.0),)
    reached = np.zeros(2 + max(len(path) for path, _ in paths))
    reached[0] = 1.0
    for path, chance in paths:
        reached[len(path)] += chance
    return Round(len(reached) - 2, len(paths), reached[:-1] - reached[1:])


def si(tokens: int, latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """SI: draft the best tree of a size and depth, verify it, repeat."""
    theory.check_drafter(latency)
    drafts, verifications_ms = si_forwards(tokens, latency, chances, size, depth)
    prefill_ms = latency.prefill_ms[1] - latency.drafter_ms if tokens > 1 else 0
    return drafts * float(latency.drafter_ms) + verifications_ms + float(prefill_ms)


def si_forwards(tokens: int, latency: LatencyModel, chances: Chances, size: int, depth: int) -> tuple[float, float]:
    """The expected number of drafter forwards, and the expected time of all target forwards, under SI.

    With r tokens to go, a tree is at most r - 1 deep: the target adds a token of its own. The first target forward
    reads the prompt, and takes as long whatever its width.
    """
    left = np.zeros((tokens + 1, 2))  # still to come, by tokens to go
    for togo in range(1, tokens + 1):
        drafted = best_round(chances, size, min(depth, togo - 1))
        after = left[togo - len(drafted.chances) : togo][::-1]
        left[togo] = (drafted.levels, verification_ms(latency, drafted.nodes)) + drafted.chances @ after
    drafts, verifications_ms = left[tokens]
    return float(drafts), float(verifications_ms - verification_ms(latency, drafted.nodes) + latency.prefill_ms[0])


def verification_ms(latency: LatencyModel, nodes: int) -> float:
    """A forward over the target's last token and so many draft tokens."""
    for width, ms in latency.by_width:
        if nodes + 1 <= width:
            return float(ms)
    if latency.by_width:
        return float(latency.by_width[-1][1])
    return float(latency.target_ms + latency.per_token_ms * nodes)


def si_per_token(latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """The time per token of a long text: that of a round over the tokens it gives."""
    theory.check_drafter(latency)
    drafted = best_round(chances, size, depth)
    took = drafted.levels * float(latency.drafter_ms) + verification_ms(latency, drafted.nodes)
    return took / (1 + drafted.accepted)


def dsi(tokens: int, latency: LatencyModel, chances: Sequence[Array]) -> Array:
    """DSI with lookahead 1, as many targets as can be of use, and every place continued: Proposition 1 with trees.

    Level k below a new root is drafted k drafter forwards after it, whichever nodes turn out right, and verified at
    once. So a token that is among the drafter's choices comes one drafter forward after the token before it, and any
    other one target forward: as in Proposition 1, with the sum of the chances for the acceptance rate. No tree is
    faster: a node is verified no earlier than it is drafted, and it is drafted after all nodes on its path.

    Latencies do not depend on the number of new tokens. Trees of `places` nodes are enough.
    """
    return theory.dsi(tokens, latency, _any_choice(chances), 1)


def places(latency: LatencyModel, branches: int) -> int:
    """How many draft tokens a verification must carry if every place is continued with so many choices.

    A drafter forward expands the nodes of the level before: `1 / branches` of these.
    """
    return int(branches ** _unverified_levels(latency))


def _unverified_levels(latency: LatencyModel) -> int:
    """How many levels are drafted or being drafted while a target verifies the first of them."""
    slowest = max(to_fraction(latency.target_ms), to_fraction(latency.prefill_ms[0]))
    return floor(slowest / to_fraction(latency.drafter_ms)) + 1


def dsi_with_alternates(tokens: int, latency: LatencyModel, chances: Sequence[Array], alternates: int) -> Array:
    """The same, but only paths with so many alternates (other than first choices) that are not verified go on.

    A place where one alternate too many was right waits until the first of them is verified. How long depends on the
    last few alternates alone, and a rejection is a renewal, so the time is exact. Each draft takes `paths` nodes, which
    is a polynomial of the number of unverified levels. Drafts follow one another: what is verified during one is known
    to the next (an idle drafter at the end of a text could begin sooner). Prefills take as long as other forwards.
    """
    theory.check_drafter(latency)
    if alternates < 1 or latency.prefill_ms != (latency.target_ms, latency.drafter_ms):
        raise ValueError(f"{alternates} alternates, prefills of {latency.prefill_ms} ms: must be at least 1, and none")
    q = np.asarray(_any_choice(chances), float)
    accepted = np.array([q**k for k in range(tokens)])  # the chance that the first k draft tokens are
    drafted = _drafted_at(tokens, latency, chances, alternates)
    known = float(latency.target_ms) + float(latency.drafter_ms) * drafted  # the token after each of them
    left = np.zeros((tokens + 1, *q.shape))  # by tokens to go
    for togo in range(1, tokens + 1):
        rejected = (1 - q) * (accepted[: togo - 1] * (known[: togo - 1] + left[togo - 1 : 0 : -1])).sum(axis=0)
        left[togo] = rejected + accepted[togo - 1] * known[togo - 1]
    return left[tokens]


def paths(latency: LatencyModel, branches: int, alternates: int) -> int:
    """How many nodes a drafter forward expands then, at most; a verification carries `branches` times as many."""
    levels = _unverified_levels(latency)
    return sum(comb(levels, count) * (branches - 1) ** count for count in range(alternates + 1))


def _any_choice(chances: Sequence[Array]) -> Array:
    return np.minimum(1.0, sum(chances))


def _drafted_at(tokens: int, latency: LatencyModel, chances: Sequence[Array], alternates: int) -> Array:
    """When the k-th token after a root is drafted on average, in drafter forwards, if all k are among the choices."""
    verification = ceil(to_fraction(latency.target_ms) / to_fraction(latency.drafter_ms))  # known at the next draft
    q = np.asarray(_any_choice(chances), float)
    first = np.divide(chances[0], q, out=np.ones_like(q), where=q > 0)
    states: Unverified = {(): np.ones_like(q)}
    gaps = np.zeros((tokens, *q.shape))
    for k in range(1, tokens):
        following: Unverified = defaultdict(float)
        for unverified, chance in states.items():
            gap = 1 + (unverified[0] if len(unverified) > alternates else 0)
            gaps[k] += chance * gap
            later = tuple(left - gap for left in unverified if left > gap)
            following[later] += chance * first
            following[(*later, verification - gap) if verification > gap else ()] += chance * (1 - first)
        states = following
    return gaps.cumsum(axis=0)
