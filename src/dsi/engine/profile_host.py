"""Measures a pair of models on this machine's cores, and plans an engine from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import AUTO, SpecConfig
from dsi.engine.build_processes import ModelPair, available_cores, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.profile_cpu import forward_ms, forwards_ms, measured_contention, run_in_process
from dsi.engine.profile_fleet import measured_latency
from dsi.engine.prompts import BUILTIN_PROMPTS, sample_prompts
from dsi.engine.trial import run_trial
from dsi.planning.equation_1 import amdahl
from dsi.planning.latency import LatencyModel
from dsi.planning.search import MOST_PROCESSORS, DeploymentPlan, PairProfile, search_processors

PROMPTS, TOKENS = 8, 48  # by which acceptance is counted

Result = TypeVar("Result")


def count_steps(cores: int, drafters: int = 1) -> int:
    """Steps of progress that `profile_host` reports."""
    return len(thread_counts(min(cores, len(available_cores())))) + 1 + drafters * (PROMPTS + 1)


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter's forward by number of threads, and for each token of some texts whether it would have drafted it."""

    ms_by_threads: Mapping[int, float]
    hits: Sequence[bool]


def profile_host(config: EngineConfig, cores: int, progress: Progress = no_progress) -> PairProfile:
    """Measure forwards by threads, contention between targets, and acceptance rates.

    Of several drafters, each is measured alone and the first two in one draft tree. More cores than this machine has
    are extrapolated from those it has.
    """
    available = len(available_cores())
    if not 1 <= cores <= MOST_PROCESSORS:
        raise ValueError(f"cores {cores}: must be between 1 and {MOST_PROCESSORS}")
    if cores > available == 1:
        raise ValueError(f"cores {cores}: this machine has 1, from which more cannot be extrapolated")
    names = list(dict.fromkeys(config.drafter))
    pairs = [load_model_pair(replace(config, drafter=(name,), threads=1)) for name in names]
    target = pairs[0].target.backend
    contention = measured_contention(target, min(cores - 1, available)) if cores > 2 else 0.0
    progress()
    by_threads: dict[int, Mapping[int, float]] = {}
    for threads in thread_counts(min(cores, available)):
        by_threads[threads] = with_threads(threads, partial(forwards_ms, target))
        progress()
    drafters = [_measure_drafter(pair, list(by_threads), progress) for pair in pairs]
    sources = dict.fromkeys(("target", "drafter", "acceptance", "mp"), "measured")
    if cores > available:
        by_threads = extrapolated_widths(by_threads, thread_counts(cores))
        drafters = [replace(one, ms_by_threads=extrapolated(one.ms_by_threads, by_threads)) for one in drafters]
        sources["mp"] = f"beyond {available} cores extrapolated"
    sources["contention"] = "measured" if cores > 2 else "none with one target"
    profiles = [
        PairProfile(
            {threads: _latency(by_width, drafter, threads, contention) for threads, by_width in by_threads.items()},
            {"match": fmean(drafter.hits)},
            sources=sources,
            drafter=name,
        )
        for name, drafter in zip(names, drafters)
    ]
    return replace(profiles[0], alternatives=(*profiles[1:], *_joint_profile(profiles[:2], drafters)))


def with_threads(threads: int, work: Callable[[], Result]) -> Result:
    """Run a measurement with so many threads, in a process that ends: a pool of threads does not survive a fork."""

    def measured() -> Result:
        torch.set_num_threads(threads)
        return work()

    return run_in_process(measured)


def _latency(by_width: Mapping[int, float], drafter: MeasuredDrafter, threads: int, contention: float) -> LatencyModel:
    """A drafter beside the targets has one thread; one that takes turns with them may use theirs."""
    beside = drafter.ms_by_threads[1]
    in_turn = measured_latency(by_width, min(beside, drafter.ms_by_threads[threads]))
    return replace(in_turn, drafter_ms=beside, contention=contention, alone=in_turn)


def _measure_drafter(pair: ModelPair, threads: Sequence[int], progress: Progress) -> MeasuredDrafter:
    times = {count: with_threads(count, partial(forward_ms, pair.drafter.backend)) for count in threads}
    progress()
    sample = sample_prompts(BUILTIN_PROMPTS, pair.tokenizer, PROMPTS, 0, TOKENS, pair.context)
    hits: list[bool] = []
    for prompt in sample.prompts:
        hits += run_trial(pair.target.fresh, pair.drafter.fresh, prompt, TOKENS, pair.tokenizer.eos_token_ids).hits
        progress()
    return MeasuredDrafter(times, hits)


def _joint_profile(profiles: Sequence[PairProfile], drafters: Sequence[MeasuredDrafter]) -> list[PairProfile]:
    """Two drafters in one tree: a token is accepted where either drafts it."""
    if len(profiles) < 2:
        return []
    either = [a or b for a, b in zip(drafters[0].hits, drafters[1].hits)]
    slowest = max(profile.latency.drafter_ms for profile in profiles)
    joint = replace(
        profiles[0],
        by_mp={mp: replace(latency, drafter_ms=slowest) for mp, latency in profiles[0].by_mp.items()},
        drafter="+".join(profile.drafter for profile in profiles),
        acceptance={"match": fmean(either)},
        drafters=2,
        drafter_processors=2,
    )
    return [joint]


def extrapolated(ms_by_threads: Mapping[int, float], threads: Iterable[int]) -> dict[int, float]:
    """A forward by number of threads: as measured, and beyond by Amdahl's law through the fewest and the most."""
    most = max(ms_by_threads)
    one, fewest = ms_by_threads[1], ms_by_threads[most]
    parallel = min(1.0, max(0.0, (1 - fewest / one) / (1 - 1 / most)))
    return {count: ms_by_threads.get(count, one * amdahl(parallel, count)) for count in threads}


def extrapolated_widths(
    by_threads: Mapping[int, Mapping[int, float]], threads: Sequence[int]
) -> dict[int, Mapping[int, float]]:
    """The same for forwards of every width."""
    columns = {
        width: extrapolated({count: widths[width] for count, widths in by_threads.items()}, threads)
        for width in by_threads[1]
    }
    return {count: {width: column[count] for width, column in columns.items()} for count in threads}


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads that a forward is measured with."""
    return sorted({1, *(2**i for i in range(10) if 2**i <= cores), max(1, cores - 1), cores})


def plan_engine(config: EngineConfig) -> tuple[EngineConfig, SpecConfig, float, Sequence[DeploymentPlan]]:
    """Return the fastest configuration on this machine's cores, the acceptance rate, and all plans.

    The engine adapts from there: `auto` can take turns on every core as well as overlap.
    """
    cores, config = len(available_cores()), replace(config, plan=None)
    profile = profile_host(config, cores)
    plans = search_processors(profile, cores)
    return replace(config, sp=plans[0].sp), SpecConfig(AUTO), profile.acceptance["match"], plans
