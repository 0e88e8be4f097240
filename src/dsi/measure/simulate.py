"""Repeat one setting under an algorithm, in virtual time or on real threads, and sum up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean, stdev

from dsi.core.generation import Tally
from dsi.measure.records import blocks, hidden
from dsi.measure.settings import TITLES, Outcome, Setting

Progress = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """What an algorithm did with a setting. Times are milliseconds, shares between 0 and 1."""

    algorithm: str
    label: str  # simulated or waited
    mean_ms: float
    stdev_ms: float
    ci95_ms: float  # half the width of the 95% confidence interval of the mean
    tokens_per_second: float
    lookahead: int | None
    patience: int
    sp: int
    tokens: int
    repeats: int
    acceptance: float
    target_forwards: float  # computed to their end, per run, as are all counts below
    hidden: float  # share of the useful ones' time that nobody waited for
    stale_forwards: float  # begun and given up
    drafted: float
    wasted_drafts: float
    busy: dict[str, float]  # share of the time that each server computed

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    def json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """What counts of one run."""

    ms: float
    tally: Tally
    shares: dict[str, float]
    forwards: int
    hidden: float
    stale: int


def sample(run: Outcome) -> Sample:
    verifications = blocks(run.log, run.completion, run.unit, ("verify",))
    begun = [span for span in run.log if span.kind == "verify" and span.end > span.start]
    stale = sum(span.stale for span in begun)
    return Sample(run.ms, run.completion.tally, run.shares, len(begun) - stale, hidden(verifications), stale)


def simulate(
    setting: Setting,
    algorithm: str,
    repeats: int = 30,
    seed: int = 0,
    waited: bool = False,
    progress: Progress = lambda: None,
) -> Result:
    """The same seeds give every algorithm the same texts and the same lucky guesses."""
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    runs = []
    for i in range(repeats):
        runs.append(sample(setting.run(algorithm, seed + i, waited)))
        progress()
    return summary(setting, algorithm, runs, "waited" if waited else "simulated")


def best(
    setting: Setting,
    algorithm: str,
    lookaheads: Iterable[int | None],
    patiences: Iterable[int],
    repeats: int = 30,
    seed: int = 0,
    waited: bool = False,
    progress: Progress = lambda: None,
) -> Result:
    """The fastest of several lookaheads and patiences; an algorithm without them is run once."""
    tried = [
        simulate(choice, algorithm, repeats, seed, waited, progress)
        for choice in choices(setting, algorithm, lookaheads, patiences)
    ]
    return min(tried, key=lambda result: result.mean_ms)


def fastest_patience(setting: Setting, most: int, seeds: int = 2) -> int:
    """By which DSI writes these texts in least virtual time; the smallest of equals."""

    def ms(patience: int) -> float:
        return sum(replace(setting, patience=patience).run("dsi", seed).ms for seed in range(seeds))

    return min(range(most + 1), key=ms)


def choices(
    setting: Setting, algorithm: str, lookaheads: Iterable[int | None], patiences: Iterable[int]
) -> list[Setting]:
    blocks = [None] if algorithm == "nonsi" else list(lookaheads)
    waits = list(patiences) if algorithm == "dsi" else [0]
    return [replace(setting, lookahead=block, patience=wait) for block, wait in product(blocks, waits)]


def summary(setting: Setting, algorithm: str, runs: list[Sample], label: str) -> Result:
    times = [run.ms for run in runs]
    spread = stdev(times) if len(times) > 1 else 0.0
    tallies = [run.tally for run in runs]
    return Result(
        algorithm=algorithm,
        label=label,
        mean_ms=fmean(times),
        stdev_ms=spread,
        ci95_ms=1.96 * spread / len(times) ** 0.5,
        tokens_per_second=1000 * setting.tokens / fmean(times),
        lookahead=setting.lookahead_for(algorithm),
        patience=setting.patience,
        sp=setting.sp,
        tokens=setting.tokens,
        repeats=len(runs),
        acceptance=setting.acceptance,
        target_forwards=fmean(run.forwards for run in runs),
        hidden=fmean(run.hidden for run in runs),
        stale_forwards=fmean(run.stale for run in runs),
        drafted=fmean(tally.drafted for tally in tallies),
        wasted_drafts=fmean(tally.wasted for tally in tallies),
        busy={name: fmean(run.shares[name] for run in runs) for name in runs[0].shares},
    )
