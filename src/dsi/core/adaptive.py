"""`auto`: speculate as far as it pays, by the acceptance rates and latencies of late, down to not at all.

The latency per token of every configuration is predicted beforehand (`LatencyTable`); acceptance rates and the
drafters' speed are learned while texts are generated. Nothing here changes a text, only when its tokens come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from weakref import WeakKeyDictionary

from dsi.core.generation import Generation, VerifiedPosition
from dsi.core.latency_table import LatencyTable
from dsi.core.messages import TARGET, Draft, Job, Time, Verify
from dsi.core.policies import policy_for
from dsi.core.spec import Decision, SpecConfig

WINDOW = 40  # tokens of a request, or forwards, of an exponential moving average
ENGINE_WINDOW = 1000  # tokens of all requests
PRIOR_ACCEPTANCE = 0.7  # of draft tokens, before any has been verified
PRIOR_RUNNER_UP_ACCEPTANCE = 0.4  # of runner-ups, where the first choice was rejected
PRIOR_WEIGHT = 5.0  # tokens that a prior counts for at first
MIN_GAIN = 0.01  # the share by which another configuration must be faster to be chosen
MIN_OVERLAP_GAIN = 0.1  # likewise, from taking turns on every core to overlap and back: KV caches have to catch up
PROBE_EVERY = 4  # tokens, at least, after which an unused drafter drafts one, which tells whether it would pay again
PROBE_STREAM_EVERY = 16  # likewise of a streamed text: the drafter has to read what it has missed
PROBE_SHARE = 0.01  # of the time that these draft tokens may take, where they take it from the target
MAX_LEARNING = 32  # tokens of a text that is streamed to learn what speculation would be worth
STREAM_STEPS = 20  # in which the speed of streamed texts is considered: of 5% each
MIN_TIMED = 8  # forwards before their latency is believed
MAX_DECIDED = 10_000  # decisions that are kept

DrafterSet = tuple[str, ...]  # drafters that share a tree
Inputs = tuple[object, ...]  # of a decision
Candidate = tuple[DrafterSet, int | SpecConfig]  # drafters, and the index of a config or one with a tree


@dataclass
class AcceptanceEMA:
    """The acceptance rate as an exponential moving average over `window` tokens, starting from a prior."""

    prior: float
    window: int = WINDOW
    accepted: float = 0.0
    verified: float = 0.0
    prior_weight: float = PRIOR_WEIGHT  # tokens that the prior still counts for

    def add(self, accepted: bool) -> None:
        decay = 1 - 1 / self.window
        self.accepted, self.verified = self.accepted * decay + accepted, self.verified * decay + 1
        self.prior_weight *= decay

    @property
    def rate(self) -> float:
        return (self.accepted + self.prior_weight * self.prior) / (self.verified + self.prior_weight)

    @property
    def optimistic_rate(self) -> float:
        """One standard deviation more, as the rate may well be."""
        rate = self.rate
        return min(1.0, rate + sqrt(rate * (1 - rate) / (self.verified + self.prior_weight)))


@dataclass
class LatencyEMA:
    """The ratio of measured to planned latency, as an exponential moving average."""

    total: float = 0.0
    count: float = 0.0

    def add(self, ratio: float) -> None:
        decay = 1 - 1 / WINDOW
        self.total, self.count = self.total * decay + ratio, self.count * decay + 1

    @property
    def mean(self) -> float:
        """1 until enough forwards have been timed."""
        return self.total / self.count if self.count >= MIN_TIMED else 1.0


class LatencyMonitor:
    """Compares the latency of forwards with the planned one; `unit` is how many ms the clock counts as one."""

    def __init__(self, planned: LatencyTable, unit: float = 1) -> None:
        self._planned, self._unit = planned, unit
        self._targets, self._drafters = LatencyEMA(), dict[str, LatencyEMA]()
        self._streams = LatencyEMA()

    def observe(self, job: Job, time: Time, busy_targets: int) -> None:
        """Add a forward; that of a target only if no other was busy, which would have slowed it down."""
        ms = float(time) * self._unit
        if isinstance(job, Draft) and job.expansions:
            return  # a level of a tree takes longer the more nodes it has
        if isinstance(job, Draft) and job.model == TARGET:
            if self._planned.plain_ms is not None and job.count > 1:
                self._streams.add(ms / self._planned.plain_ms)
        elif isinstance(job, Draft):
            self._drafters.setdefault(job.model, LatencyEMA()).add(ms / self._planned.draft_ms(job.alone))
        elif isinstance(job, Verify) and busy_targets <= 1 and (job.alone or not job.tree):  # else with others' nodes
            self._targets.add(ms / self._planned.forward_ms(job.num_positions, job.alone))

    @property
    def streams_timed(self) -> bool:
        """Whether enough streamed tokens have been timed."""
        return self._streams.count >= MIN_TIMED

    @property
    def stream_slowdown(self) -> float:
        """How much slower than planned a streamed text is, relative to verifications."""
        return self._streams.mean / self._targets.mean

    def drafter_slowdown(self, drafters: Sequence[str]) -> float:
        """How much slower than planned the slowest of these drafters is, relative to the target."""
        ratios = [self._drafters[name].mean for name in drafters if name in self._drafters]
        return max(ratios, default=1.0) / self._targets.mean


class AdaptiveController:
    """A policy that gives each request its own configuration, and learns from all of them."""

    def __init__(
        self,
        latency_table: LatencyTable,
        drafters: Sequence[str],
        prior: float,
        latency_monitor: LatencyMonitor | None = None,
    ) -> None:
        self.latency_table, self.drafters = latency_table, tuple(drafters)
        self.latency_monitor = latency_monitor or LatencyMonitor(latency_table)
        sets = dict.fromkeys([*((name,) for name in self.drafters), self.drafters])
        self.acceptance = {drafters: AcceptanceEMA(prior, ENGINE_WINDOW) for drafters in sets}
        self.runner_up = AcceptanceEMA(PRIOR_RUNNER_UP_ACCEPTANCE, ENGINE_WINDOW)
        self.scales = dict.fromkeys(sets, latency_table.scale_index(1.0))
        unlearned = dict.fromkeys(sets, PRIOR_ACCEPTANCE)  # or a text would depend on others
        initial = self.spec(self.best(unlearned, 0.0))
        self._initial_policy = policy_for(replace(initial, drafters=self.drafters[:1]))
        self._requests: WeakKeyDictionary[Generation, RequestController] = WeakKeyDictionary()
        self._decided: dict[Inputs, Candidate] = {}  # a decision takes as long as a small forward

    def __call__(self, g: Generation) -> None:
        if g.needs_draft:  # its text depends on its blocks, which must not depend on what was learned
            self._initial_policy(g)
            return
        controller = self._requests.get(g)
        if controller is None:
            controller = self._requests[g] = RequestController(self, g)
        controller(g)

    def decide(self, inputs: Inputs, best: Callable[[], Candidate]) -> Candidate:
        """What is best with these inputs, which are all that it depends on."""
        if inputs not in self._decided:
            if len(self._decided) >= MAX_DECIDED:
                self._decided.clear()
            self._decided[inputs] = best()
        return self._decided[inputs]

    def update_scales(self) -> bool:
        """Read the latency monitor; return whether a drafter's speed is not what it was taken to be."""
        table, changed = self.latency_table, False
        for drafters, scale in self.scales.items():
            slowdown = self.latency_monitor.drafter_slowdown(drafters)
            # Further off than half the ratio to the next scale, and a bit beyond, so as not to switch back and forth.
            if not 0.75 < slowdown / table.drafter_scales[scale] < 1.33:
                nearest = table.scale_index(slowdown)
                if nearest != scale and table.is_ready(nearest):
                    self.scales[drafters], changed = nearest, True
        return changed

    @property
    def probe_every(self) -> int:
        """Tokens between two probes: on shared cores a draft token takes its time from the target."""
        table = self.latency_table
        if table.plain_ms is not None:
            return max(PROBE_STREAM_EVERY, ceil(table.draft_ms() / (PROBE_SHARE * table.plain_ms)))
        if not table.alone_steps_ms:
            return PROBE_EVERY
        return max(PROBE_EVERY, ceil(table.draft_ms() / (PROBE_SHARE * table.forward_ms(1))))

    def can_pay(self, drafters: DrafterSet) -> bool:
        """Whether there is an acceptance rate at which these drafters are worth their time."""
        table = self.latency_table
        if table.plain_ms is not None:
            return self.spec(self.best({drafters: 1.0}, 0.0)).speculates
        return table.configs[table.best(self.scales[drafters], table.rate_index(1.0))].speculates

    def spec(self, candidate: Candidate) -> SpecConfig:
        """The config of a candidate."""
        config = candidate[1]
        return config if isinstance(config, SpecConfig) else self.latency_table.configs[config]

    def predicted_ms(self, candidate: Candidate, acceptance: float, runner_up: float) -> float:
        """Predict the latency per token."""
        drafters, config = candidate
        table = self.latency_table
        if isinstance(config, SpecConfig):
            if table.trees is None:
                raise ValueError(f"{config}: nothing predicts trees")
            return table.trees.ms(config, self._scale(drafters), acceptance, runner_up)
        ms = table.ms[self.scales[drafters]][config][table.rate_index(acceptance)]
        if table.plain_ms is not None and config == table.plain:
            return ms * self.latency_monitor.stream_slowdown
        return ms

    def best(self, rates: Mapping[DrafterSet, float], runner_up: float) -> Candidate:
        """The drafters and config that are predicted to be fastest now."""

        def ms(candidate: Candidate) -> float:
            return self.predicted_ms(candidate, rates[candidate[0]], runner_up)

        chain = min(self._candidates(rates), key=ms)
        return min((chain, *self._trees(rates, runner_up, ms(chain))), key=ms)

    def _scale(self, drafters: DrafterSet) -> float:
        return self.latency_table.drafter_scales[self.scales[drafters]]

    def _trees(self, rates: Mapping[DrafterSet, float], runner_up: float, limit_ms: float) -> Iterator[Candidate]:
        """The best tree of each drafter, if it may take less than so many milliseconds per token; a tree has one."""
        trees = self.latency_table.trees
        if trees is None or not runner_up:
            return
        for drafters, acceptance in rates.items():
            if len(drafters) > 1:
                continue
            if spec := trees.best(self._scale(drafters), acceptance, runner_up, limit_ms):
                yield drafters, spec

    def _candidates(self, rates: Mapping[DrafterSet, float]) -> Iterator[Candidate]:
        table = self.latency_table
        for drafters, acceptance in rates.items():
            scale, rate = self.scales[drafters], table.rate_index(acceptance)
            if table.plain_ms is None:
                yield drafters, table.best(scale, rate)
            else:  # whether to stream depends on how fast that has turned out to be
                yield drafters, table.best_speculating(scale, rate)
                yield drafters, table.plain


class RequestController:
    """The configuration of one request: its acceptance rates start from those of all requests."""

    def __init__(self, engine: AdaptiveController, g: Generation) -> None:
        self._engine = engine
        self._acceptance = {drafters: AcceptanceEMA(ema.rate) for drafters, ema in engine.acceptance.items()}
        self._runner_up = AcceptanceEMA(engine.runner_up.rate)
        self._num_learned = 0  # verified positions
        self._latency_changed = False  # a drafter's speed, since the last decision
        self._decided_by: Inputs = ()
        self._next_probe = 0  # in tokens
        self._choose(g, self._best(g), "start")

    def _is_learning(self, g: Generation) -> bool:
        """Whether to stream the text for now: once, to time that, and to see what the drafters would have drafted."""
        engine = self._engine
        if engine.latency_table.plain_ms is None or not g.can_stream or g.root.depth >= MAX_LEARNING:
            return False
        probed = min(ema.verified for drafters, ema in engine.acceptance.items() if len(drafters) == 1)
        return probed < MIN_TIMED or not engine.latency_monitor.streams_timed

    def _set_next_probe(self, g: Generation) -> None:
        self._next_probe = g.root.depth + (1 if self._is_learning(g) else self._engine.probe_every)

    def _choose(self, g: Generation, candidate: Candidate, cause: str) -> None:
        drafters, _ = self._candidate = candidate
        self.spec = replace(self._engine.spec(candidate), drafters=drafters)
        self._policy = policy_for(self.spec)
        self._set_next_probe(g)
        g.decisions.append(Decision(g.root.depth, self.spec, cause, self._acceptance[drafters].rate))

    def __call__(self, g: Generation) -> None:
        if len(g.verified) > self._num_learned:
            self._reconsider(g)
        self._policy(g)
        if g.root.depth >= self._next_probe:
            self._probe(g)

    def _reconsider(self, g: Generation) -> None:
        for position in g.verified[self._num_learned :]:
            self._learn(position)
        self._num_learned = len(g.verified)
        self._latency_changed |= self._engine.update_scales()
        if (inputs := self._inputs(g)) == self._decided_by:
            return
        self._decided_by, candidate = inputs, self._engine.decide(inputs, lambda: self._best(g))
        if candidate == self._candidate:
            return
        if _fits(g, candidate[0]) and not _fits(g, self._candidate[0]):
            self._choose(g, candidate, "context")
        elif self._ms(candidate) < (1 - self._min_gain(candidate)) * self._ms(self._candidate):
            self._choose(g, candidate, "latency" if self._latency_changed else "acceptance")
            self._latency_changed = False

    def _min_gain(self, candidate: Candidate) -> float:
        """The gain for which it is worth changing to another candidate."""
        table = self._engine.latency_table
        moves = self._engine.spec(candidate).takes_turns != self.spec.takes_turns
        return MIN_OVERLAP_GAIN if moves and table.alone_steps_ms else MIN_GAIN

    def _inputs(self, g: Generation) -> Inputs:
        """What a decision depends on, as exactly as the latency table knows it, and the predictions that there are."""
        table, monitor = self._engine.latency_table, self._engine.latency_monitor
        fitting = [_fits(g, drafters) for drafters in self._acceptance]
        emas = *self._acceptance.values(), self._runner_up
        rates = [table.rate_index(rate) for ema in emas for rate in (ema.rate, ema.optimistic_rate)]
        slowdown = round(STREAM_STEPS * monitor.stream_slowdown)
        streams = (self._is_learning(g), slowdown) if table.plain_ms is not None else ()
        known = self._has_trees(g), table.num_predicted()
        return (*rates, *fitting, *self._engine.scales.values(), *streams, *known)

    def _has_trees(self, g: Generation) -> bool:
        """Whether trees may be chosen for this request."""
        return not (self._engine.latency_table.greedy_trees and g.sampling.temperature)

    def _best(self, g: Generation) -> Candidate:
        """The best candidate among the drafters in whose context the text still fits, if there are any."""
        if self._is_learning(g):
            return self._engine.drafters[:1], self._engine.latency_table.plain
        fitting = {drafters: ema for drafters, ema in self._acceptance.items() if _fits(g, drafters)}
        emas = (fitting or self._acceptance).items()
        table = self._engine.latency_table
        runner_up = self._runner_up.rate if self._has_trees(g) else 0.0  # 0: no trees
        best = self._engine.best({drafters: ema.rate for drafters, ema in emas}, runner_up)
        if self._engine.spec(best).speculates or table.plain_ms is not None:
            return best
        # Speculation that fails costs little, and without it there is little to learn from.
        return self._engine.best({drafters: ema.optimistic_rate for drafters, ema in emas}, runner_up)

    def _ms(self, candidate: Candidate) -> float:
        return self._engine.predicted_ms(candidate, self._acceptance[candidate[0]].rate, self._runner_up.rate)

    def _learn(self, position: VerifiedPosition) -> None:
        drafted_by, token, _ = position
        if self.spec.tree and (is_next := runner_up_accepted(position)) is not None:
            self._runner_up.add(is_next)
            self._engine.runner_up.add(is_next)
        for drafters, acceptance in self._acceptance.items():
            if all(name in drafted_by for name in drafters):
                accepted = any(drafted_by[name] == token for name in drafters)
                acceptance.add(accepted)
                self._engine.acceptance[drafters].add(accepted)

    def _probe(self, g: Generation) -> None:
        """Let drafters that are not in use draft one token, to learn their acceptance rate."""
        self._set_next_probe(g)
        for name in self._engine.drafters:
            unused = not self.spec.speculates or name not in self.spec.drafters
            if not unused or not self._engine.can_pay((name,)):
                continue
            if name not in g.root.drafted_by and not g.jobs.drafting(name) and g.room(g.root, name) > 0:
                g.draft(g.root, 1, name, self.spec)


def runner_up_accepted(position: VerifiedPosition) -> bool | None:
    """Whether the runner-up was right where the first choices were not; None where they were, or there was none."""
    drafted_by, token, draft_tokens = position
    if token in drafted_by.values() or len(draft_tokens) <= len(drafted_by):
        return None
    return token == next(other for other in draft_tokens if other not in drafted_by.values())


def _fits(g: Generation, drafters: DrafterSet) -> bool:
    """Whether the verified text fits the context of each of these drafters."""
    return all(map(g.in_context, drafters))
