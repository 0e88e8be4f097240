"""Which draft tree pays: by expected tokens per time under SI, and in virtual time under DSI.

The latencies say what forwards cost, the chances by rank which nodes become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from statistics import fmean
from typing import NamedTuple

from dsi.core.spec import SpecConfig
from dsi.core.tree_policies import PRIOR_CHANCES
from dsi.core.tree_shape import TREE_BRANCHES, Chances, best_paths, levels, num_accepted, rank_chances
from dsi.planning.background import Results
from dsi.planning.equation_1 import minimal_lookahead
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import forward_ms
from dsi.planning.simulation import SimulationConfig

SIZES = (2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95)  # draft tokens: with the root, rows that forwards are captured for
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20)
SHAPE_STEPS, RUNNER_UP_STEPS = 25, 5  # of the rates by which SI's tree is chosen
ACCEPTANCE_STEPS = 50  # as in the latency table, or chains would look better between the steps
CAUTION = 0.1  # added to predictions for servers: a tree's forwards and the engine's work for it take a bit more
SIMULATED_CAUTION = 0.02  # added to those for virtual time, where nothing else takes time
MAX_FORWARD = 3.0  # times as long as the narrowest, which a verification may take

DSI_SIZES = (4, 7, 8, 15, 16, 31, 32, 63, 64)  # some of them with the root the rows that forwards are captured for
FEW_TARGETS, MANY_TARGETS_SIZE = 2, 32  # with more targets than these few, larger trees gain nothing
DSI_LOOKAHEAD_SHARES = (0.4, 0.9)  # of the lookahead that Eq. (1) asks for
DSI_MIN_DRAFT, MOST_WAITING_TARGETS = 2, 4  # with more targets than these, a new root waits for no draft token
SHORT_LOOKAHEADS = (3, 6)  # below those that Eq. (1) asks for: a new root waits for as many levels, as under SI
DSI_TOKENS, DSI_SEEDS = 100, range(2000, 2003)  # of simulations
DSI_RATES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.92, 1.0)  # acceptance rates at which `auto` simulates
REFERENCE = SpecConfig("si", 4, max_targets=1, tree=16)  # is simulated with DSI, and known exactly
NODE_MS = 0.01  # that the engine takes to handle a draft token of a tree


def si_tree_ms(latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """Milliseconds per token of SI with the best tree of a size, in a long text."""
    return turn_ms(latency.under("si"), chances, size, depth) / (1 + num_accepted(chances, size, depth))


def turn_ms(latency: LatencyModel, chances: Chances, size: int, depth: int) -> float:
    """Drafting such a tree level by level, and verifying it."""
    rows = levels(chances, size, depth)
    level_ms = latency.drafter_ms + latency.drafter_level_ms
    drafting = sum(float(level_ms + latency.drafter_per_token_ms * (row - 1)) for row in rows)
    messages = 2 * float(latency.drafter_delay_ms) + (2 + 2 * bool(rows)) * float(latency.network_ms)
    handling = float(latency.engine_ms + latency.tree_ms + latency.tree_node_ms * size)
    return drafting + messages + forward_ms(latency, 1 + size) + handling


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


def dsi_trees(latency: LatencyModel, targets: int) -> list[SpecConfig]:
    """DSI with the trees that may be fastest on so many targets."""
    size, waits = dsi_size(latency, targets), targets <= MOST_WAITING_TARGETS
    lookaheads = dsi_lookaheads(latency, targets, size)
    min_drafts = {lookahead: min(DSI_MIN_DRAFT if waits else 0, lookahead) for lookahead in lookaheads}
    min_drafts |= {short: short for short in SHORT_LOOKAHEADS if waits and short < min(lookaheads)}
    return [
        SpecConfig("dsi", lookahead, min_draft, max_targets=targets, tree=size)
        for lookahead, min_draft in min_drafts.items()
    ]


def dsi_size(latency: LatencyModel, targets: int) -> int:
    """The tree with the most accepted tokens per time of a target.

    Where what a row costs was measured by width, it counts that a target that verifies in turn with another computes
    the other's nodes, too.
    """
    most = DSI_SIZES[-1] if targets <= FEW_TARGETS else MANY_TARGETS_SIZE
    sizes, turns = [size for size in DSI_SIZES if size <= most], 2 if targets > 1 and latency.by_width else 1
    return min(sizes, key=lambda size: _verification_ms(latency, PRIOR_CHANCES, size, turns * size))


def dsi_lookaheads(latency: LatencyModel, targets: int, size: int) -> list[int]:
    """Shares of the lookahead that Eq. (1) asks for with drafter forwards over several nodes."""
    least = minimal_lookahead(latency.target_ms, latency.drafter_ms, targets)
    nodes = max(1, size // least)
    draft_ms = latency.drafter_ms + latency.drafter_per_token_ms * (nodes - 1)
    least = minimal_lookahead(latency.target_ms, draft_ms, targets)
    return [max(1, round(least * share)) for share in DSI_LOOKAHEAD_SHARES]


@lru_cache(4096)
def dsi_bound_ms(latency: LatencyModel, spec: SpecConfig, acceptance: float, runner_up: float) -> float:
    """The least milliseconds per token that DSI with such trees can take in a long text.

    By Proposition 1 with trees, where a token that is among the choices comes a drafter forward after the one before
    it, and any other a target forward; and by the tokens that its targets can verify per time.
    """
    chances = rank_chances(acceptance, runner_up, TREE_BRANCHES)
    accepted = min(1.0, sum(chances))
    proposition_1 = accepted * float(latency.drafter_ms) + (1 - accepted) * forward_ms(latency, 1)
    sizes = [0, 1, *(size for size in SIZES if size <= spec.tree)]
    return max(proposition_1, min(_verification_ms(latency, chances, size) for size in sizes) / (spec.max_targets or 1))


def _verification_ms(latency: LatencyModel, chances: Chances, size: int, computed: int | None = None) -> float:
    """The time of a verification for each token that it gives at most, if it computes so many nodes."""
    width = 1 + (size if computed is None else computed)
    return forward_ms(latency, width) / (1 + num_accepted(chances, size, size))


def best_dsi_tree(config: SimulationConfig) -> tuple[SpecConfig, float]:
    """DSI with the fastest tree, and its milliseconds per token."""
    specs = dsi_trees(config.latency, config.sp)
    ms, fastest = min((dsi_tree_ms(config, spec), i) for i, spec in enumerate(specs))
    return specs[fastest], ms


def least_dsi_ms(config: SimulationConfig) -> float:
    """The least milliseconds per token that DSI with trees can take."""
    rates = config.acceptance, config.runner_up_acceptance
    return min(dsi_bound_ms(config.latency, spec, *rates) for spec in dsi_trees(config.latency, config.sp))


def tree_ms(config: SimulationConfig, spec: SpecConfig) -> float:
    """Milliseconds per token of a configuration with a tree, in a long text."""
    if spec.algorithm != "si":
        return dsi_tree_ms(config, spec)
    chances = rank_chances(config.acceptance, config.runner_up_acceptance, TREE_BRANCHES)
    return si_tree_ms(config.latency, chances, spec.tree, spec.lookahead or 1)


@lru_cache(4096)
def dsi_tree_ms(config: SimulationConfig, spec: SpecConfig) -> float:
    """Milliseconds per token of DSI with trees in a long text: in virtual time, corrected for the texts' luck.

    SI on the same texts is simulated beside it, and its expectation is exact.
    """
    latency = with_wide_forwards(replace(config.latency, jitter=0, network_jitter=0))
    rates = config.acceptance, config.runner_up_acceptance
    config = replace(config, latency=latency, tokens=DSI_TOKENS, sp=spec.max_targets or config.sp)
    exact = si_tree_ms(latency, rank_chances(*rates, TREE_BRANCHES), REFERENCE.tree, REFERENCE.lookahead or 1)
    reference = fmean(_steady_ms(replace(config, sp=1), REFERENCE, seed) for seed in DSI_SEEDS)
    return fmean(_steady_ms(config, spec, seed) for seed in DSI_SEEDS) * exact / reference


def _steady_ms(config: SimulationConfig, spec: SpecConfig, seed: int) -> float:
    """Milliseconds per token after the first ones."""
    times = [float(time) for time in config.run(spec, seed).completion.times]
    return (times[-1] - times[0]) / sum(time > times[0] for time in times)


def with_wide_forwards(latency: LatencyModel) -> LatencyModel:
    """With forwards wider than measured: a target that verifies by turns computes other targets' nodes, too."""
    if not latency.by_width:
        return latency
    widest = latency.by_width[-1][0]
    wider = tuple((width, forward_ms(latency, width) + float(latency.engine_ms)) for width in (2 * widest, 4 * widest))
    return replace(latency, by_width=latency.by_width + wider)


class ScaledTrees(NamedTuple):
    """What depends on the speed of the drafter alone."""

    latency: LatencyModel
    overlapping: LatencyModel  # under DSI
    dsi: tuple[SpecConfig, ...]  # the trees that are predicted


def scaled_trees(config: SimulationConfig, scale: float, node_ms: float) -> ScaledTrees:
    """With what the engine does for each node that a drafter forward returns: the drafter waits for that.

    Where targets slow one another down, DSI may also use half of them.
    """
    latency = config.latency if scale == 1 else config.latency.scaled(drafter=scale)
    overlapping = replace(latency, drafter_per_token_ms=latency.drafter_per_token_ms + node_ms) if node_ms else latency
    slowed = latency.contention or latency.by_busy_targets
    degrees = sorted({config.sp, max(1, config.sp // 2)}) if slowed else [config.sp]
    return ScaledTrees(latency, overlapping, tuple(spec for sp in degrees for spec in dsi_trees(overlapping, sp)))


class TreePredictions:
    """Predicts SI and DSI with trees, for `auto`; `on_servers`, no text waits for what has to be simulated.

    Without `simulates`, as in a process with CUDA, which cannot fork one that does, it predicts SI alone.
    """

    def __init__(self, config: SimulationConfig, on_servers: bool = False, simulates: bool = True) -> None:
        self._config, self._on_servers = replace(config, spec=SpecConfig()), on_servers
        self._simulates = simulates
        self._caution = 1 + (CAUTION if on_servers else SIMULATED_CAUTION)
        self.simulated: Results[tuple[float, float, float], dict[SpecConfig, float]] = Results(self._simulate)
        self._by_scale: dict[float, ScaledTrees] = {}
        self._least: dict[tuple[float, float, float], float] = {}  # milliseconds per token of DSI, by scale and rates

    def best(self, scale: float, acceptance: float, runner_up: float, limit_ms: float) -> SpecConfig | None:
        """The fastest tree; DSI is simulated only if it may take less than so many milliseconds per token."""
        rates, latency = coarse(acceptance, runner_up), self._scaled(scale).latency
        best = best_si_tree(latency, *coarse(acceptance, runner_up, SHAPE_STEPS))
        spec, ms = (best[0], _predicted_ms(latency, best[0], *rates)) if best else (None, inf)
        limit_ms = min(ms, limit_ms / self._caution)
        times = [(self._dsi_ms(other, scale, rates), other) for other in self._dsi_trees(scale, rates, limit_ms)]
        dsi_ms, dsi = min(times, key=lambda row: row[0], default=(inf, None))
        if dsi is not None and dsi_ms < ms:
            return replace(dsi, chances=rank_chances(*rates, TREE_BRANCHES))
        return spec

    def ms(self, spec: SpecConfig, scale: float, acceptance: float, runner_up: float) -> float:
        rates = coarse(acceptance, runner_up)
        if spec.algorithm == "dsi":
            return self._caution * self._dsi_ms(replace(spec, chances=()), scale, rates)
        return self._caution * _predicted_ms(self._scaled(scale).latency, spec, *rates)

    def _scaled(self, scale: float) -> ScaledTrees:
        if scale not in self._by_scale:
            node_ms = TREE_BRANCHES * NODE_MS if self._on_servers else 0
            self._by_scale[scale] = scaled_trees(self._config, scale, node_ms)
        return self._by_scale[scale]

    def _dsi_trees(self, scale: float, rates: tuple[float, float], limit_ms: float) -> Sequence[SpecConfig]:
        """All that are predicted, if one of them may be faster; none while predictions are missing."""
        if not self._simulates or not rates[1] or self._least_ms(scale, rates) >= limit_ms:
            return ()
        if self._on_servers and not all(self.simulated.is_ready((scale, rate, rates[1])) for rate in around(rates[0])):
            return ()
        return self._scaled(scale).dsi

    def _least_ms(self, scale: float, rates: tuple[float, float]) -> float:
        key = scale, *rates
        if key not in self._least:
            scaled = self._scaled(scale)
            self._least[key] = min(dsi_bound_ms(scaled.overlapping, spec, *rates) for spec in scaled.dsi)
        return self._least[key]

    def _dsi_ms(self, spec: SpecConfig, scale: float, rates: tuple[float, float]) -> float:
        """Interpolated between acceptance rates; if only one of them is predicted yet, as there."""
        keys = {(scale, rate, rates[1]): weight for rate, weight in around(rates[0]).items()}
        if self._on_servers:
            keys = {key: weight for key, weight in keys.items() if self.simulated.has(key)}
        if not keys:
            return inf
        times = (
            (self.simulated[key].get(spec, inf), weight) for key, weight in keys.items()
        )  # a scale has its own trees
        return sum(weight * ms for ms, weight in times) / sum(keys.values())

    def _simulate(self, key: tuple[float, float, float]) -> dict[SpecConfig, float]:
        scale, acceptance, runner_up = key
        scaled = self._scaled(scale)
        rates = replace(self._config, acceptance=acceptance, runner_up_acceptance=runner_up)
        return {spec: dsi_tree_ms(replace(rates, latency=scaled.overlapping), spec) for spec in scaled.dsi}


def around(acceptance: float) -> dict[float, float]:
    """The simulated rates next to this one, each with its weight."""
    if acceptance in DSI_RATES:
        return {acceptance: 1.0}
    above = next(rate for rate in DSI_RATES if rate > acceptance)
    below = DSI_RATES[DSI_RATES.index(above) - 1]
    weight = (acceptance - below) / (above - below)
    return {below: 1 - weight, above: weight}


def coarse(acceptance: float, runner_up: float, steps: int = ACCEPTANCE_STEPS) -> tuple[float, float]:
    """Rates in steps for which predictions are kept: `auto` asks after every verification."""
    return round(steps * acceptance) / steps, round(RUNNER_UP_STEPS * runner_up) / RUNNER_UP_STEPS


@lru_cache(4096)
def _predicted_ms(latency: LatencyModel, spec: SpecConfig, acceptance: float, runner_up: float) -> float:
    chances = rank_chances(acceptance, runner_up, len(spec.chances))
    return si_tree_ms(latency, chances, spec.tree, spec.lookahead or 1)
