"""Every algorithm on the same processors, each in several layouts: measured on this machine, or simulated.

With as many processors as asked for, real forwards are timed; otherwise the figures come from virtual time
with measured latencies. A comparison is never of both kinds.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from dsi.core.generation import ACCEPTED, CORRECTED
from dsi.core.progress import Progress, no_progress
from dsi.core.request import Completion
from dsi.core.spec import ALGORITHMS as NAMED, AUTO, SpecConfig, check_algorithm
from dsi.experiments.compare import Row, quartiles, row, specs, title
from dsi.experiments.divergence import Divergence, divergence
from dsi.planning.auto import adaptive, best_config, cached_latency_table
from dsi.planning.equation_1 import amdahl
from dsi.planning.simulation import MOST_SERVERS, SECOND, PolicyFactory, SimulationConfig

if TYPE_CHECKING:
    from dsi.engine.engine import Engine

ALGORITHMS = (*NAMED, AUTO)
MEASURED, SIMULATED = "measured", "simulated"
LATENCY_AT = (1, 10)  # tokens whose latency is reported, besides the last
LOOKAHEAD = 5  # of SI where acceptance is counted
WARM_UP = 8  # tokens of a text that is not counted, so that every server has computed once
OTHER = "Something else"  # a prompt that evicts another from the KV caches
Classes = Mapping[str, Sequence[str]]  # prompts by topic


@dataclass(frozen=True)
class Layout:
    """All processors on each forward in turn or, with `targets`, one for the drafter and the rest evenly for them."""

    total: int
    targets: int = 0

    @property
    def per_target(self) -> int:
        """Processors of one target forward."""
        return (self.total - 1) // self.targets if self.targets else self.total

    def load(self) -> dict[str, int | None]:
        """Return the arguments of `Engine.load`; with a number of threads, no server has cores of its own."""
        return {"sp": self.targets or 1, "threads": None if self.targets else self.total}


@dataclass(frozen=True)
class Configuration:
    """How to speculate, and on which processors."""

    spec: SpecConfig
    layout: Layout

    @property
    def algorithm(self) -> str:
        return self.spec.algorithm

    def name(self, unit: str = "core") -> str:
        return f"{title(self.spec)}, {self._processors(unit)}"

    def _processors(self, unit: str) -> str:
        per_target = plural(self.layout.per_target, unit)
        if not self.layout.targets:
            return f"all {per_target}" if self.layout.total > 1 else per_target
        if self.algorithm == "nonsi":
            return per_target
        targets = self.layout.targets if self.algorithm in ("dsi", AUTO) else 1
        return f"{plural(targets, 'target')} of {per_target}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Entry(Row):
    """A configuration's texts of one class: counts per text, times in milliseconds."""

    layout: Layout
    label: str
    unit: str  # core or GPU
    tokens: float
    drafted: float
    abandoned: float  # verifications that were cancelled, started or not
    times_ms: tuple[float | None, ...]  # to each of LATENCY_AT, where texts are long enough, and to the last token

    @property
    def name(self) -> str:
        return Configuration(SpecConfig(self.algorithm, self.lookahead), self.layout).name(self.unit)

    @property
    def target_forwards(self) -> float:
        """Per token, as are the properties below."""
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
        names = (*(f"ms_to_token_{place}" for place in LATENCY_AT), "ms_to_last_token")
        shown = ("algorithm", "lookahead", "label", "tokens_per_second", "low", "high", "rates")
        costs = ("target_forwards", "given_up", "drafter_forwards", "tokens_wasted")
        return (
            {"name": self.name}
            | {name: getattr(self, name) for name in shown}
            | {"layout": asdict(self.layout) | dict.fromkeys(("per_target", "each"), self.layout.per_target)}
            | dict(zip(names, self.times_ms))
            | {"per_token": {name: getattr(self, name) for name in costs}, "overlap": self.overlap}
        )


@dataclass(frozen=True)
class Verdict:
    """The fastest configuration, and its speed over the best of any other algorithm in runs side by side."""

    winner: Entry
    second: Entry
    margin: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether it is the faster one in at least three of four runs."""
        return self.low > 1

    def json(self) -> dict[str, Any]:
        figures = {"margin": self.margin, "low": self.low, "high": self.high, "clear": self.clear}
        return {"winner": self.winner.name, "second": self.second.name, **figures}


@dataclass(frozen=True)
class Table:
    """One class of prompts; the first entry is non-SI with all processors on each forward."""

    name: str
    entries: list[Entry]
    acceptance: float | None = None  # where it was an assumption of the simulation
    divergences: tuple[Divergence, ...] = ()  # prompts whose texts are not all equal

    @property
    def verdict(self) -> Verdict | None:
        """Return the winner, or None where all entries are of one algorithm."""
        ranked = sorted(self.entries, key=lambda entry: -entry.tokens_per_second)
        second = next((entry for entry in ranked if entry.algorithm != ranked[0].algorithm), None)
        if second is None:
            return None
        low, middle, high = quartiles([a / b for a, b in zip(ranked[0].rates, second.rates)])
        return Verdict(ranked[0], second, middle, low, high)

    def json(self) -> dict[str, Any]:
        first = self.entries[0]
        acceptance = {} if self.acceptance is None else {"acceptance": self.acceptance}
        rows = [entry.json() | {"speed_over_nonsi": entry.over(first)} for entry in self.entries]
        verdict = self.verdict and self.verdict.json()
        parted = [found.json() for found in self.divergences]
        return {"class": self.name, **acceptance, "results": rows, "verdict": verdict, "divergences": parted}


def check_algorithms(text: str) -> list[str]:
    """Parse names separated by commas; non-SI, which the others are compared with, is always among them."""
    names = {check_algorithm(name.strip(), auto=True) for name in text.split(",")} | {"nonsi"}
    return [name for name in ALGORITHMS if name in names]


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
    """Return all on each forward, then one for the drafter and the rest divided evenly, most targets first."""
    rest = total - 1
    return [Layout(total), *(Layout(total, n) for n in range(rest, 0, -1) if rest % n == 0)]


def configurations(algorithms: Iterable[str], total: int, si_lookaheads: Sequence[int]) -> list[Configuration]:
    """Return every algorithm in every layout in which it may be at its best; SI with several lookaheads."""
    return [
        Configuration(spec, layout)
        for name in algorithms
        for layout in layouts(total)
        if fits(name, layout)
        for spec in specs([name], si_lookaheads)
    ]


def fits(algorithm: str, layout: Layout) -> bool:
    """Tell whether an algorithm can be at its best: only DSI and `auto` use several targets."""
    if not layout.targets:
        return algorithm in ("nonsi", "si") or layout.total == 1
    if algorithm == "nonsi":
        return layout.per_target == 1
    return algorithm in ("dsi", AUTO) or layout.targets == 1 or layout.per_target == 1


@contextmanager
def confined(cores: int) -> Iterator[None]:
    """Restrict this process, and all that it starts, to so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def engines(load: Callable[..., Engine], configs: Sequence[Configuration]) -> Iterator[dict[Configuration, Engine]]:
    """Load one engine per layout, idle while another generates; `auto`, which learns, has its own."""
    loaded: dict[tuple[Layout, bool], Engine] = {}
    with ExitStack() as stack:
        stack.enter_context(confined(configs[0].layout.total))
        for config in configs:
            key = config.layout, config.algorithm == AUTO
            if key not in loaded:
                algorithm = AUTO if config.algorithm == AUTO else "dsi"
                loaded[key] = stack.enter_context(load(algorithm=algorithm, max_num_seqs=1, **config.layout.load()))
        yield {config: loaded[config.layout, config.algorithm == AUTO] for config in configs}


def measured(
    running: Mapping[Configuration, Engine],
    classes: Classes,
    repeats: int,
    options: Mapping[str, Any],
    progress: Progress = no_progress,
) -> list[Table]:
    """Run each prompt under all configurations before the next; another one is first each time.

    Texts that are not equal are reported in the tables.
    """
    done: dict[str, dict[Configuration, list[Completion]]] = {name: {c: [] for c in running} for name in classes}
    warm_up(running, classes, options)
    turns, last = deque(running.items()), dict[int, str]()
    for _ in range(repeats):
        for name, prompts in classes.items():
            for prompt in prompts:
                for config, engine in turns:
                    if last.get(id(engine)) == prompt:
                        evict(engine)
                    last[id(engine)] = prompt
                    done[name][config].append(generate(engine, config, prompt, options))
                    progress()
                turns.rotate(-1)
    return [
        Table(name, entries(texts, MEASURED, SECOND), divergences=divergences(running, classes[name], texts))
        for name, texts in done.items()
    ]


def divergences(
    running: Mapping[Configuration, Engine],
    prompts: Sequence[str],
    texts: Mapping[Configuration, Sequence[Completion]],
) -> tuple[Divergence, ...]:
    """Find the prompts of a class whose texts are not all equal."""
    engine = next(iter(running.values()))
    by_prompt = [
        {config.name(): done[i :: len(prompts)] for config, done in texts.items()} for i in range(len(prompts))
    ]
    parted = (divergence(engine, prompt, own) for prompt, own in zip(prompts, by_prompt))
    return tuple(found for found in parted if found is not None)


def generate(engine: Engine, config: Configuration, prompt: str, options: Mapping[str, Any]) -> Completion:
    return engine.generate(prompt, algorithm=config.algorithm, lookahead=config.spec.lookahead, **options)


def evict(engine: Engine) -> None:
    """Fill the KV caches with another text, so that one configuration's prefill does not help the next."""
    tokens = 2 * engine.deployment.sp + 1
    engine.generate(OTHER, algorithm="dsi", lookahead=1, min_draft=0, max_new_tokens=tokens)


def warm_up(running: Mapping[Configuration, Engine], classes: Classes, options: Mapping[str, Any]) -> None:
    """Do what happens only once, such as simulations, before any text is timed."""
    prompt = next(iter(classes.values()))[0]
    for config, engine in running.items():
        generate(engine, config, prompt, {**options, "max_new_tokens": WARM_UP})


def entries(
    texts: Mapping[Configuration, Sequence[Completion]], label: str, unit_ms: int, unit: str = "core"
) -> list[Entry]:
    """Keep the fastest of the lookaheads that an algorithm was tried with in one layout."""
    best: dict[tuple[str, Layout], Entry] = {}
    for config, done in texts.items():
        candidate = entry(config, done, label, unit_ms, unit)
        fastest = best.setdefault((config.algorithm, config.layout), candidate)
        if candidate.tokens_per_second > fastest.tokens_per_second:
            best[config.algorithm, config.layout] = candidate
    return list(best.values())


def entry(config: Configuration, texts: Sequence[Completion], label: str, unit_ms: int, unit: str) -> Entry:
    return Entry(
        **vars(row(config.spec, texts, unit_ms)),
        layout=config.layout,
        label=label,
        unit=unit,
        tokens=fmean(len(text.tokens) for text in texts),
        drafted=fmean(text.tally.drafted for text in texts),
        abandoned=fmean(text.tally.abandoned for text in texts),
        times_ms=tuple(until(texts, place, unit_ms) for place in (*LATENCY_AT, None)),
    )


def until(texts: Iterable[Completion], place: int | None, unit_ms: int) -> float | None:
    """Return the median milliseconds to the token at this place, or to the last, of the texts that have it."""
    times = [float(text.times[place - 1 if place else -1]) for text in texts if len(text.times) >= (place or 1)]
    return median(times) * unit_ms if times else None


def counted(
    engine: Engine, classes: Classes, options: Mapping[str, Any], progress: Progress = no_progress
) -> dict[str, float]:
    """Count how often draft tokens are accepted in the texts of each class."""
    rates = {}
    for name, prompts in classes.items():
        origins: list[str] = []
        for prompt in prompts:
            origins += engine.generate(prompt, algorithm="si", lookahead=LOOKAHEAD, **options).origins
            progress()
        rates[name] = acceptance(origins)
    return rates


def acceptance(origins: Sequence[str]) -> float:
    """Return the share of accepted tokens among those that were drafted."""
    accepted, corrected = origins.count(ACCEPTED), origins.count(CORRECTED)
    return accepted / (accepted + corrected) if accepted + corrected else 0.0


def simulated(
    simulations: Mapping[str, SimulationConfig],
    configs: Sequence[Configuration],
    share: float,
    seeds: Sequence[int],
    unit: str = "core",
    progress: Progress = no_progress,
) -> list[Table]:
    """Run a setting per class in virtual time, with the latencies of one processor and the same seeds for all."""
    tables = []
    for name, simulation in simulations.items():
        texts: dict[Configuration, list[Completion]] = {}
        for config in configs:
            placed = with_layout(simulation, config, share)
            policy = best_policy(placed, config.algorithm)
            texts[config] = [placed.run(policy, seed).completion for seed in seeds]
            progress()
        tables.append(Table(name, entries(texts, SIMULATED, 1, unit), simulation.acceptance))
    return tables


def with_layout(simulation: SimulationConfig, config: Configuration, share: float) -> SimulationConfig:
    """Divide a share of a target forward among its processors; the drafter has one."""
    latency = simulation.latency.scaled(target=amdahl(share, config.layout.per_target))
    placed = replace(simulation, latency=latency, sp=config.layout.targets or 1)
    return placed.with_spec(lookahead=config.spec.lookahead)


def best_policy(simulation: SimulationConfig, algorithm: str) -> str | SpecConfig | PolicyFactory:
    """Give DSI its best configuration at the acceptance rate; `auto` has to learn the rate."""
    if algorithm not in ("dsi", AUTO):
        return algorithm
    table = cached_latency_table(simulation)
    if algorithm == "dsi":
        return best_config(table, simulation.acceptance, speculating=True)[0]
    return adaptive(table, simulation)
