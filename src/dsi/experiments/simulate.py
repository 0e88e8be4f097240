"""Repeat one simulation under an algorithm, in virtual time or on real threads, and summarize it."""

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
    """The summary of repeated simulations: times in milliseconds, shares between 0 and 1.

    Of several requests at once, times are the mean of one request, and all else is of all together.
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
    hidden: float  # share of the useful ones' time that overlapped with other work
    stale_forwards: float  # started and cancelled
    drafted: float
    wasted_drafts: float
    busy: dict[str, float]  # share of the time that each server computed
    requests: int = 1
    nodes: int | None = None
    failures: float = 0  # of servers
    unfailing_ms: float | None = None  # the mean if no server ever failed; None: none could

    @property
    def failure_cost(self) -> float:
        """By what factor failures lengthen a request."""
        return self.mean_ms / self.unfailing_ms if self.unfailing_ms else 1.0

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    def json(self) -> dict[str, object]:
        return asdict(self) | {"patience": self.min_draft}  # the key of the release before


@dataclass(frozen=True)
class Sample:
    """The figures of one run."""

    ms: float
    all_ms: float  # until the last request is done
    tallies: list[Tally]
    shares: dict[str, float]
    forwards: int
    hidden: float
    stale: int
    failures: int


def sample(run: SimulatedRun) -> Sample:
    started = [span for span in run.log if span.kind == "verify" and span.end > span.start]
    stale = sum(span.stale for span in started)
    return Sample(
        run.ms,
        run.all_ms,
        [done.tally for done in run.completions],
        run.shares,
        len(started) - stale,
        fmean(hidden_shares(run, started)),
        stale,
        run.failures,
    )


def hidden_shares(run: SimulatedRun, verifications: Iterable[Span]) -> list[float]:
    """The hidden share of each request, whose forwards are recognized by its prompt."""
    spans: dict[Tokens, list[Span]] = {}
    for span in verifications:
        spans.setdefault(span.context.origin.prompt, []).append(span)
    return [hidden(blocks(spans.get(prompt(i), ()), done, run.unit)) for i, done in enumerate(run.completions)]


def simulate(
    config: SimulationConfig,
    algorithm: str,
    repeats: int = 30,
    seed: int = 0,
    real_time: bool = False,
    progress: Progress = no_progress,
) -> Result:
    """Run `repeats` seeds; the same seeds give every algorithm the same texts and accepted draft tokens."""
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    runs = []
    for i in range(repeats):
        runs.append(sample(config.run(algorithm, seed + i, real_time)))
        progress()
    result = summary(config, algorithm, runs, "waited" if real_time else "simulated")
    if not config.failures_per_hour:
        return result
    unfailing = replace(config, failures_per_hour=0)
    return replace(result, unfailing_ms=fmean(unfailing.run(algorithm, seed + i).ms for i in range(repeats)))


def best(
    config: SimulationConfig,
    algorithm: str,
    lookaheads: Iterable[int | None],
    min_drafts: Iterable[int],
    repeats: int = 30,
    seed: int = 0,
    real_time: bool = False,
    progress: Progress = no_progress,
) -> Result:
    """The fastest of several lookaheads and minimum drafts; an algorithm without them is run once."""
    tried = [
        simulate(variant, algorithm, repeats, seed, real_time, progress)
        for variant in variants(config, algorithm, lookaheads, min_drafts)
    ]
    return min(tried, key=lambda result: result.mean_ms)


def variants(
    config: SimulationConfig, algorithm: str, lookaheads: Iterable[int | None], min_drafts: Iterable[int]
) -> list[SimulationConfig]:
    """The config with each lookahead and minimum draft that the algorithm uses."""
    lookaheads = [None] if algorithm in ("nonsi", AUTO) else list(lookaheads)
    min_drafts = list(min_drafts) if algorithm == "dsi" else [0]
    return [config.with_spec(lookahead=k, min_draft=count) for k, count in product(lookaheads, min_drafts)]


def summary(config: SimulationConfig, algorithm: str, runs: list[Sample], label: str) -> Result:
    times = [run.ms for run in runs]
    spread = stdev(times) if len(times) > 1 else 0.0
    tallies = [run.tallies for run in runs]
    return Result(
        algorithm=algorithm,
        label=label,
        mean_ms=fmean(times),
        stdev_ms=spread,
        ci95_ms=1.96 * spread / len(times) ** 0.5,
        tokens_per_second=1000 * config.tokens * config.requests / fmean(run.all_ms for run in runs),
        lookahead=config.lookahead_for(algorithm),
        min_draft=config.spec.min_draft or 0,
        sp=config.sp,
        tokens=config.tokens,
        repeats=len(runs),
        acceptance=config.acceptance,
        target_forwards=fmean(run.forwards for run in runs),
        hidden=fmean(run.hidden for run in runs),
        stale_forwards=fmean(run.stale for run in runs),
        drafted=fmean(sum(tally.drafted for tally in run) for run in tallies),
        wasted_drafts=fmean(sum(tally.wasted for tally in run) for run in tallies),
        busy={name: fmean(run.shares[name] for run in runs) for name in runs[0].shares},
        requests=config.requests,
        nodes=config.nodes,
        failures=fmean(run.failures for run in runs),
    )
