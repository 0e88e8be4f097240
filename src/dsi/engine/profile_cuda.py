"""Measures forwards on devices: by number of new tokens, and beside busy targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from dsi.core.messages import DRAFTER, TARGET
from dsi.engine.profile_trees import with_trees
from dsi.fleets.cuda import CudaFleet
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.hf import kv_bytes
from dsi.models.protocol import ForwardRequest, Pollable, SamplingModel
from dsi.planning.latency import LatencyModel, without_noise
from dsi.planning.shared_forwards import shared_rows

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are captured
CONTENTION_WIDTH = 8  # new tokens of the forwards by which contention is measured
ROUNDS = 8
ORDERING_ROUNDS = 4
MAX_ORDERED = 5  # targets; the order of more hardly matters
TOKEN = 1  # any will do
PACKED_ROWS = 32
TYPICAL_LENGTH, KV_SLOWDOWN = 256, 1.5  # tokens of a text; times as long as as many bytes of weights (64 texts, H200)
LEAST_ROW_MS = 1e-6  # of a draft forward: 0 would say that it was not measured
DONE = object()


def latency_model(
    targets: Sequence[Pollable],
    drafter: Pollable,
    prompt: int = 128,
    cancel_points: int = 0,
    context: int = 512,
    shared_kv: bool = False,
) -> LatencyModel:
    """Measure these servers' models after a prompt of so many tokens."""
    if prompt < 1 or prompt + CONTENTION_WIDTH > context:
        raise ValueError(f"room for {context} tokens: too little to measure with a prompt of {prompt}")
    groups = [targets[:count] for count in range(1, len(targets) + 1)]
    return LatencyModel.measured(
        forwards_ms(targets[0], prompt, context),
        draft_token_ms(drafter, [], prompt, context),
        by_busy_targets=without_noise(
            {len(group): concurrent_forward_ms(group, CONTENTION_WIDTH, prompt) for group in groups}
        ),
        drafter_by_busy_targets=without_noise(
            {len(group): draft_token_ms(drafter, group, prompt, context) for group in groups}
        ),
        cancel_points=cancel_points,
        drafter_cancel_points=1 if cancel_points else None,  # a draft token in flight cannot be cancelled
        shared_kv=shared_kv,
    )


def order_by_contention(targets: Sequence[Pollable], prompt: int = 128) -> list[Any]:
    """Put targets that slow one another down least first: they are used where fewer than all are needed.

    Slices of a GPU share its memory bandwidth, some of them more than others.
    """
    ordered, remaining = list(targets[:1]), list(targets[1:])
    while len(remaining) > 1 and len(ordered) < MAX_ORDERED:
        best = min(
            remaining,
            key=lambda target: concurrent_forward_ms([*ordered, target], CONTENTION_WIDTH, prompt, ORDERING_ROUNDS),
        )
        ordered.append(best)
        remaining.remove(best)
    return ordered + remaining


def forwards_ms(model: Pollable, prompt: int = 128, context: int = 512) -> dict[int, float]:
    """Time a model's forwards, alone, by their number of new tokens."""
    return {width: concurrent_forward_ms([model], width, prompt) for width in WIDTHS if prompt + width <= context}


def concurrent_forward_ms(models: Sequence[Pollable], width: int, prompt: int, rounds: int = ROUNDS) -> float:
    """The median time of a forward over `width` new tokens while all of these models keep computing."""
    text = [TOKEN] * prompt
    for model in models:
        model.answer(ForwardRequest(text, prompt))
    busy = [BusyModel(model, text + [TOKEN] * width, width) for model in models]
    while any(len(running.times) < rounds for running in busy):
        for running in busy:
            running.poll()
    finish(busy)
    return 1000 * median(time for running in busy for time in running.times[:rounds])


class BusyModel:
    """Computes the same forward over and over."""

    def __init__(self, model: Pollable, text: list[int], width: int) -> None:
        self._model, self._request = model, ForwardRequest(text, len(text) + 1 - width)
        self.times: list[float] = []
        self._begin()
        self._counts = False  # the first forwards, which all begin at once, are not representative

    def _begin(self) -> None:
        self._counts, self._began = True, perf_counter()
        self.steps = self._model.poll_answer(self._request)

    def poll(self) -> None:
        if next(self.steps, DONE) is DONE:
            if self._counts:
                self.times.append(perf_counter() - self._began)
            self._begin()


def with_packed_forwards(
    latency: LatencyModel, fleet: CudaFleet, models: Mapping[str, PackedCudaModel], prompt: int = 128
) -> LatencyModel:
    """With the time of forwards over several texts and over trees: of one target and the drafter, by their roles.

    The fleet is closed then.
    """
    latency, target = with_shared_drafts(latency, models[DRAFTER], prompt), models[TARGET]
    latency = replace(latency, shared_text_ms=shared_text_ms(target.model, latency))
    if target.on_gpu and prompt + target.max_rows <= target.context:
        latency = with_width(latency, target.max_rows, widest_forward_ms(target, prompt))
        latency = replace(latency, shared_rows=min(target.max_rows, shared_rows(latency)))
    for model in models.values():
        model.pool.clear()
    try:
        return with_trees(latency, fleet, (TOKEN,) * prompt, min(model.context for model in models.values()))
    finally:
        fleet.close()


def shared_text_ms(model: Any, latency: LatencyModel) -> float:
    """What reading the keys and values of a typical text takes, by their bytes and those of the weights."""
    weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    return float(KV_SLOWDOWN * TYPICAL_LENGTH * kv_bytes(model) / weights * latency.target_ms)


def with_shared_drafts(latency: LatencyModel, model: PackedCudaModel, prompt: int) -> LatencyModel:
    """With the time of a drafter's forwards over one token of each of several texts."""
    texts = [[TOKEN] * prompt + [i] for i in range(min(PACKED_ROWS, model.pool.max_texts))]
    requests = [ForwardRequest(text, len(text), len(text) - 1) for text in texts]
    one, all_rows = (packed_forward_ms(model, requests[:count]) for count in (1, len(requests)))
    return replace(
        latency,
        drafter_shared_ms=max(0.0, one - float(latency.drafter_ms)),
        drafter_per_token_ms=max(LEAST_ROW_MS, (all_rows - one) / (len(requests) - 1)),
    )


def widest_forward_ms(model: PackedCudaModel, prompt: int) -> float:
    """The time of a forward over as many new tokens as texts can share."""
    text = [TOKEN] * (prompt + model.max_rows)
    return packed_forward_ms(model, [ForwardRequest(text, prompt + 1)])


def packed_forward_ms(model: PackedCudaModel, requests: Sequence[ForwardRequest]) -> float:
    """The median time of a forward whose texts are cached up to what is asked about, with what the host does for it."""
    sampling, times = SamplingModel(model), list[float]()
    for _ in range(ROUNDS + 1):  # the first reads the prompts
        began = perf_counter()
        sampling.answer_packed(requests)
        times.append(perf_counter() - began)
    return 1000 * median(times[1:])


def with_width(latency: LatencyModel, width: int, ms: float) -> LatencyModel:
    """With another width of a target forward, which takes no less than narrower ones."""
    by_width = dict(latency.by_width)
    if width in by_width:
        return latency
    return replace(latency, by_width=(*latency.by_width, (width, max(ms, *by_width.values()))))


def finish(models: Iterable[BusyModel]) -> None:
    """Poll all models in turn to the end of their forwards: one may have to wait for another."""
    in_flight = [model.steps for model in models]
    while in_flight:
        in_flight = [steps for steps in in_flight if next(steps, DONE) is not DONE]


def draft_token_ms(drafter: Pollable, targets: Sequence[Pollable], prompt: int, context: int) -> float:
    """The median time between draft tokens while these targets keep computing."""
    text = [TOKEN] * prompt
    busy = [BusyModel(target, text + [TOKEN] * CONTENTION_WIDTH, CONTENTION_WIDTH) for target in targets]
    times = [perf_counter()]
    for token in drafter.poll_draft(ForwardRequest(text, prompt), min(3 * ROUNDS, context - prompt)):
        if token is not None:
            times.append(perf_counter())
        for model in busy:
            model.poll()
    finish(busy)
    return 1000 * median(after - before for before, after in pairwise(times))
