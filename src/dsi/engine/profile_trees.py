"""Measures what draft trees take on servers: whole turns of SI, beyond what their forwards take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

from dsi.core.policies import policy_for
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.core.tree_policies import PRIOR_CHANCES
from dsi.core.tree_shape import levels
from dsi.fleets.loop import EngineLoop, Fleet
from dsi.planning.latency import LatencyModel
from dsi.planning.trees import turn_ms

TriedTrees = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # draft tokens and levels: few, wide, deep
ON_GPU: TriedTrees = ((3, 2), (31, 4), (31, 12))
ON_CPU: TriedTrees = ((3, 2), (11, 3), (11, 6))
CHAIN = 3  # draft tokens
TURN_TOKENS, LEAST_TURN_TOKENS = 256, 48  # of the text with each: trees near its end have fewer levels
TURNS, TURN_SECONDS = 12, 0.5


def with_trees(
    latency: LatencyModel, fleet: Fleet, prompt: Tokens, context: int, tried: TriedTrees = ON_GPU, chain: bool = False
) -> LatencyModel:
    """With what a level of a tree takes, a tree, and each node: from turns of SI with three trees on these servers.

    What a turn with a `chain` takes beyond its forwards, too, is not the tree's.
    """
    tokens = min(TURN_TOKENS, context - len(prompt))
    if tokens < LEAST_TURN_TOKENS:
        return latency
    loop = EngineLoop(fleet)
    few, wide, deep = (measured_turn_ms(loop, tree_spec(*tree), prompt, tokens) for tree in tried)
    if chain:
        measured = measured_turn_ms(loop, SpecConfig("si", CHAIN, max_targets=1), prompt, tokens)
        other = max(0.0, measured - turn_ms(latency, (1.0,), CHAIN, CHAIN))
        few, wide, deep = few - other, wide - other, deep - other
    return fitted_trees(latency, few, wide, deep, tried)


def tree_spec(size: int, depth: int) -> SpecConfig:
    return SpecConfig("si", depth, max_targets=1, tree=size, chances=PRIOR_CHANCES)


def fitted_trees(
    latency: LatencyModel, few: float, wide: float, deep: float, tried: TriedTrees = ON_GPU
) -> LatencyModel:
    """With the levels and nodes by which turns with these trees take as long as they were measured to."""

    def beyond(measured: float, tree: tuple[int, int]) -> float:
        return measured - turn_ms(latency, PRIOR_CHANCES, *tree)

    small, broad, tall = tried
    more_levels = len(levels(PRIOR_CHANCES, *tall)) - len(levels(PRIOR_CHANCES, *broad))
    level_ms = max(0.0, (beyond(deep, tall) - beyond(wide, broad)) / more_levels)
    latency = replace(latency, drafter_level_ms=level_ms)
    node_ms = max(0.0, (beyond(wide, broad) - beyond(few, small)) / (broad[0] - small[0]))
    return replace(latency, tree_node_ms=node_ms, tree_ms=max(0.0, beyond(few, small) - node_ms * small[0]))


def measured_turn_ms(loop: EngineLoop, spec: SpecConfig, prompt: Tokens, tokens: int) -> float:
    """The median time of a turn of SI, from one growth of the text to the next."""
    active, ends = loop.submit(Request(prompt, tokens, policy_for(spec))), list[float]()
    for _ in loop.follow(active):
        ends.append(float(active.times[-1]))
        if len(ends) > TURNS or ends[-1] - ends[0] > TURN_SECONDS:
            break
    if not active.done:
        loop.cancel(active)
    return 1000 * median(end - begin for begin, end in pairwise(ends if len(ends) > 1 else [0.0, *ends]))
