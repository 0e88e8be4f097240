"""Search for the fastest deployment: candidates, each predicted by the forecast, the best few simulated.

On a given number of processors (`search_processors`), every algorithm is tried in every layout. Under non-SI and
SI a forward has all processors of its target, and SI's drafter runs on one of them in turn; under PEARL and DSI
the drafter has its own. On given devices (`search_devices`), only the number of targets is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import fmean
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import SpecConfig, default_max_lead
from dsi.core.tree_shape import num_accepted
from dsi.planning.equation_1 import amdahl, best_si_lookahead, minimal_lookahead, servers_needed
from dsi.planning.forecast import predicted_ms
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import TITLES, SimulationConfig
from dsi.planning.trees import best_dsi_tree, best_si_tree, least_dsi_ms, tree_ms

SHOWN = 5  # plans
FINALISTS = 10  # plans for processors that are simulated
SEEDS = range(2000, 2012)
TOKENS = 200
SI_SHARES = (0.6, 1, 1.4)  # of the block that is SI's best in theory
MOST_PROCESSORS = 1000
PROCESSOR_SP = (1, 2, 3, 4, 6, 8)  # SP degrees that are tried, besides the largest possible
TREE_LAYOUTS = 4  # in which DSI is simulated with trees

DEVICE_FINALISTS = 6  # plans of each algorithm for devices that are simulated
DEVICE_SEEDS = range(1004, 1016)
DEVICE_TOKENS = 80
DEVICE_SP = (1, 2, 3, 4, 5, 7, 11, 15)
DEVICE_LOOKAHEADS = (3, 4, 6, 8, 12)
DEVICE_LOOKAHEAD_SHARES = (0.3, 0.6, 1)  # of the lookahead that Eq. (1) asks for
DEVICE_MIN_DRAFTS = (0, 2)
DEVICE_MIN_DRAFT_SHARES = (0.5, 0.75)  # of the lookahead

AUTO_SP = (1, 2, 4, 8)  # SP degrees between which `auto` may switch, besides all targets
LOOKAHEADS = (1, 2, 5)
SI_BLOCKS = (1, 2, 3, 5)
HIGHEST_RATE = 0.97  # acceptance rate for which there is still a block of SI's
LOOKAHEAD_SHARES = (0.5, 1)  # of the lookahead that Eq. (1) asks for
MIN_DRAFT_RATES = (0.2, 0.4, 0.7, 0.9)  # acceptance rates at which SI's best block may be a good min_draft
LONGEST_BLOCK = 32

OLD_KEYS = {  # of `PairProfile.json`, kept for one release
    "rates": "acceptance",
    "second_hit": "runner_up_acceptance",
    "pieces": "cancel_points",
    "name": "drafter",
    "others": "alternatives",
}

Map = Callable[[Callable[[SimulationConfig], float], Iterable[SimulationConfig]], Iterable[float]]


@dataclass(frozen=True)
class PairProfile:
    """A pair of models as the planner sees it; `sources` says where each number comes from."""

    by_mp: Mapping[int, LatencyModel]  # by how many processors share each target forward
    acceptance: Mapping[str, float]  # by rule
    runner_up_acceptance: float = 0.0
    drafter_processors: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)
    drafter: str = ""  # its name, or the names of several in one tree
    drafters: int = 1  # whose joint acceptance this is, with the drafter latency of the slowest
    alternatives: tuple[PairProfile, ...] = ()  # the same target with other drafters

    @property
    def all(self) -> tuple[PairProfile, ...]:
        return (self, *self.alternatives)

    @property
    def latency(self) -> LatencyModel:
        """With as few processors to a target as possible."""
        return self.by_mp[min(self.by_mp)]

    def of(self, drafter: str) -> PairProfile:
        return next(profile for profile in self.all if profile.drafter == drafter)

    def simulation(self, mp: int, sp: int, rule: str = "match", tokens: int = TOKENS) -> SimulationConfig:
        """Toy drafters err independently: alone each is right as often as makes up the joint rate."""
        acceptance = self.acceptance[rule]
        if self.drafters > 1:
            acceptance = 1 - (1 - acceptance) ** (1 / self.drafters)
        latency, spec = self.by_mp[mp].with_targets(sp), SpecConfig(rule=rule)
        return SimulationConfig(latency, acceptance, sp, tokens, spec, drafters=self.drafters, thread_pool=False)

    def changed(self, acceptance: float = 0.0, drafter_slowdown: float = 1.0) -> PairProfile:
        """All acceptance rates so much higher, and all drafters so many times as slow."""
        return replace(
            self,
            acceptance={rule: min(1.0, max(0.0, rate + acceptance)) for rule, rate in self.acceptance.items()},
            by_mp={mp: latency.scaled(drafter=drafter_slowdown) for mp, latency in self.by_mp.items()},
            alternatives=tuple(other.changed(acceptance, drafter_slowdown) for other in self.alternatives),
        )

    def for_all(self, **fields: Any) -> PairProfile:
        """The same fields changed for every drafter."""
        others = tuple(replace(other, **fields) for other in self.alternatives)
        return replace(self, **fields, alternatives=others)

    def with_latency(self, **changes: Any) -> PairProfile:
        """The same latencies changed for every drafter and MP degree."""
        own = {mp: replace(latency, **changes) for mp, latency in self.by_mp.items()}
        others = tuple(other.with_latency(**changes) for other in self.alternatives)
        return replace(self, by_mp=own, alternatives=others)

    def split(self, least: int, processors: int, parallel_fraction: float) -> PairProfile:
        """Targets over `least` processors and more, where this fraction of a forward scales with their number."""
        by_mp, mp = {}, least
        while mp <= processors:
            by_mp[mp] = self.latency.scaled(target=amdahl(parallel_fraction, mp / least))
            mp *= 2
        others = tuple(other.split(least, processors, parallel_fraction) for other in self.alternatives)
        return replace(self, by_mp=by_mp, alternatives=others)

    def json(self) -> dict[str, Any]:
        """With the keys of the release before beside the new ones."""
        document = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "by_mp": {mp: model.by_width for mp, model in self.by_mp.items()},
            "drafter_ms": self.latency.drafter_ms,
            "contention": self.latency.contention,
            "cancel_points": self.latency.cancel_points,
            "alternatives": [other.json() for other in self.alternatives],
        }
        return document | {old: document[new] for old, new in OLD_KEYS.items()}


@dataclass(frozen=True)
class DeploymentPlan:
    """How to speculate and on how many processors; `ms` is the expected time per token."""

    spec: SpecConfig
    sp: int = 1
    mp: int = 1
    processors: int = 1
    drafter: str = ""
    ms: float = 0.0

    @property
    def algorithm(self) -> str:
        return self.spec.algorithm

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    @property
    def tokens_per_second(self) -> float:
        return 1000 / self.ms

    @property
    def layout(self) -> tuple[str | int, ...]:
        """Of plans with the same layout only the fastest is shown."""
        drafter = "" if self.algorithm == "nonsi" else self.drafter
        return self.algorithm, self.sp, self.mp, self.spec.rule, bool(self.spec.tree), drafter

    def simulation(self, profile: PairProfile, tokens: int = TOKENS) -> SimulationConfig:
        """The plan as it would run; SI's drafter never computes beside a target."""
        profile = profile.of(self.drafter)
        config = profile.simulation(self.mp, self.sp, self.spec.rule, tokens)
        if self.algorithm == "si":
            config = config.with_latency(drafter_ms=profile.by_mp[self.mp].drafter_ms)
        runner_ups = profile.runner_up_acceptance if self.spec.tree else 0.0
        return replace(config, spec=self.spec, runner_up_acceptance=runner_ups)

    def json(self) -> dict[str, Any]:
        """With the keys of the release before beside the new ones."""
        spec = self.spec
        return {
            "algorithm": spec.algorithm,
            "mp": self.mp,
            "processors": self.processors,
            "ms": self.ms,
            "sp": self.sp,
            "lookahead": spec.lookahead or 0,
            "min_draft": spec.min_draft or 0,
            "patience": spec.min_draft or 0,
            "rule": spec.rule,
            "tree": spec.tree,
            "drafter": self.drafter,
            "tokens_per_second": self.tokens_per_second,
        }


def simulated_ms(config: SimulationConfig, seeds: Iterable[int] = SEEDS) -> float:
    """Milliseconds per token in virtual time, on average over some texts."""
    return fmean(config.run(config.spec, seed).ms for seed in seeds) / config.tokens


def fastest_min_draft(config: SimulationConfig, most: int) -> int:
    """The min_draft with the least predicted time per token under DSI; the smallest of equals."""
    return min(range(most + 1), key=lambda count: predicted_ms(config.with_spec(min_draft=count), "dsi"))


def si_block(config: SimulationConfig, acceptance: float) -> int:
    return best_si_lookahead(config.latency.target_ms, config.latency.drafter_ms, acceptance, LONGEST_BLOCK)


def spec_candidates(config: SimulationConfig, degrees: Iterable[int] = AUTO_SP) -> list[SpecConfig]:
    """Non-SI, and DSI with all that may be the fastest at some acceptance rate.

    With one target, DSI that waits for a block is SI; SI itself is tried where taking turns makes forwards faster.
    """
    rule, alone = config.spec.rule, config.latency.alone
    specs = [SpecConfig("nonsi", max_targets=1, rule=rule)]
    if alone is not None and config.drafters == 1:
        turns = replace(config, latency=alone)
        blocks = sorted({*SI_BLOCKS, *(si_block(turns, rate) for rate in (*MIN_DRAFT_RATES, HIGHEST_RATE))})
        specs += [SpecConfig("si", block, max_targets=1, rule=rule) for block in blocks]
    min_drafts = sorted({0, 1, *(si_block(config, rate) for rate in MIN_DRAFT_RATES)})
    for sp in sorted({sp for sp in degrees if sp < config.sp} | {config.sp}):
        least = minimal_lookahead(config.latency.target_ms, config.latency.drafter_ms, sp)
        lookaheads = sorted({max(1, round(least * share)) for share in LOOKAHEAD_SHARES} | {*LOOKAHEADS})
        specs += [
            SpecConfig("dsi", lookahead, min_draft, max_targets=sp, rule=rule)
            for lookahead in lookaheads
            for min_draft in min_drafts
        ]
    return specs


def search_processors(
    profile: PairProfile, processors: int, advance: Progress = no_progress, seeds: Iterable[int] = SEEDS
) -> list[DeploymentPlan]:
    """The best plans for so many processors after simulation; trees are tried with the best of SI and of DSI."""
    plans = predicted_plans(profile, processors, advance)
    finalists = plans[:FINALISTS]
    nonsi = next(plan for plan in plans if plan.algorithm == "nonsi")
    if nonsi not in finalists:
        finalists.append(nonsi)
    simulated = [replace(plan, ms=simulated_ms(plan.simulation(profile), seeds)) for plan in finalists]
    simulated += plans_with_trees(profile, plans)
    return sorted(simulated, key=lambda plan: plan.ms)


def predicted_plans(profile: PairProfile, processors: int, advance: Progress = no_progress) -> list[DeploymentPlan]:
    """The best plan of every layout of up to so many processors, the fastest first."""
    if not 1 <= processors <= MOST_PROCESSORS:
        raise ValueError(f"{processors} processors: must be between 1 and {MOST_PROCESSORS}")
    least = min(profile.by_mp)
    if processors < least:
        raise ValueError(f"{processors} processors: one target needs {least}")
    best: dict[Any, DeploymentPlan] = {}
    for candidate in processor_candidates(profile, processors):
        plan = replace(candidate, ms=plan_ms(candidate, profile))
        if plan.layout not in best or plan.ms < best[plan.layout].ms:
            best[plan.layout] = plan
        advance()
    return sorted(best.values(), key=lambda plan: plan.ms)


def plan_ms(plan: DeploymentPlan, profile: PairProfile) -> float:
    """By the forecast, or by what is predicted of trees."""
    config = plan.simulation(profile)
    return tree_ms(config, plan.spec) if plan.spec.tree else predicted_ms(config)


def count_candidates(profile: PairProfile, processors: int) -> int:
    return sum(1 for _ in processor_candidates(profile, processors))


def processor_candidates(profile: PairProfile, processors: int) -> Iterator[DeploymentPlan]:
    for mp in [mp for mp in profile.by_mp if mp <= processors]:
        yield DeploymentPlan(SpecConfig("nonsi"), mp=mp, processors=mp, drafter=profile.drafter)
        for pair in profile.all:
            for rule in pair.acceptance:
                for plan in _speculating(pair, mp, rule, processors):
                    yield replace(plan, mp=mp, drafter=pair.drafter)


def _speculating(pair: PairProfile, mp: int, rule: str, processors: int) -> Iterator[DeploymentPlan]:
    latency = pair.by_mp[mp]
    left = processors - pair.drafter_processors
    if pair.drafters == 1:
        yield from _with_one_target(pair, mp, rule, left)
    if left < mp:
        return
    most = min(left // mp, servers_needed(latency.target_ms, latency.drafter_ms, 1))
    for sp in sorted({sp for sp in PROCESSOR_SP if sp < most} | {most}):
        for spec in spec_candidates(pair.simulation(mp, sp, rule), ()):
            if spec.speculates:
                yield DeploymentPlan(spec, sp, processors=sp * mp + pair.drafter_processors)


def _with_one_target(pair: PairProfile, mp: int, rule: str, left: int) -> Iterator[DeploymentPlan]:
    """SI, and PEARL where `left` has room for a target beside the drafter."""
    config = pair.simulation(mp, 1, rule)
    lookaheads = {max(1, round(si_block(config, config.acceptance) * share)) for share in SI_SHARES}
    for lookahead in sorted(lookaheads):
        yield DeploymentPlan(SpecConfig("si", lookahead, rule=rule), processors=mp)
    if left >= mp:
        lookahead = minimal_lookahead(config.latency.target_ms, config.latency.drafter_ms, 1)
        yield DeploymentPlan(SpecConfig("pearl", lookahead, rule=rule), processors=mp + pair.drafter_processors)


def plans_with_trees(profile: PairProfile, plans: Sequence[DeploymentPlan]) -> list[DeploymentPlan]:
    """The best plans of SI and of DSI with a tree for a chain."""
    if not profile.runner_up_acceptance:
        return []
    matching = [plan for plan in plans if plan.spec.rule == "match" and profile.of(plan.drafter).drafters == 1]
    return [*_si_with_trees(profile, matching), *_dsi_with_trees(profile, matching)]


def _si_with_trees(profile: PairProfile, plans: Sequence[DeploymentPlan]) -> list[DeploymentPlan]:
    with_trees = []
    for plan in [plan for plan in plans if plan.algorithm == "si"]:
        pair = profile.of(plan.drafter)
        if best := best_si_tree(pair.by_mp[plan.mp], pair.acceptance["match"], profile.runner_up_acceptance):
            with_trees.append(replace(plan, spec=best[0], ms=best[1]))
    return sorted(with_trees, key=lambda plan: plan.ms)[:1]


def _dsi_with_trees(profile: PairProfile, plans: Sequence[DeploymentPlan]) -> list[DeploymentPlan]:
    """The layouts are simulated that may be fastest, until none can be faster than the best."""
    configs = [
        (replace(plan.simulation(profile), runner_up_acceptance=profile.runner_up_acceptance), plan)
        for plan in plans
        if plan.algorithm == "dsi"
    ]
    best: DeploymentPlan | None = None
    for config, plan in sorted(configs, key=lambda row: least_dsi_ms(row[0]))[:TREE_LAYOUTS]:
        if best is None or least_dsi_ms(config) < best.ms:
            spec, ms = best_dsi_tree(config)
            best = replace(plan, spec=spec, ms=ms) if best is None or ms < best.ms else best
    return [] if best is None else [best]


def search_devices(
    latency: LatencyModel,
    acceptance: float,
    max_targets: int,
    tokens: int = DEVICE_TOKENS,
    map: Map = map,
    degrees: Iterable[int] = DEVICE_SP,
) -> list[DeploymentPlan]:
    """The best of non-SI, SI and DSI with up to so many targets, the fastest first.

    All are predicted, and the best few of each algorithm simulated. `map` may be that of a pool.
    """
    profile = PairProfile({1: latency}, {"match": acceptance})
    plans = list(device_candidates(profile, [sp for sp in degrees if sp <= max_targets]))
    configs = [plan.simulation(profile, tokens) for plan in plans]
    ranked = sorted(zip(map(predicted_ms, configs), plans, configs), key=lambda row: row[0])
    finalists = [
        (plan, config)
        for name in ("nonsi", "si", "dsi")
        for plan, config in [(plan, config) for _, plan, config in ranked if plan.algorithm == name][:DEVICE_FINALISTS]
    ]
    best: dict[str, DeploymentPlan] = {}
    times = map(partial(simulated_ms, seeds=DEVICE_SEEDS), [config for _, config in finalists])
    for plan, ms in zip((plan for plan, _ in finalists), times):
        if plan.algorithm not in best or ms < best[plan.algorithm].ms:
            best[plan.algorithm] = replace(plan, ms=ms)
    return sorted(best.values(), key=lambda plan: plan.ms)


def device_candidates(profile: PairProfile, degrees: Iterable[int]) -> Iterator[DeploymentPlan]:
    latency = profile.latency
    yield DeploymentPlan(SpecConfig("nonsi", 1))
    for lookahead in si_blocks(latency, profile.acceptance["match"]):
        yield DeploymentPlan(SpecConfig("si", lookahead))
    for sp in degrees:
        least = minimal_lookahead(latency.target_ms, latency.drafter_beside(sp), sp)
        shares = {max(2, round(least * share)) for share in DEVICE_LOOKAHEAD_SHARES}
        for lookahead in sorted(shares | {*DEVICE_LOOKAHEADS}):
            waits = {*DEVICE_MIN_DRAFTS, *(round(lookahead * share) for share in DEVICE_MIN_DRAFT_SHARES)}
            for min_draft in sorted(waits):
                yield DeploymentPlan(device_spec(sp, lookahead, min_draft), sp)


def device_specs(latency: LatencyModel, acceptance: float, sp: int) -> list[SpecConfig]:
    """The candidates as `auto` switches between them on so many targets."""
    profile = PairProfile({1: latency}, {"match": acceptance})
    degrees = [degree for degree in DEVICE_SP if degree < sp] + [sp]
    return [replace(plan.spec, max_targets=plan.sp) for plan in device_candidates(profile, degrees)]


def device_spec(sp: int, lookahead: int, min_draft: int) -> SpecConfig:
    return SpecConfig("dsi", lookahead, min_draft, default_max_lead(sp, lookahead, min_draft))


def si_blocks(latency: LatencyModel, acceptance: float) -> list[int]:
    """Blocks around the best of unpadded forwards, and those that just fill a padded one."""
    block = best_si_lookahead(latency.target_ms, latency.drafter_ms, acceptance)
    full = {width - 1 for width, _ in latency.by_width if max(2, block / 2) < width < block * 2}
    return sorted({max(1, round(block * share)) for share in (0.6, 0.8, 1, 1.2)} | full)


@dataclass(frozen=True)
class Sensitivity:
    """The time per token of a plan if a measurement were different, and the plan that would then be best."""

    change: str
    ms: float
    best: DeploymentPlan


def sensitivities(
    profile: PairProfile, plan: DeploymentPlan, processors: int, advance: Progress = no_progress
) -> list[Sensitivity]:
    changes = {
        "acceptance 0.1 lower": profile.changed(acceptance=-0.1),
        "acceptance 0.1 higher": profile.changed(acceptance=0.1),
        "the drafter twice as fast": profile.changed(drafter_slowdown=0.5),
        "the drafter twice as slow": profile.changed(drafter_slowdown=2),
    }
    sensitivities = []
    for change, other in changes.items():
        same = replace(plan, ms=plan_ms(plan, other))
        best = min(predicted_plans(other, processors, advance)[0], same, key=lambda plan: plan.ms)
        sensitivities.append(Sensitivity(change, same.ms, best))
    return sensitivities


def ms_by_processors(
    profile: PairProfile, processors: Iterable[int], advance: Progress = no_progress
) -> dict[str, dict[int, float]]:
    """Predicted milliseconds per token of each algorithm at its best, by number of processors."""
    lines: dict[str, dict[int, float]] = {name: {} for name in TITLES}
    for count in processors:
        for plan in predicted_plans(profile, count, advance):
            lines[plan.algorithm].setdefault(count, plan.ms)  # the fastest comes first
    return {name: line for name, line in lines.items() if line}


def explanation(plan: DeploymentPlan, profile: PairProfile) -> str:
    """Why a plan takes as long as it does, in words with its numbers."""
    pair, spec = profile.of(plan.drafter), plan.spec
    latency, rate, lookahead = pair.by_mp[plan.mp], pair.acceptance[spec.rule], spec.lookahead or 0
    if plan.algorithm == "nonsi":
        return f"a forward of {latency.target_ms:.2f} ms for each token"
    if plan.algorithm == "si" and spec.tree:
        tokens = 1 + num_accepted(spec.chances, spec.tree, lookahead)
        return (
            f"a tree of {spec.tree} guesses in {lookahead} levels of {latency.drafter_ms:.2f} ms, then a forward: "
            f"{tokens:.1f} tokens a turn"
        )
    if plan.algorithm == "si":
        tokens = sum(rate**i for i in range(lookahead + 1))
        return (
            f"{lookahead} guesses of {latency.drafter_ms:.2f} ms, then a forward: "
            f"{tokens:.1f} tokens a turn at acceptance {rate:.2f}"
        )
    overlap = f"guesses go on during a forward of {latency.target_ms:.2f} ms"
    if plan.algorithm == "pearl":
        return f"{overlap}, in lock step"
    wait = f", the root waits for {spec.min_draft}" if spec.min_draft else ""
    blocks = f"trees of {spec.tree}" if spec.tree else f"blocks of {lookahead}"
    return f"{overlap}; {plan.sp} in flight, {blocks}{wait}"
