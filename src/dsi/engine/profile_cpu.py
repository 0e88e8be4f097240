"""Measures forwards on CPU cores: by number of new tokens and of threads, and of several targets at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, TypeVar

import torch

from dsi.fleets.processes import FORK, run_in_thread
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.hf import Transformer
from dsi.models.process_utils import die_with_parent
from dsi.models.tensor_parallel import TensorParallel

PREFIX = 16  # tokens before those that are timed
WIDTHS = (1, 2, 4, 8, 16)  # new tokens of the forwards that are timed
REPEATS = 12  # of each...
MIN_REPEATS, MAX_SECONDS = 2, 0.1  # ...or fewer, if they take long
FORK_SECONDS = 2.0  # within which a forked process has multiplied two small matrices

Result = TypeVar("Result")


def may_use_every_core(target: Transformer, threads: int, cores: int) -> bool:
    """Whether a text is the same with a thread for each core, and with few: float32 logits are compared bit by bit.

    In a process that ends, so that this one has no pool of threads that it may never need.
    """
    if cores <= threads:
        return False
    if isinstance(target, CompiledDecoder):  # whose logits do not depend on threads
        return True
    return target.model.dtype != torch.float32 or run_in_process(lambda: _equal_logits(target, (threads, cores)))


def _equal_logits(target: Transformer, threads: Sequence[int]) -> bool:
    tokens, results = [1, 2] * 10, []
    if target.context and target.context < len(tokens):
        return False
    for count in threads:
        torch.set_num_threads(count)
        target.clear_cache()
        parts = [target.forward(tokens[:end], start) for start, end in ((2, 16), (17, 17), (18, 19))]
        results.append(torch.cat(parts))
    return all(torch.equal(results[0], other) for other in results[1:])


def forward_ms(model: Transformer | TensorParallel, new: int = 1, repeats: int = 8) -> float:
    """Time a forward over `new` tokens: the positions that are asked for are computed again each time."""
    length = min(PREFIX + new, model.context or sys.maxsize)
    tokens, times = [1] * length, list[float]()
    model.forward(tokens, len(tokens))
    while len(times) < MIN_REPEATS or (len(times) < repeats and sum(times) < MAX_SECONDS):
        began = time.perf_counter()
        model.forward(tokens, len(tokens) + 1 - new)
        times.append(time.perf_counter() - began)
    return 1000 * min(times)  # other load on the machine only adds


def forwards_ms(model: Transformer | TensorParallel) -> dict[int, float]:
    """Time forwards by their number of new tokens."""
    widths = [width for width in WIDTHS if not model.context or PREFIX + width < model.context]
    return {width: forward_ms(model, width, REPEATS) for width in widths or [1]}


def threads_survive_fork() -> bool:
    """Whether a new thread of a forked process can compute with several threads, whatever pools this one has."""
    process = FORK.Process(target=run_in_thread, args=(_compute_with_threads,), daemon=True)
    process.start()
    process.join(FORK_SECONDS)
    process.kill()
    process.join()
    return process.exitcode == 0


def _compute_with_threads() -> None:
    torch.set_num_threads(2)
    torch.ones(512, 512).matmul(torch.ones(512, 512)).sum().item()


def run_in_process(work: Callable[[], Result]) -> Result:
    """Run a function in a forked process and return its result; a ValueError is raised here."""
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=run_in_thread, args=(lambda: _send_result(work, sender),))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = ValueError("they ended")
    finally:
        process.join()
        receiver.close()
    if isinstance(result, ValueError):
        raise result
    return result  # type: ignore[no-any-return]


def _send_result(work: Callable[[], object], sender: Any) -> None:
    die_with_parent()
    try:
        sender.send(work())
    except ValueError as error:
        sender.send(error)


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
