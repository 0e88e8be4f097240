"""Forwards over new tokens and draft trees of several texts on one device, captured as CUDA graphs by their rows.

A graph is captured for each power of two of rows; whose they are, what they see and where their keys and values go is
data (`packed_rows.py`). A row's logits have the bits that they have in a forward of its text alone, and those of
`CudaGraphModel`. On a CPU, torch computes the same without graphs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsi.models.cuda.decoder_triton import supports_triton, torch_kernels, triton_forward, triton_kernels
from dsi.models.cuda.graphs import CapturedForward, on, own_stream, static_cache
from dsi.models.cuda.green_contexts import stream_sms
from dsi.models.cuda.kv_pool import PooledRows, TextPool
from dsi.models.cuda.packed_rows import (
    PROGRAMS_PER_SM,
    TAIL,
    PackedRows,
    PlanFields,
    PlanLayout,
    SlotRows,
    fill_plan,
    split_limits,
)
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of the forwards that are captured
MAX_TEXTS = 64


class PackedForward:
    """The forward of so many rows: its description in host memory and on the device, and what computes it."""

    def __init__(self, owner: PackedCudaModel, size: int) -> None:
        self.size, self.layout = size, PlanLayout(size, owner.groups)
        host = torch.zeros(self.layout.length, dtype=torch.int32, pin_memory=owner.on_gpu)
        tails = torch.zeros(size * TAIL, dtype=torch.int32, pin_memory=owner.on_gpu)
        self._host, self._host_tails = host, tails
        self._device = torch.zeros_like(host, device=owner.device)
        limits = split_limits(size, owner.groups, owner.kv_heads, owner.context, owner.sms)
        self.rows = PackedRows(self.layout.fields(self._device), owner.tables, owner.context, owner.tails, *limits)
        self._owner = owner
        self.logits = torch.empty(0)
        self.graph: CapturedForward | None = None

    def fill(self, texts: Sequence[SlotRows]) -> None:
        plan: PlanFields = self.layout.fields(self._host.numpy())
        tails, owner = self._host_tails.numpy().reshape(self.size, TAIL), self._owner
        fill_plan(plan, tails, texts, self.layout, self.rows, PROGRAMS_PER_SM * owner.sms // owner.kv_heads)

    def compute(self) -> Tensor:
        """Copy the description to the device, and run the model."""
        owner, plan = self._owner, self.rows.plan
        self._device.copy_(self._host, non_blocking=True)
        own_tails = owner.tables[owner.tails : owner.tails + len(self._host_tails)]
        own_tails.copy_(self._host_tails, non_blocking=True)
        owner.tables.scatter_(0, plan.places.long(), plan.slots)
        self.logits = owner.logits(plan, self.rows)
        return self.logits


class PackedCudaModel:
    """A backend with a KV cache of `num_slots` tokens, which up to `max_texts` texts of `max_length` tokens share."""

    supports_trees = can_pack = True

    def __init__(
        self,
        model: Any,
        max_length: int,
        num_slots: int,
        max_texts: int = MAX_TEXTS,
        stream: Any = None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        if not supports_triton(model):
            raise ValueError(f"a {model.config.model_type} model has no kernels for forwards of several texts")
        self.model, self.context, self.device = model.eval(), max_length, model.device
        self.on_gpu = self.device.type == "cuda"
        self.pool = TextPool(num_slots, max_texts, max_length)
        self._stream = own_stream(stream, self.device)
        self.sms = self._num_sms()
        self._cache = self._create_cache(num_slots)
        self.kv_heads = self._cache.layers[0].keys.shape[1]
        self.groups = model.config.num_attention_heads // self.kv_heads
        self.tails = max_texts * max_length
        self.tables = torch.zeros(self.tails + max(sizes) * TAIL + 1, dtype=torch.int32, device=self.device)
        self._forwards = {size: PackedForward(self, size) for size in sorted(sizes)}
        if self.on_gpu:
            self._capture()

    def _num_sms(self) -> int:
        if not self.on_gpu:
            return 1
        from dsi.models.cuda.linear import device_sms

        return stream_sms(self._stream) or device_sms(self.device)

    def _create_cache(self, num_slots: int) -> Any:
        cache = static_cache(self.model.config, num_slots)
        with torch.inference_mode(), on(self._stream):
            positions = torch.zeros(1, dtype=torch.int64, device=self.device)
            for layer in cache.layers:
                layer.cumulative_length, layer.positions = positions[0], positions
            self.model(input_ids=positions[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        return cache

    def _patched(self) -> AbstractContextManager[None]:
        kernels = triton_kernels(self.model.dtype, self.sms, packed=True) if self.on_gpu else torch_kernels()
        return triton_forward(self.model, self.context, self.sms, kernels)

    def _capture(self) -> None:
        with torch.inference_mode(), on(self._stream), self._patched():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory cannot be freed during a capture
            pool = torch.cuda.graph_pool_handle()
            for forward in reversed(self._forwards.values()):  # the largest first: the others fit into its memory
                for _ in range(2):  # warm-up: libraries initialise during the first forwards
                    forward.compute()
                torch.cuda.synchronize()
                forward.graph = CapturedForward(forward.compute, (), pool, self._stream)
            torch.cuda.synchronize()

    def logits(self, plan: PlanFields, rows: PackedRows) -> Tensor:
        for layer in self._cache.layers:
            layer.rows = rows
        logits: Tensor = self.model(
            input_ids=plan.ids.long()[None],
            position_ids=plan.positions.long()[None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]
        return logits

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Tensor:
        [logits] = self.forward_packed([ForwardRequest(tokens, start, cancelled=cancelled)])
        return logits

    def forward_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Tensor]:  # noqa: ARG002
        steps = self.poll_forward_packed(requests)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                logits: list[Tensor] = end.value
                return logits

    def poll_forward_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Tensor]]:
        """The logits of each request: those that fit share a forward. Yield while the device computes."""
        logits: list[list[Tensor]] = []
        last: list[tuple[int, ForwardRequest]] = []
        for request in requests:
            *pieces, rest = self._pieces(request)
            logits.append([])
            for _, piece in pieces:
                logits[-1] += yield from self._compute([piece])
                self.pool.continue_with(request.tokens, piece.tokens)
            last.append(rest)
        rows = iter(logits)
        for group in self._groups(last):
            for own in (yield from self._compute(group)):
                next(rows).append(own)
        return [self._joined(parts) for parts in logits]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of the pieces of a request."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        with torch.inference_mode(), on(self._stream):
            return torch.cat(list(parts))

    def _pieces(self, request: ForwardRequest) -> Iterator[tuple[int, ForwardRequest]]:
        """A request as several that fit into a forward, each with its rows at most: the last ends with the text."""
        self.pool.check(request)
        tokens, start, largest = request.tokens, request.start, max(self._forwards)
        if len(request.tree) >= largest:
            raise ValueError(f"a tree of {len(request.tree)} draft tokens: there may be {largest - 1}")
        begin = len(tokens) - self.pool.num_new(request)
        while len(tokens) - begin + len(request.tree) > largest and begin < len(tokens) - 1:
            end = min(begin + largest, len(tokens) - 1)
            yield end - begin, ForwardRequest(list(tokens[:end]), min(max(start, begin + 1), end + 1))
            begin, start = end, max(start, end + 1)
        yield (
            len(tokens) - begin + len(request.tree),
            request if start == request.start else replace(request, start=start),
        )

    def _groups(self, requests: Sequence[tuple[int, ForwardRequest]]) -> Iterator[list[ForwardRequest]]:
        """Those that share a forward: fewer than there are tables, as the last may begin as a copy of another text."""
        group, room = list[ForwardRequest](), max(self._forwards)
        for rows, request in requests:
            if group and (rows > room or len(group) + 1 == self.pool.max_texts):
                yield group
                group, room = [], max(self._forwards)
            group.append(request)
            room -= rows
        if group:
            yield group

    def _compute(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Tensor]]:
        """Run one forward."""
        begun = self.pool.begin(requests)
        count = sum(pooled.rows.num_rows for pooled in begun)
        if not count:
            return [torch.empty((0, 0)) for _ in begun]
        if count > max(self._forwards):  # what was cached had to make room for others
            self.pool.cancel(begun)
            return (yield from self._compute_apart(requests))
        try:
            forward = next(forward for size, forward in self._forwards.items() if size >= count)
            forward.fill([pooled.rows for pooled in begun if pooled.rows.num_rows])
            yield from self._run(forward, begun)
        except BaseException:
            self.pool.cancel(begun)
            raise
        self.pool.finish(begun)
        return list(self._wanted(forward.logits, begun))

    def _compute_apart(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Tensor]]:
        """Compute each request by itself."""
        logits: list[Tensor] = []
        for request in requests:
            logits += yield from self.poll_forward_packed([request])
        return logits

    def _run(self, forward: PackedForward, begun: Sequence[PooledRows]) -> Generator[None, None, None]:
        with torch.inference_mode(), on(self._stream):
            self._update_tables(begun)
            if forward.graph is None:
                with self._patched():
                    forward.compute()
                return
            end = forward.graph.launch(0, None, NEVER)
        while not end.query():
            yield None

    def _update_tables(self, begun: Sequence[PooledRows]) -> None:
        """Tell the device of positions that no forward has written: those of nodes that became text, and of forks."""
        places, slots = list[np.ndarray](), list[np.ndarray]()
        for pooled in begun:
            known, length = pooled.text.in_table, pooled.rows.length
            if known < length:
                places.append(pooled.text.table * self.context + np.arange(known, length))
                slots.append(pooled.text.slots[known:length])
        if places:
            index = torch.from_numpy(np.concatenate(places)).to(self.device)
            self.tables.scatter_(0, index, torch.from_numpy(np.concatenate(slots)).to(self.device))

    def _wanted(self, logits: Tensor, begun: Sequence[PooledRows]) -> Iterator[Tensor]:
        with torch.inference_mode(), on(self._stream):
            begin, logits = 0, logits.float()  # as what is sampled from everywhere
            for pooled in begun:
                wanted = pooled.wanted
                if isinstance(wanted, range) or all(b == a + 1 for a, b in pairwise(wanted)):
                    yield logits[begin + wanted[0] : begin + wanted[-1] + 1] if wanted else logits[:0]
                else:
                    yield logits[[begin + row for row in wanted]]
                begin += pooled.rows.num_rows
