"""Speculate as far as it pays: by what has been right lately and how long it took, down to nothing, and back.

The time of every way to go is known beforehand (`Outlook`); how often guesses are right, and how fast they
come, is learned on the way. Nothing here changes a text, only when it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsi.core.generation import Generation
from dsi.core.latency_table import RUNNER_UPS_IN_TIME, LatencyTable
from dsi.core.policies import policy_for
from dsi.core.spec import Decision

MEMORY = 40  # judged places of a text, or forwards, after which one counts for a third
LONG_MEMORY = 1000  # of all texts
BELIEF = 0.7  # how often guesses are taken to be right before any has been judged
WEIGHT = 2.0  # places that this counts for
GAIN = 0.01  # by what share another way must be better to be taken
SECOND = 0.4  # how often a second guess is taken to be right, where the first was wrong
PROBE = 4  # without speculation, every so many tokens a guess shows whether it would pay again
LEAST_TIMED = 8  # forwards before their time is believed


Names = tuple[str, ...]  # of drafters that share a tree
Candidate = tuple[Names, int, int]  # they, the number of a way, and targets that look past second guesses


@dataclass
class AcceptanceEMA:
    """How often guesses are right; what is long ago counts less and less."""

    belief: float
    memory: int = MEMORY
    hits: float = 0.0
    places: float = 0.0

    def add(self, hit: bool) -> None:
        fade = 1 - 1 / self.memory
        self.hits, self.places = self.hits * fade + hit, self.places * fade + 1

    @property
    def rate(self) -> float:
        return (self.hits + WEIGHT * self.belief) / (self.places + WEIGHT)


@dataclass
class LatencyEMA:
    """How many times as long as planned something takes; what is long ago counts less and less."""

    total: float = 0.0
    count: float = 0.0

    def add(self, time: float) -> None:
        fade = 1 - 1 / MEMORY
        self.total, self.count = self.total * fade + time, self.count * fade + 1

    @property
    def mean(self) -> float:
        """1 until there is enough to tell."""
        return self.total / self.count if self.count >= LEAST_TIMED else 1.0


class LatencyMonitor:
    """Forwards as they come, by how many times as long as planned they take; `unit` makes ms of the clock."""

    def __init__(self, plan: LatencyTable, unit: float = 1) -> None:
        self._plan, self._unit = plan, unit
        self._targets, self._drafters = LatencyEMA(), dict[str, LatencyEMA]()

    def guessed(self, model: str, time: float) -> None:
        self._drafters.setdefault(model, LatencyEMA()).add(time * self._unit / self._plan.drafter_ms)

    def verified(self, width: int, time: float) -> None:
        """By a target that had none beside it when it began."""
        self._targets.add(time * self._unit / self._plan.forward_ms(width))

    def slowness(self, drafters: Sequence[str]) -> float:
        """Of the slowest of these drafters, beside a target, against the plan."""
        known = [self._drafters[name].mean for name in drafters if name in self._drafters]
        return max(known, default=1.0) / self._targets.mean


class AdaptiveController:
    """What an engine has learned of its drafters, alone and together; every request adds to it."""

    def __init__(
        self,
        outlook: LatencyTable,
        drafters: Sequence[str],
        belief: float,
        pulse: LatencyMonitor | None = None,
    ) -> None:
        self.outlook, self.drafters = outlook, tuple(drafters)
        self.pulse = pulse or LatencyMonitor(outlook)
        sets = [(name,) for name in self.drafters]
        self.luck = {names: AcceptanceEMA(belief, LONG_MEMORY) for names in dict.fromkeys([*sets, self.drafters])}
        self.second = AcceptanceEMA(SECOND, LONG_MEMORY)
        self.scales = dict.fromkeys(self.luck, outlook.scale_index(1.0))
        first = outlook.configs[self.best(self.luck, 0.0)[1]]  # before anything is learned
        self.first = policy_for(replace(first, drafters=self.drafters[:1]))

    def time(self) -> bool:
        """Look at the clock; returns whether a drafter's speed is not what it was taken to be."""
        late = False
        for names, scale in self.scales.items():
            factor = self.pulse.slowness(names)
            if not _near(self.outlook.drafter_scales[scale], factor):
                self.scales[names] = self.outlook.scale_index(factor)
                late |= self.scales[names] != scale
        return late

    def ms(self, turn: Candidate, rate: float, second: float) -> float:
        """What a token is expected to take; a second guess that is right saves what a rejection costs."""
        names, way, spare = turn
        plain = self.outlook.ms[self.scales[names]][way][self.outlook.rate_index(rate)]
        saved = (1 - rate) * second * RUNNER_UPS_IN_TIME[spare] if spare else 0.0
        return plain * (1 - saved) * (1 + self.outlook.contention * spare)

    def best(self, lucks: Mapping[Names, AcceptanceEMA], second: float) -> Candidate:
        """The drafters, the way and the targets to spare that are expected to be fastest now."""
        rates = {names: luck.rate for names, luck in lucks.items()}
        return min(self._turns(rates), key=lambda turn: self.ms(turn, rates[turn[0]], second))

    def _turns(self, rates: Mapping[Names, float]) -> Iterator[Candidate]:
        known = self.outlook
        for names, rate in rates.items():
            scale, part = self.scales[names], known.rate_index(rate)
            yield names, known.best[scale][part], 0
            for spare, best in known.best_with_spares.items():
                if known.configs[best[scale][part]].speculates:
                    yield names, best[scale][part], spare

    def __call__(self, g: Generation) -> None:
        """As a policy: each request has a course of its own."""
        if g.needs_guess:  # its text depends on its blocks, which must not depend on what was learned
            self.first(g)
            return
        if g.memo is None:
            g.memo = RequestController(self, g)
        g.memo.go(g)


def _near(scale: float, factor: float) -> bool:
    """Half way to the next scale, and a little further: so that it does not go back and forth."""
    return 0.75 < factor / scale < 1.33


class RequestController:
    """Where one request stands: each text has luck of its own, and begins with that of the others."""

    def __init__(self, mind: AdaptiveController, g: Generation) -> None:
        self.mind = mind
        self.luck = {names: AcceptanceEMA(luck.rate) for names, luck in mind.luck.items()}
        self.second = AcceptanceEMA(mind.second.rate)
        self._seen = 0
        self._late = False  # whether a drafter's speed has turned out to be another since the last decision
        self._take(g, mind.best(self.luck, self.second.rate), "start")

    def _take(self, g: Generation, turn: Candidate, cause: str) -> None:
        self._turn = turn
        self.drafters, config, spare = turn
        branches = 2 if spare else 1
        self.spec = replace(
            self.mind.outlook.configs[config], drafters=self.drafters, branches=branches, spare_targets=spare
        )
        self._policy = policy_for(self.spec)
        g.decisions.append(Decision(g.root.depth, self.spec, cause, self.luck[self.drafters].rate))

    def go(self, g: Generation) -> None:
        if len(g.judged) > self._seen:
            self._reconsider(g)
        self._policy(g)
        if g.root.depth % PROBE == 0:
            self._probe(g)

    def _reconsider(self, g: Generation) -> None:
        for judged in g.judged[self._seen :]:
            self._learn(*judged)
        self._seen = len(g.judged)
        self._late |= self.mind.time()
        turn = self.mind.best(self.luck, self.second.rate)
        if turn != self._turn and self._ms(turn) < (1 - GAIN) * self._ms(self._turn):
            self._take(g, turn, "latency" if self._late else "acceptance")
            self._late = False

    def _ms(self, turn: Candidate) -> float:
        return self.mind.ms(turn, self.luck[turn[0]].rate, self.second.rate)

    def _learn(self, said: dict[str, int], token: int, guesses: Sequence[int]) -> None:
        if self.spec.branches > 1 and len(guesses) > len(said) and token not in said.values():
            self.second.add(token in guesses)
            self.mind.second.add(token in guesses)
        for names, luck in self.luck.items():
            if all(name in said for name in names):
                hit = any(said[name] == token for name in names)
                luck.add(hit)
                self.mind.luck[names].add(hit)

    def _probe(self, g: Generation) -> None:
        """Now and then those who do not guess are asked what they would have said."""
        for name in self.mind.drafters:
            idle = not self.spec.speculates or name not in self.drafters
            if idle and name not in g.root.said and not g.drafting(name) and g.room(g.root, name) > 0:
                g.draft(g.root, 1, name, self.spec)
