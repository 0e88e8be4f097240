"""Measures forwards on CPU cores: by number of new tokens, and of several targets at once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from dsi.fleets.processes import FORK
from dsi.models.hf import Transformer
from dsi.models.process_utils import die_with_parent
from dsi.models.protocol import ForwardRequest, Model
from dsi.models.tensor_parallel import RankLost, TensorParallel
from dsi.planning.latency import LatencyModel, monotone

LOOKUP_SHARE = 0.05  # of a target forward that an n-gram lookup is taken to cost, messages included
CANCEL_POINTS = 8  # of a forward: one per layer, more or less
DRAFT_TOKENS = 8  # by which a drafter is timed
WIDTHS = (1, 2, 4, 8, 16)  # new tokens of the forwards that are timed
REPEATS = 4  # of each


def measured_latency(by_width: Mapping[int, float], drafter_ms: float, contention: float = 0.0) -> LatencyModel:
    latency = LatencyModel.measured(by_width, drafter_ms, contention=contention, cancel_points=CANCEL_POINTS)
    return replace(latency, by_width=monotone(by_width))


def forward_ms(model: Transformer | TensorParallel, new: int = 1, repeats: int = 8) -> float:
    """Time a forward over `new` tokens: the positions that are asked for are computed again each time."""
    tokens, times = [1] * (16 + new), []
    model.forward(tokens, len(tokens))
    for _ in range(repeats):
        began = time.perf_counter()
        model.forward(tokens, len(tokens) + 1 - new)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)  # other load on the machine only adds


def forwards_ms(model: Transformer | TensorParallel) -> dict[int, float]:
    """Time forwards by their number of new tokens."""
    widths = [width for width in WIDTHS if not model.context or 16 + width < model.context]
    return {width: forward_ms(model, width, REPEATS) for width in widths or [1]}


def draft_token_ms(drafter: Model, tokens: Sequence[int], repeats: int = 4) -> float:
    """Time a draft token within a draft, translation included."""
    text, times = list(tokens[:16]), []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(DRAFT_TOKENS):
            text += drafter.answer(ForwardRequest(text, len(text)))
        times.append((time.perf_counter() - began) / DRAFT_TOKENS)
    return 1000 * min(times)


def target_forwards_ms(target: Transformer | TensorParallel, cores: Sequence[int]) -> dict[int, float]:
    """Time a target's forwards by width.

    A tensor-parallel target starts processes of its own, which must not belong to this one: it is measured in
    a process that ends, on the cores it will have.
    """
    if isinstance(target, Transformer):
        return forwards_ms(target)
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=_send_forwards_ms, args=(target, cores, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = "they ended"
    finally:
        process.join()
        receiver.close()
    if isinstance(result, str):
        raise ValueError(f"target mp {target.size}: the processes do not work together ({result})")
    return result  # type: ignore[no-any-return]


def _send_forwards_ms(target: TensorParallel, cores: Sequence[int], sender: Any) -> None:
    die_with_parent()
    if target.threads is None:
        os.sched_setaffinity(0, cores)
    try:
        sender.send(forwards_ms(target))
    except (RankLost, ValueError) as error:
        sender.send(str(error.__cause__ or error))
    target.close()


def expected_contention(sp: int, cores: int) -> float:
    """The share by which each busy target slows another, where there are fewer cores than servers."""
    return max(0.0, sp / max(1, cores - 1) - 1) / (sp - 1) if sp > 1 else 0.0


def measured_contention(model: Transformer, targets: int) -> float:
    """The share by which each other busy target slows one down, each on a core of its own."""
    alone, together = (concurrent_forward_ms(model, count) for count in (1, targets))
    return max(0.0, together / alone - 1) / max(1, targets - 1)


def concurrent_forward_ms(model: Transformer, count: int) -> float:
    """The mean time of a forward while `count` processes compute."""
    cores = sorted(os.sched_getaffinity(0))
    barrier = FORK.Barrier(count)
    pipes = [FORK.Pipe(duplex=False) for _ in range(count)]
    processes = [
        FORK.Process(target=_send_forward_ms, args=(model, core, barrier, sender), daemon=True)
        for core, (_, sender) in zip(cores, pipes)
    ]
    for process in processes:
        process.start()
    times = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return fmean(times)


def _send_forward_ms(model: Transformer, core: int, barrier: Any, sender: Any) -> None:
    die_with_parent()
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    barrier.wait(60)
    sender.send(forward_ms(model, repeats=20))
