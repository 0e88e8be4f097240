"""The same processors for every algorithm, each in arrangements of its own: measured here, or simulated.

Where there are as many processors as asked for, real forwards are timed; where there are not, the figures
come from virtual time with measured latencies. A comparison is all of one kind.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from dsi.core.generation import ACCEPTED, CORRECTED
from dsi.core.latency_table import LatencyTable
from dsi.core.progress import Progress, no_progress
from dsi.core.request import Completion
from dsi.core.spec import ALGORITHMS as NAMED
from dsi.core.spec import AUTO, SpecConfig, check_algorithm
from dsi.core.stats import mean
from dsi.experiments.compare import Row, check_equal
from dsi.planning.auto import adaptive, cached_latency_table
from dsi.planning.equation_1 import amdahl
from dsi.planning.simulation import MOST_SERVERS, SECOND, TITLES, PolicyFactory, SimulationConfig

if TYPE_CHECKING:
    from dsi.engine.engine import Engine

ALGORITHMS = (*NAMED, AUTO)
MEASURED, SIMULATED = "measured", "simulated"
PLACES = (1, 10)  # tokens whose time is told, besides the last
BLOCK = 5  # guesses at once where acceptance is counted
WARM = 8  # tokens of a text that is not counted, so that every server has begun once
OTHER = "Something else"  # a prompt that takes the place of another in the caches
Classes = Mapping[str, Sequence[str]]  # prompts by what they are about


@dataclass(frozen=True)
class Layout:
    """All processors for each forward in turn or, with `targets`, one for the drafter and the others evenly
    for so many targets.
    """

    total: int
    targets: int = 0

    @property
    def each(self) -> int:
        """Processors of a target forward."""
        return (self.total - 1) // self.targets if self.targets else self.total

    def load(self) -> dict[str, int | None]:
        """What the loader of an engine is told; with a number of threads, no server has cores of its own."""
        return {"sp": self.targets or 1, "threads": None if self.targets else self.total}


@dataclass(frozen=True)
class Contender:
    """An algorithm in a layout, with a lookahead or its own."""

    algorithm: str
    layout: Layout
    lookahead: int | None = None

    def name(self, unit: str = "core") -> str:
        block = f" ({self.lookahead})" if self.lookahead else ""
        return f"{TITLES[self.algorithm]}{block}, {self._where(unit)}"

    def _where(self, unit: str) -> str:
        own = plural(self.layout.each, unit)
        if not self.layout.targets:
            return f"all {own}" if self.layout.total > 1 else own
        if self.algorithm == "nonsi":
            return own
        used = self.layout.targets if self.algorithm in ("dsi", AUTO) else 1
        return f"{plural(used, 'target')} of {own}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Entry(Row):
    """A contender's texts of one class; counts are for each text, times in milliseconds."""

    layout: Layout
    label: str
    unit: str  # what a processor is
    tokens: float
    drafted: float
    abandoned: float  # verifications no longer wanted, begun or not
    times_ms: tuple[float | None, ...]  # to each of PLACES, where texts are so long, and to the last token

    @property
    def name(self) -> str:
        return Contender(self.algorithm, self.layout, self.lookahead).name(self.unit)

    @property
    def target_forwards(self) -> float:
        """For each token, as are those below."""
        return self.forwards / self.tokens

    @property
    def drafter_forwards(self) -> float:
        return self.drafted / self.tokens

    @property
    def given_up(self) -> float:
        return self.abandoned / self.tokens

    @property
    def tokens_wasted(self) -> float:
        return self.wasted / self.tokens

    def json(self) -> dict[str, Any]:
        names = (*(f"ms_to_token_{place}" for place in PLACES), "ms_to_last_token")
        shown = ("algorithm", "lookahead", "label", "tokens_per_second", "low", "high", "rates")
        costs = ("target_forwards", "given_up", "drafter_forwards", "tokens_wasted")
        return (
            {"name": self.name}
            | {name: getattr(self, name) for name in shown}
            | {"layout": asdict(self.layout) | {"each": self.layout.each}}
            | dict(zip(names, self.times_ms))
            | {"per_token": {name: getattr(self, name) for name in costs}, "overlap": self.overlap}
        )


@dataclass(frozen=True)
class Verdict:
    """The fastest, and by how much: ratios to the best of any other algorithm, side by side."""

    winner: Entry
    second: Entry
    margin: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """In three of four cases, or more, it is the faster one."""
        return self.low > 1

    def json(self) -> dict[str, Any]:
        return {
            "winner": self.winner.name,
            "second": self.second.name,
            "margin": self.margin,
            "low": self.low,
            "high": self.high,
            "clear": self.clear,
        }


@dataclass(frozen=True)
class Table:
    """One class of prompts; the first entry is non-SI with all processors on each forward."""

    name: str
    entries: list[Entry]
    acceptance: float | None = None  # where it was an assumption of the simulation

    @property
    def verdict(self) -> Verdict | None:
        """Nobody wins alone."""
        ranked = sorted(self.entries, key=lambda each: -each.tokens_per_second)
        second = next((each for each in ranked if each.algorithm != ranked[0].algorithm), None)
        if second is None:
            return None
        ratios = [mine / theirs for mine, theirs in zip(ranked[0].rates, second.rates)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return Verdict(ranked[0], second, middle, low, high)

    def json(self) -> dict[str, Any]:
        first = self.entries[0]
        known = {} if self.acceptance is None else {"acceptance": self.acceptance}
        rows = [each.json() | {"speed_over_nonsi": each.over(first)} for each in self.entries]
        verdict = self.verdict and self.verdict.json()
        return {"class": self.name, **known, "results": rows, "verdict": verdict}


def check_entrants(text: str) -> list[str]:
    """Names separated by commas; non-SI is always there, for it is what the others are compared with."""
    asked = [name.strip() for name in text.split(",")]
    found = {name if name == AUTO else check_algorithm(name) for name in asked} | {"nonsi"}
    return [name for name in ALGORITHMS if name in found]


def check_processors(name: str, count: int, least: int) -> int:
    if not least <= count <= MOST_SERVERS:
        raise ValueError(f"{name} {count}: must be between {least} and {MOST_SERVERS}")
    return count


def check_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"parallel fraction {share}: must be between 0 and 1")
    return share


def check_one_text(rule: str, temperature: float) -> None:
    if rule != "match" and temperature:
        raise ValueError(
            f"rule {rule} at temperature {temperature} with --budget: gives each algorithm its own text; take match"
        )


def cores_here() -> int:
    return len(os.sched_getaffinity(0))


def layouts(total: int) -> list[Layout]:
    """All for each forward, then one for the drafter and the rest divided evenly, most targets first."""
    rest = total - 1
    return [Layout(total), *(Layout(total, n) for n in range(rest, 0, -1) if rest % n == 0)]


def contenders(algorithms: Iterable[str], total: int, blocks: Sequence[int]) -> list[Contender]:
    """Every algorithm in every layout in which it may be at its best; SI with several blocks in each."""
    return [
        Contender(name, layout, block)
        for name in algorithms
        for layout in layouts(total)
        if fits(name, layout)
        for block in (blocks if name == "si" else (None,))
    ]


def fits(algorithm: str, layout: Layout) -> bool:
    """Many targets are DSI's; the others have one, on as many processors as there are or on one alone."""
    if not layout.targets:
        return algorithm in ("nonsi", "si") or layout.total == 1
    if algorithm == "nonsi":
        return layout.each == 1
    return algorithm in ("dsi", AUTO) or layout.targets == 1 or layout.each == 1


@contextmanager
def confined(cores: int) -> Iterator[None]:
    """This process, and all that it starts, on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def engines(load: Callable[..., Engine], entrants: Iterable[Contender]) -> Iterator[dict[Contender, Engine]]:
    """One for each layout, which only waits while another writes; what learns on the way has its own."""
    entrants = list(entrants)
    loaded: dict[tuple[Layout, bool], Engine] = {}
    with ExitStack() as stack:
        stack.enter_context(confined(entrants[0].layout.total))
        for each in entrants:
            key = each.layout, each.algorithm == AUTO
            if key not in loaded:
                algorithm = AUTO if each.algorithm == AUTO else "dsi"
                loaded[key] = stack.enter_context(load(algorithm=algorithm, texts=1, **each.layout.load()))
        yield {each: loaded[each.layout, each.algorithm == AUTO] for each in entrants}


def measured(
    running: Mapping[Contender, Engine],
    classes: Classes,
    repeats: int,
    options: Mapping[str, Any],
    progress: Progress = no_progress,
) -> list[Table]:
    """Interleaved: each prompt goes through all contenders, of whom another is first each time."""
    done: dict[str, dict[Contender, list[Completion]]] = {name: {each: [] for each in running} for name in classes}
    warm(running, classes, options)
    turns, last = deque(running.items()), dict[int, str]()
    for _ in range(repeats):
        for name, prompts in classes.items():
            for prompt in prompts:
                for each, engine in turns:
                    if last.get(id(engine)) == prompt:
                        forget(engine)
                    last[id(engine)] = prompt
                    done[name][each].append(write(engine, each, prompt, options))
                    progress()
                check_equal(prompt, [texts[-1] for texts in done[name].values()])
                turns.rotate(-1)
    return [Table(name, entries(texts, MEASURED, SECOND)) for name, texts in done.items()]


def write(engine: Engine, who: Contender, prompt: str, options: Mapping[str, Any]) -> Completion:
    return engine.generate(prompt, algorithm=who.algorithm, lookahead=who.lookahead, **options)


def forget(engine: Engine) -> None:
    """What one contender has read must not help the next: servers that keep one text read another."""
    each = engine.deployment.sp
    engine.generate(OTHER, algorithm="dsi", lookahead=1, patience=0, max_new_tokens=2 * each + 1)


def warm(running: Mapping[Contender, Engine], classes: Classes, options: Mapping[str, Any]) -> None:
    """What is done only once, such as rehearsals, belongs to no text."""
    prompt = next(iter(classes.values()))[0]
    for each, engine in running.items():
        write(engine, each, prompt, {**options, "max_new_tokens": WARM})


def entries(
    texts: Mapping[Contender, Sequence[Completion]], label: str, unit_ms: int, unit: str = "core"
) -> list[Entry]:
    """Of an algorithm with several lookaheads in one layout, the fastest."""
    best: dict[tuple[str, Layout], Entry] = {}
    for each, done in texts.items():
        found = entry(each, done, label, unit_ms, unit)
        rival = best.setdefault((each.algorithm, each.layout), found)
        if found.tokens_per_second > rival.tokens_per_second:
            best[each.algorithm, each.layout] = found
    return list(best.values())


def entry(who: Contender, texts: Sequence[Completion], label: str, unit_ms: int, unit: str) -> Entry:
    """`unit_ms` is how many milliseconds the texts' clock counts as one."""
    counts = [text.tally for text in texts]
    return Entry(
        who.algorithm,
        who.lookahead,
        rates=tuple(len(text.tokens) * SECOND / unit_ms / float(text.elapsed) for text in texts),
        forwards=fmean(count.forwards for count in counts),
        wasted=fmean(count.wasted for count in counts),
        overlap=mean([text.overlap for text in texts if text.overlap], unit_ms),
        unspeculated=fmean(text.unspeculated for text in texts),
        layout=who.layout,
        label=label,
        unit=unit,
        tokens=fmean(len(text.tokens) for text in texts),
        drafted=fmean(count.drafted for count in counts),
        abandoned=fmean(count.abandoned for count in counts),
        times_ms=tuple(until(texts, place, unit_ms) for place in (*PLACES, None)),
    )


def until(texts: Iterable[Completion], place: int | None, unit_ms: int) -> float | None:
    """Median milliseconds to the token at this place, of the texts that have it; None: to the last."""
    times = [
        float(text.times[-1 if place is None else place - 1]) * unit_ms
        for text in texts
        if len(text.times) >= (place or 1)
    ]
    return median(times) if times else None


def counted(
    engine: Engine, classes: Classes, options: Mapping[str, Any], progress: Progress = no_progress
) -> dict[str, float]:
    """How often guesses are right, in the texts of each class."""
    found = {}
    for name, prompts in classes.items():
        origins: list[str] = []
        for prompt in prompts:
            origins += engine.generate(prompt, algorithm="si", lookahead=BLOCK, **options).origins
            progress()
        found[name] = acceptance(origins)
    return found


def acceptance(origins: Sequence[str]) -> float:
    """Of the tokens for which there was a guess, the share that was guessed."""
    right, wrong = origins.count(ACCEPTED), origins.count(CORRECTED)
    return right / (right + wrong) if right + wrong else 0.0


def simulated(
    settings: Mapping[str, SimulationConfig],
    entrants: Sequence[Contender],
    share: float,
    seeds: Sequence[int],
    unit: str = "core",
    progress: Progress = no_progress,
) -> list[Table]:
    """In virtual time: a setting for each class, with what one processor takes; the same luck for all."""
    tables = []
    for name, setting in settings.items():
        texts: dict[Contender, list[Completion]] = {}
        for each in entrants:
            placed = arranged(setting, each, share)
            way = rehearsed(placed, each.algorithm)
            texts[each] = [placed.run(way, seed).completion for seed in seeds]
            progress()
        tables.append(Table(name, entries(texts, SIMULATED, 1, unit), setting.acceptance))
    return tables


def arranged(setting: SimulationConfig, who: Contender, share: float) -> SimulationConfig:
    """Of a target forward, a share is divided among its processors; the drafter has one."""
    latency = setting.latency.scaled(target=amdahl(share, who.layout.each))
    return replace(setting, latency=latency, sp=who.layout.targets or 1).with_spec(lookahead=who.lookahead)


def rehearsed(setting: SimulationConfig, algorithm: str) -> str | SpecConfig | PolicyFactory:
    """DSI knows how often guesses are right and goes the best of its ways; `auto` has to find out."""
    if algorithm not in ("dsi", AUTO):
        return algorithm
    known = cached_latency_table(setting)
    if algorithm == "dsi":
        return best_speculation(known, setting.acceptance)
    return adaptive(known, setting)


def best_speculation(known: LatencyTable, acceptance: float) -> SpecConfig:
    table, part = known.ms[known.scale_index(1.0)], known.rate_index(acceptance)
    ahead = [i for i, way in enumerate(known.configs) if way.speculates]
    return known.configs[min(ahead, key=lambda i: table[i][part])]
