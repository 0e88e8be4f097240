"""Repeat one setting under an algorithm, in virtual time or on real threads, and sum up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean, stdev

from dsi.core.generation import Tally
from dsi.core.progress import Progress, no_progress
from dsi.core.sequence import Tokens
from dsi.core.spec import AUTO
from dsi.experiments.records import blocks, hidden
from dsi.fleets.spans import Span
from dsi.planning.simulation import TITLES, SimulatedRun, SimulationConfig, prompt


@dataclass(frozen=True)
class Result:
    """What an algorithm did with a setting. Times are milliseconds, shares between 0 and 1.

    Of several requests at once, times are those of one of them in the mean, all else is of all together.
    """

    algorithm: str
    label: str  # simulated or waited
    mean_ms: float
    stdev_ms: float
    ci95_ms: float  # half the width of the 95% confidence interval of the mean
    tokens_per_second: float
    lookahead: int | None
    min_draft: int
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
    requests: int = 1
    nodes: int | None = None
    failures: float = 0  # of servers
    unfailing_ms: float | None = None  # the mean if no server ever failed; None: none could

    @property
    def failure_cost(self) -> float:
        """By how many times failures lengthen a request."""
        return self.mean_ms / self.unfailing_ms if self.unfailing_ms else 1.0

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    def json(self) -> dict[str, object]:
        return asdict(self) | {"patience": self.min_draft}  # its old name, for one release


@dataclass(frozen=True)
class Sample:
    """What counts of one run."""

    ms: float
    all_ms: float  # until the last request was done
    tallies: list[Tally]
    shares: dict[str, float]
    forwards: int
    hidden: float
    stale: int
    failures: int


def sample(run: SimulatedRun) -> Sample:
    begun = [span for span in run.log if span.kind == "verify" and span.end > span.start]
    stale = sum(span.stale for span in begun)
    return Sample(
        run.ms,
        run.all_ms,
        [done.tally for done in run.completions],
        run.shares,
        len(begun) - stale,
        fmean(hidden_of_each(run, begun)),
        stale,
        run.failures,
    )


def hidden_of_each(run: SimulatedRun, verifications: Iterable[Span]) -> list[float]:
    """The hidden share of each request; its forwards are known by its prompt."""
    spans: dict[Tokens, list[Span]] = {}
    for span in verifications:
        spans.setdefault(span.context.origin.prompt, []).append(span)
    return [hidden(blocks(spans.get(prompt(i), ()), done, run.unit)) for i, done in enumerate(run.completions)]


def simulate(
    setting: SimulationConfig,
    algorithm: str,
    repeats: int = 30,
    seed: int = 0,
    real_time: bool = False,
    progress: Progress = no_progress,
) -> Result:
    """The same seeds give every algorithm the same texts and the same lucky guesses."""
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    runs = []
    for i in range(repeats):
        runs.append(sample(setting.run(algorithm, seed + i, real_time)))
        progress()
    result = summary(setting, algorithm, runs, "waited" if real_time else "simulated")
    if not setting.failures_per_hour:
        return result
    unfailing = replace(setting, failures_per_hour=0)
    return replace(result, unfailing_ms=fmean(unfailing.run(algorithm, seed + i).ms for i in range(repeats)))


def best(
    setting: SimulationConfig,
    algorithm: str,
    lookaheads: Iterable[int | None],
    min_drafts: Iterable[int],
    repeats: int = 30,
    seed: int = 0,
    real_time: bool = False,
    progress: Progress = no_progress,
) -> Result:
    """The fastest of several lookaheads and min_drafts; an algorithm without them is run once."""
    tried = [
        simulate(choice, algorithm, repeats, seed, real_time, progress)
        for choice in choices(setting, algorithm, lookaheads, min_drafts)
    ]
    return min(tried, key=lambda result: result.mean_ms)


def choices(
    setting: SimulationConfig, algorithm: str, lookaheads: Iterable[int | None], min_drafts: Iterable[int]
) -> list[SimulationConfig]:
    blocks = [None] if algorithm in ("nonsi", AUTO) else list(lookaheads)
    waits = list(min_drafts) if algorithm == "dsi" else [0]
    return [setting.with_spec(lookahead=block, min_draft=wait) for block, wait in product(blocks, waits)]


def summary(setting: SimulationConfig, algorithm: str, runs: list[Sample], label: str) -> Result:
    times = [run.ms for run in runs]
    spread = stdev(times) if len(times) > 1 else 0.0
    tallies = [run.tallies for run in runs]
    return Result(
        algorithm=algorithm,
        label=label,
        mean_ms=fmean(times),
        stdev_ms=spread,
        ci95_ms=1.96 * spread / len(times) ** 0.5,
        tokens_per_second=1000 * setting.tokens * setting.requests / fmean(run.all_ms for run in runs),
        lookahead=setting.lookahead_for(algorithm),
        min_draft=setting.spec.min_draft or 0,
        sp=setting.sp,
        tokens=setting.tokens,
        repeats=len(runs),
        acceptance=setting.acceptance,
        target_forwards=fmean(run.forwards for run in runs),
        hidden=fmean(run.hidden for run in runs),
        stale_forwards=fmean(run.stale for run in runs),
        drafted=fmean(sum(tally.drafted for tally in each) for each in tallies),
        wasted_drafts=fmean(sum(tally.wasted for tally in each) for each in tallies),
        busy={name: fmean(run.shares[name] for run in runs) for name in runs[0].shares},
        requests=setting.requests,
        nodes=setting.nodes,
        failures=fmean(run.failures for run in runs),
    )
