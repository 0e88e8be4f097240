"""What a plan needs to know of a pair of models on this machine's cores, measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import AUTO
from dsi.engine.build import ModelPair, by_widths, forward_ms, load_apart
from dsi.engine.prompts import BUILTIN_PROMPTS, sample_prompts
from dsi.engine.trial import run_trial
from dsi.fleets.processes import FORK
from dsi.models.child_process import die_with_parent
from dsi.models.hf import Transformer
from dsi.planning.latency import monotone
from dsi.planning.plan import Evidence, Offer, best

PROMPTS, TOKENS = 8, 48  # by which acceptance is counted


def steps_of_measuring(cores: int, drafters: int = 1) -> int:
    return len(shares(cores)) + 1 + drafters * (PROMPTS + 1)


def measured(
    target: str,
    drafters: str | Sequence[str],
    cores: int,
    dtype: str = "float32",
    advance: Progress = no_progress,
) -> Evidence:
    """Each forward alone, by its threads; several targets at once; how often guesses are right.

    Of several drafters, each alone and the first two in one tree.
    """
    names = [drafters] if isinstance(drafters, str) else list(dict.fromkeys(drafters))
    here = len(os.sched_getaffinity(0))
    if not 1 <= cores <= here:
        raise ValueError(f"cores {cores}: must be between 1 and {here}, the cores of this machine")
    pairs = [load_apart(target, name, dtype, 1) for name in names]
    big = pairs[0].target.backend
    contention = crowding(big, cores - 1) if cores > 2 else 0.0
    advance()
    by_mp = {}
    for threads in shares(cores):
        torch.set_num_threads(threads)
        by_mp[threads] = monotone(by_widths(big))
        advance()
    torch.set_num_threads(1)
    trials = [tried(pair, advance) for pair in pairs]
    sources = dict.fromkeys(("target", "drafter", "acceptance", "mp"), "measured")
    sources["contention"] = "measured" if cores > 2 else "none with one target"
    known = [
        # Two models that take turns with threads on the same cores spin in each other's way: `dsi compare
        # --budget` measures that at less than two thirds of what their forwards alone promise.
        Evidence(by_mp, ms, {"match": fmean(hits)}, contention, sources=sources, name=name, turns=False)
        for name, (ms, hits) in zip(names, trials)
    ]
    return replace(known[0], others=(*known[1:], *joint(known[:2], trials)))


def tried(pair: ModelPair, advance: Progress) -> tuple[float, list[bool]]:
    """What a guess takes, and whether each was right."""
    guess = forward_ms(pair.drafter.backend)
    advance()
    chosen = sample_prompts(BUILTIN_PROMPTS, pair.text, PROMPTS, 0, TOKENS, pair.context)
    hits: list[bool] = []
    for prompt in chosen.prompts:
        hits += run_trial(pair.target.fresh, pair.drafter.fresh, prompt, TOKENS, pair.text.eos_token_ids).hits
        advance()
    return guess, hits


def joint(known: Sequence[Evidence], trials: Sequence[tuple[float, list[bool]]]) -> list[Evidence]:
    """The two in one tree: a token is guessed where either is right."""
    if len(known) < 2:
        return []
    either = [a or b for a, b in zip(trials[0][1], trials[1][1])]
    both = replace(
        known[0],
        name="+".join(each.name for each in known),
        drafter_ms=max(each.drafter_ms for each in known),
        rates={"match": fmean(either)},
        drafters=2,
        drafter_processors=2,
    )
    return [both]


def shares(cores: int) -> list[int]:
    """Threads that a forward is tried with."""
    return sorted({1, *(2**i for i in range(10) if 2**i <= cores), max(1, cores - 1), cores})


def crowding(model: Transformer, count: int) -> float:
    """By what share each other target at work slows one down, each on a core of its own."""
    alone, together = (at_once(model, each) for each in (1, count))
    return max(0.0, together / alone - 1) / max(1, count - 1)


def at_once(model: Transformer, count: int) -> float:
    """The mean of a forward while so many processes compute."""
    cores = sorted(os.sched_getaffinity(0))
    ready = FORK.Barrier(count)
    pipes = [FORK.Pipe(duplex=False) for _ in range(count)]
    crew = [
        FORK.Process(target=tell, args=(model, core, ready, wire), daemon=True) for core, (_, wire) in zip(cores, pipes)
    ]
    for each in crew:
        each.start()
    times = [ours.recv() for ours, _ in pipes]
    for each in crew:
        each.join()
    return fmean(times)


def tell(model: Transformer, core: int, ready: Any, wire: Any) -> None:
    die_with_parent()
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    ready.wait(60)
    wire.send(forward_ms(model, repeats=20))


@dataclass(frozen=True)
class Arrangement:
    """How an engine uses this machine's cores: what is fastest by measurement."""

    sp: int
    threads: int | None  # None: the drafter has a core, and the targets the rest
    algorithm: str
    lookahead: int | None
    acceptance: float
    offers: Sequence[Offer]


def arranged(target: str, drafter: str, dtype: str = "float32") -> Arrangement:
    """Where guesses go on during forwards the engine adapts; where they take turns it keeps to that."""
    cores = len(os.sched_getaffinity(0))
    evidence = measured(target, drafter, cores, dtype)
    found = best(evidence, cores)
    first, rate = found[0], evidence.rates["match"]
    if first.algorithm in ("nonsi", "si"):
        return Arrangement(1, first.mp, first.algorithm, first.lookahead or None, rate, found)
    return Arrangement(first.sp, None, AUTO, None, rate, found)
