"""What a plan needs to know of a pair of models on this machine's cores, measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from dsi.core.policies import AUTO
from dsi.fleets.processes import FORK
from dsi.kin import die_with_parent
from dsi.loading import by_widths, forward_ms, load_apart
from dsi.measure.acceptance import acceptance
from dsi.measure.curves import rising
from dsi.measure.plan import Evidence, Offer, best
from dsi.models.hf import Transformer
from dsi.prompts import BUILTIN, choose, read

PROMPTS, TOKENS = 8, 48  # by which acceptance is counted
Progress = Callable[[], object]


def steps_of_measuring(cores: int) -> int:
    return len(shares(cores)) + PROMPTS + 2


def measured(
    target: str, drafter: str, cores: int, dtype: str = "float32", advance: Progress = lambda: None
) -> Evidence:
    """Each forward alone, by its threads; several targets at once; how often guesses are right."""
    here = len(os.sched_getaffinity(0))
    if not 1 <= cores <= here:
        raise ValueError(f"cores {cores}: must be between 1 and {here}, the cores of this machine")
    pair = load_apart(target, drafter, dtype, 1)
    contention = crowding(pair.target.backend, cores - 1) if cores > 2 else 0.0
    advance()
    guess = forward_ms(pair.drafter.backend)
    advance()
    by_mp = {}
    for threads in shares(cores):
        torch.set_num_threads(threads)
        by_mp[threads] = rising(by_widths(pair.target.backend))
        advance()
    torch.set_num_threads(1)
    chosen = choose(read(BUILTIN), pair.text, PROMPTS, 0, TOKENS, pair.context)
    found = acceptance(pair.target.fresh, pair.drafter.fresh, chosen.prompts, TOKENS, pair.text.ends, advance)
    sources = dict.fromkeys(("target", "drafter", "acceptance", "contention", "mp"), "measured")
    return Evidence(by_mp, guess, {"match": found.rate}, contention, sources=sources)


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
        FORK.Process(target=tell, args=(model, core, ready, wire), daemon=True)
        for core, (_, wire) in zip(cores, pipes)
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
