"""Measures a pair of models on this machine's cores, and plans an engine from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import AUTO, SpecConfig
from dsi.engine.build_processes import ModelPair, available_cores, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.profile_cpu import CANCEL_POINTS, forward_ms, forwards_ms, measured_contention
from dsi.engine.prompts import BUILTIN_PROMPTS, sample_prompts
from dsi.engine.trial import run_trial
from dsi.planning.latency import LatencyModel, monotone
from dsi.planning.search import DeploymentPlan, PairProfile, search_processors

PROMPTS, TOKENS = 8, 48  # by which acceptance is counted


def count_steps(cores: int, drafters: int = 1) -> int:
    """Steps of progress that `profile_host` reports."""
    return len(thread_counts(cores)) + 1 + drafters * (PROMPTS + 1)


def profile_host(config: EngineConfig, cores: int, progress: Progress = no_progress) -> PairProfile:
    """Measure forwards by threads, contention between targets, and acceptance rates.

    Of several drafters, each is measured alone and the first two in one draft tree.
    """
    available = len(available_cores())
    if not 1 <= cores <= available:
        raise ValueError(f"cores {cores}: must be between 1 and {available}, the cores of this machine")
    names = list(dict.fromkeys(config.drafter))
    pairs = [load_model_pair(replace(config, drafter=(name,), threads=1)) for name in names]
    target = pairs[0].target.backend
    contention = measured_contention(target, cores - 1) if cores > 2 else 0.0
    progress()
    by_mp = {}
    for threads in thread_counts(cores):
        torch.set_num_threads(threads)
        widths = monotone(forwards_ms(target))
        by_mp[threads] = partial(
            LatencyModel, widths[0][1], by_width=widths, contention=contention, cancel_points=CANCEL_POINTS
        )
        progress()
    torch.set_num_threads(1)
    trials = [_measure_drafter(pair, progress) for pair in pairs]
    sources = dict.fromkeys(("target", "drafter", "acceptance", "mp"), "measured")
    sources["contention"] = "measured" if cores > 2 else "none with one target"
    profiles = [
        # Two models that take turns with threads on the same cores spin in each other's way: `dsi compare
        # --budget` measures that at less than two thirds of what their forwards alone promise.
        PairProfile(
            {threads: with_drafter(ms) for threads, with_drafter in by_mp.items()},
            {"match": fmean(hits)},
            sources=sources,
            drafter=name,
            drafter_shares_processors=False,
        )
        for name, (ms, hits) in zip(names, trials)
    ]
    return replace(profiles[0], alternatives=(*profiles[1:], *_joint_profile(profiles[:2], trials)))


def _measure_drafter(pair: ModelPair, progress: Progress) -> tuple[float, list[bool]]:
    """Time a drafter forward, and tell for each token of some texts whether it would have been drafted."""
    ms = forward_ms(pair.drafter.backend)
    progress()
    sample = sample_prompts(BUILTIN_PROMPTS, pair.tokenizer, PROMPTS, 0, TOKENS, pair.context)
    hits: list[bool] = []
    for prompt in sample.prompts:
        hits += run_trial(pair.target.fresh, pair.drafter.fresh, prompt, TOKENS, pair.tokenizer.eos_token_ids).hits
        progress()
    return ms, hits


def _joint_profile(profiles: Sequence[PairProfile], trials: Sequence[tuple[float, list[bool]]]) -> list[PairProfile]:
    """Two drafters in one tree: a token is accepted where either drafts it."""
    if len(profiles) < 2:
        return []
    either = [a or b for a, b in zip(trials[0][1], trials[1][1])]
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


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads that a forward is measured with."""
    return sorted({1, *(2**i for i in range(10) if 2**i <= cores), max(1, cores - 1), cores})


def plan_engine(config: EngineConfig) -> tuple[EngineConfig, SpecConfig, float, Sequence[DeploymentPlan]]:
    """Return the fastest configuration on this machine's cores, the acceptance rate, and all plans.

    Where the drafter computes beside the targets the engine adapts; where they take turns, the plan is kept.
    """
    cores, config = len(available_cores()), replace(config, plan=None)
    profile = profile_host(config, cores)
    plans = search_processors(profile, cores)
    fastest, rate = plans[0], profile.acceptance["match"]
    if fastest.algorithm in ("nonsi", "si"):
        spec = SpecConfig(fastest.algorithm, fastest.spec.lookahead)
        return replace(config, sp=1, threads=fastest.mp), spec, rate, plans
    return replace(config, sp=fastest.sp), SpecConfig(AUTO), rate, plans
