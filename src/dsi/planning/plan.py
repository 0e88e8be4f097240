"""So many processors and a pair of models: what is fastest? Every algorithm in every arrangement.

Each arrangement is judged by the forecast (exact where theory is), and the best few are rehearsed in virtual
time. Under non-SI and SI a forward has all processors of its target, and SI's drafter takes turns on one of
them; under PEARL and DSI the drafter has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import SpecConfig, default_max_lead
from dsi.planning.equation_1 import minimal_lookahead, servers_needed, shared_out
from dsi.planning.forecast import block, expected_ms, guide, ways
from dsi.planning.latency import Curve, LatencyModel
from dsi.planning.simulation import TITLES, SimulationConfig

BEST = 5  # offers that are shown
FINALISTS = 10  # that are rehearsed
SEEDS = range(2000, 2012)  # the luck of the rehearsals
TOKENS = 200
SHARES = (0.6, 1, 1.4)  # of the block that is SI's best in theory
MOST = 1000  # processors
DEGREES = (1, 2, 3, 4, 6, 8)  # numbers of targets that are tried, besides as many as can be
SPARES = (1, 2)  # targets that look past second guesses


@dataclass(frozen=True)
class Evidence:
    """What a plan is made from. `sources` says where each number comes from."""

    by_mp: Mapping[int, Curve]  # of a target, by how many processors share each forward
    drafter_ms: float
    rates: Mapping[str, float]  # how often guesses are accepted, by rule
    contention: float = 0.0
    second_hit: float = 0.0
    drafter_processors: int = 1
    pieces: int = 8
    sources: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # of the drafter, or of several in one tree
    turns: bool = True  # whether a drafter can take turns on all processors of a target
    drafters: int = 1  # of which the rates are the joint ones, and the time is that of the slowest
    others: tuple[Evidence, ...] = ()  # what else could draft

    @property
    def all(self) -> tuple[Evidence, ...]:
        return (self, *self.others)

    def of(self, name: str) -> Evidence:
        return next(each for each in self.all if each.name == name)

    def setting(self, mp: int, sp: int, rule: str = "match") -> SimulationConfig:
        """Toy drafters err each on its own: alone they are right as often as makes up the joint rate."""
        steps = self.by_mp[mp]
        return SimulationConfig(
            LatencyModel(
                steps[0][1], self.drafter_ms, by_width=steps, contention=self.contention, cancel_points=self.pieces
            ),
            1 - (1 - self.rates[rule]) ** (1 / self.drafters),
            sp,
            TOKENS,
            eager=False,
            rule=rule,
            drafters=self.drafters,
        )

    def changed(self, rate: float = 0.0, slower: float = 1.0) -> Evidence:
        """With all rates so much higher, and all drafters so many times as slow."""
        rates = {name: min(1.0, max(0.0, each + rate)) for name, each in self.rates.items()}
        others = tuple(each.changed(rate, slower) for each in self.others)
        return replace(self, rates=rates, drafter_ms=self.drafter_ms * slower, others=others)

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Offer:
    """One arrangement; `ms` is what a token is expected to take."""

    algorithm: str
    mp: int
    processors: int
    ms: float
    sp: int = 1
    lookahead: int = 0
    patience: int = 0
    rule: str = "match"
    branches: int = 1
    spare: int = 0
    drafter: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    @property
    def tokens_per_second(self) -> float:
        return 1000 / self.ms

    @property
    def arrangement(self) -> tuple[str | int, ...]:
        """Offers that differ in less are one and the same to a user, and the better one counts."""
        drafter = "" if self.algorithm == "nonsi" else self.drafter
        return self.algorithm, self.sp, self.mp, self.rule, self.branches, drafter

    def setting(self, evidence: Evidence) -> SimulationConfig:
        """As it would run."""
        plain = evidence.of(self.drafter).setting(self.mp, self.sp, self.rule)
        return replace(
            plain,
            lookahead=self.lookahead or None,
            patience=self.patience,
            horizon=default_max_lead(self.sp, max(1, self.lookahead), self.patience),
            branches=self.branches,
            spare=self.spare,
            second_hit=evidence.second_hit if self.branches > 1 else 0.0,
        )

    def expected(self, evidence: Evidence) -> float:
        """By the forecast; second guesses only by rehearsal."""
        setting = self.setting(evidence)
        if self.branches > 1:
            return rehearsed(self, evidence).ms
        if self.algorithm == "dsi":
            return expected_ms(setting, SpecConfig("dsi", self.lookahead, self.patience, max_targets=self.sp))
        return expected_ms(setting, self.algorithm)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def offers(evidence: Evidence, processors: int, advance: Progress = no_progress) -> list[Offer]:
    """All arrangements of up to so many processors, the fastest first; the best of each kind only."""
    if not 1 <= processors <= MOST:
        raise ValueError(f"{processors} processors: must be between 1 and {MOST}")
    least = min(evidence.by_mp)
    if processors < least:
        raise ValueError(f"{processors} processors: one target needs {least}")
    best: dict[Any, Offer] = {}
    for offer in candidates(evidence, processors):
        found = replace(offer, ms=offer.expected(evidence))
        if found.ms < best.get(offer.arrangement, replace(found, ms=float("inf"))).ms:
            best[offer.arrangement] = found
        advance()
    return sorted(best.values(), key=lambda each: each.ms)


def count(evidence: Evidence, processors: int) -> int:
    """Of arrangements."""
    return sum(1 for _ in candidates(evidence, processors))


def candidates(evidence: Evidence, processors: int) -> Iterator[Offer]:
    """What may be worth a look; `ms` is not known yet."""
    for mp in [mp for mp in evidence.by_mp if mp <= processors]:
        yield Offer("nonsi", mp, mp, 0.0, drafter=evidence.name)
        for each in evidence.all:
            for rule in each.rates:
                for offer in speculating(each, mp, rule, processors):
                    yield replace(offer, drafter=each.name)


def speculating(evidence: Evidence, mp: int, rule: str, processors: int) -> Iterator[Offer]:
    alone = evidence.setting(mp, 1, rule)
    left = processors - evidence.drafter_processors
    if evidence.drafters == 1:
        yield from taking_turns(evidence, mp, rule, left)
    if left < mp:
        return
    most = min(left // mp, servers_needed(alone.latency.target_ms, alone.latency.drafter_ms, 1))
    for sp in sorted({sp for sp in DEGREES if sp < most} | {most}):
        used = sp * mp + evidence.drafter_processors
        for way in ways(evidence.setting(mp, sp, rule), ()):
            if way.speculates:
                yield Offer("dsi", mp, used, 0.0, sp, way.lookahead or 0, way.min_draft or 0, rule)


def taking_turns(evidence: Evidence, mp: int, rule: str, left: int) -> Iterator[Offer]:
    """SI, and PEARL where `left` has room for a target beside the drafter."""
    alone = evidence.setting(mp, 1, rule)
    blocks = {max(1, round(block(alone, alone.acceptance) * share)) for share in SHARES}
    for lookahead in sorted(blocks) if evidence.turns or mp == 1 else ():
        yield Offer("si", mp, mp, 0.0, lookahead=lookahead, rule=rule)
    if left >= mp:
        lookahead = minimal_lookahead(alone.latency.target_ms, alone.latency.drafter_ms, 1)
        yield Offer("pearl", mp, mp + evidence.drafter_processors, 0.0, lookahead=lookahead, rule=rule)


def rehearsed(offer: Offer, evidence: Evidence) -> Offer:
    """In virtual time, with luck."""
    setting = offer.setting(evidence)
    how = offer.algorithm
    if how == "dsi" and offer.branches == 1:
        way = SpecConfig("dsi", offer.lookahead, offer.patience, max_targets=offer.sp)
        times = [setting.run(guide(way, setting), seed).ms for seed in SEEDS]
    else:
        times = [setting.run(how, seed).ms for seed in SEEDS]
    return replace(offer, ms=fmean(times) / setting.tokens)


def best(evidence: Evidence, processors: int, advance: Progress = no_progress) -> list[Offer]:
    """The first few after a rehearsal; second guesses are tried with the best of DSI."""
    found = offers(evidence, processors, advance)
    finalists = found[:FINALISTS]
    plain = next(each for each in found if each.algorithm == "nonsi")
    if plain not in finalists:
        finalists.append(plain)
    finalists += branching(evidence, finalists)
    again = [rehearsed(offer, evidence) for offer in finalists]
    return sorted(again, key=lambda each: each.ms)


def branching(evidence: Evidence, found: Sequence[Offer]) -> list[Offer]:
    """The best of DSI with some of its targets looking past second guesses."""
    first = next((each for each in found if each.algorithm == "dsi" and each.rule == "match"), None)
    if not evidence.second_hit or first is None:
        return []
    return [replace(first, branches=2, spare=spare) for spare in SPARES if spare < first.sp]


@dataclass(frozen=True)
class Change:
    """What if: the first offer then, and what would be fastest then."""

    what: str
    ms: float
    better: Offer


def sensitivity(evidence: Evidence, first: Offer, processors: int, advance: Progress = no_progress) -> list[Change]:
    cases = {
        "acceptance 0.1 lower": evidence.changed(rate=-0.1),
        "acceptance 0.1 higher": evidence.changed(rate=0.1),
        "the drafter twice as fast": evidence.changed(slower=0.5),
        "the drafter twice as slow": evidence.changed(slower=2),
    }
    return [Change(what, first.expected(case), offers(case, processors, advance)[0]) for what, case in cases.items()]


def curve(
    evidence: Evidence, processors: Iterable[int], advance: Progress = no_progress
) -> dict[str, dict[int, float]]:
    """Of each algorithm, by the number of processors: milliseconds for each token at its best."""
    lines: dict[str, dict[int, float]] = {name: {} for name in TITLES}
    for number in processors:
        for offer in offers(evidence, number, advance):
            known = lines[offer.algorithm].get(number, float("inf"))
            lines[offer.algorithm][number] = min(known, offer.ms)
    return {name: line for name, line in lines.items() if line}


def why(offer: Offer, evidence: Evidence) -> str:
    """In words, with its numbers."""
    evidence = evidence.of(offer.drafter)
    steps = dict(evidence.by_mp[offer.mp])
    one, rate = min(steps.items())[1], evidence.rates[offer.rule]
    if offer.algorithm == "nonsi":
        return f"a forward of {one:.2f} ms for each token"
    if offer.algorithm == "si":
        tokens = sum(rate**i for i in range(offer.lookahead + 1))
        return (
            f"{offer.lookahead} guesses of {evidence.drafter_ms:.2f} ms, then a forward: "
            f"{tokens:.1f} tokens a turn at acceptance {rate:.2f}"
        )
    hides = f"guesses go on during a forward of {one:.2f} ms"
    if offer.algorithm == "pearl":
        return f"{hides}, in lock step"
    wait = f", the root waits for {offer.patience}" if offer.patience else ""
    aside = f", {offer.spare} look past second guesses" if offer.branches > 1 else ""
    return f"{hides}; {offer.sp} in flight, blocks of {offer.lookahead}{wait}{aside}"


def scaled(steps: Curve, least: int, share: float, processors: int) -> dict[int, Curve]:
    """A target over more processors than it needs: a share of each forward scales with their number."""
    found: dict[int, Curve] = {}
    mp = least
    while mp <= processors:
        factor = shared_out(share, mp / least)
        found[mp] = tuple((width, ms * factor) for width, ms in steps)
        mp *= 2
    return found
