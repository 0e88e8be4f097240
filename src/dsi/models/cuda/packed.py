"""Forwards over new tokens and draft trees of several texts on one device, captured as CUDA graphs by their rows.

A graph is captured for each power of two of rows; whose they are, what they see and where their keys and values go is
data (`packed_rows.py`). A row's logits have the bits that they have in a forward of its text alone, and those of
`CudaGraphModel`. On a CPU, torch computes the same without graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsi.core.sequence import Tokens
from dsi.core.tree_shape import Level, Tree
from dsi.models.cuda.decoder_triton import supports_triton, torch_kernels, triton_forward, triton_kernels
from dsi.models.cuda.graphs import (
    CapturedForward,
    Completed,
    event,
    keep_for_current_stream,
    on,
    own_stream,
    static_cache,
)
from dsi.models.cuda.green_contexts import stream_sms
from dsi.models.cuda.kv_pool import NoRoom, PooledRows, TextPool
from dsi.models.cuda.packed_rows import (
    BRANCHES,
    KEYS,
    MOVES,
    ROWS,
    TAIL,
    PackedRows,
    PlanLayout,
    SlotRows,
    aligned,
    fill_plan,
    num_programs,
    split_limits,
)
from dsi.models.cuda.token_steps import MAX_STEPS, Teacher, TokenSteps, with_stand_ins
from dsi.models.cuda.tree_growth import MAX_LEVELS, DeviceGrowth, LaunchedTree, num_expanded
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest, LaunchedGrowth, StopFlag, run_to_end

Moves = np.ndarray  # places in the device's buffer, and the slots to write there
NO_MOVES: Moves = np.zeros((2, 0), np.int32)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of the forwards that are captured
MAX_TEXTS = 256
IN_FLIGHT = 2  # forwards that may be launched one behind the other, over different texts
DRAFTED_STEPS = 2  # times as many tokens as a drafter's forward picks are kept: all of them are copied to the host


class PackedForward:
    """The forward of so many rows: what describes it, on the device and in host memory, and what computes it."""

    def __init__(self, owner: PackedCudaModel, layout: PlanLayout, begin: int) -> None:
        self._owner, self.layout = owner, layout
        self._region = owner.tables[begin : begin + layout.length]
        copies = MAX_LEVELS if owner.drafts else IN_FLIGHT * MAX_STEPS  # launched before the first has ended
        self._host = torch.zeros(copies, layout.length, dtype=torch.int32, pin_memory=owner.on_gpu)
        regions, self._copies = self._host.numpy(), list(self._host)
        tails = layout.size, TAIL
        self._plans = [(layout.fields(region), region[layout.tails :].reshape(tails)) for region in regions]
        most_keys = owner.context + ROWS * KEYS  # where each query of a part has a path of its own
        limits = split_limits(layout.size, owner.groups, owner.kv_heads, most_keys, owner.sms)
        self.rows = PackedRows(
            layout.fields(self._region), owner.tables, owner.context, begin + layout.tails, begin, owner.unread, *limits
        )
        self.logits = torch.empty(0)
        self.graph: CapturedForward | None = None

    def fill(self, texts: Sequence[SlotRows], moves: Moves, copy: int = 0, picked: Sequence[int] = ()) -> None:
        """Describe the rows and slots that the device does not know, and begin to copy that to the device.

        The likeliest tokens after the rows `picked` come to the host, in this order; which `copy` of the description
        is not in use says where.
        """
        (plan, tails), owner = self._plans[copy], self._owner
        fill_plan(plan, tails, texts, self.layout, self.rows, owner.programs)
        if picked:
            plan.outputs[list(picked)] = owner.picked_from(copy) + BRANCHES * np.arange(len(picked))
        plan.moves[:, : moves.shape[1]] = moves
        self._region.copy_(self._copies[copy], non_blocking=True)

    def fill_step(self, steps: TokenSteps, step: int, copy: int, first_picked: int) -> None:
        """Describe the next token of each text."""
        steps.fill(step, self._plans[copy][0], self.rows, self.layout, self._owner.programs, first_picked)
        self._region.copy_(self._copies[copy], non_blocking=True)

    def compute(self) -> Tensor:
        owner, kernels = self._owner, self._owner.row_kernels
        self.logits = owner.logits(kernels.take_tokens(self.rows), self.rows)
        kernels.pick_tokens(self.logits, self.rows)
        owner.host_picked.copy_(owner.picked, non_blocking=True)
        return self.logits

    def launch(self) -> None:
        """Compute it, on a GPU asynchronously."""
        if self.graph is not None:
            self.graph.launch(0, None, NEVER)
            return
        with torch.inference_mode(), self._owner.patched():
            self.compute()


def wanted_rows(begun: Sequence[PooledRows]) -> Iterator[Sequence[int]]:
    """The rows of each text whose logits are wanted, among those of all texts."""
    begin = 0
    for pooled in begun:
        yield [begin + row for row in pooled.wanted]
        begin += pooled.rows.num_rows


class RowKernels(NamedTuple):
    """What packed forwards begin and end with."""

    take_tokens: Callable[[PackedRows], Tensor]
    pick_tokens: Callable[[Tensor, PackedRows], None]
    sample_texts: Callable[..., list[Tokens]]

    @classmethod
    def of(cls, on_gpu: bool) -> RowKernels:
        if on_gpu:
            from dsi.models.cuda.packed_tokens import pick_tokens, take_tokens
            from dsi.models.cuda.token_sampling import sample_texts
        else:
            from dsi.models.cuda.torch_kernels import pick_tokens, take_tokens
            from dsi.sampling.logits import sample_texts
        return cls(take_tokens, pick_tokens, sample_texts)


class PackedCudaModel:
    """A backend with a KV cache of `num_slots` tokens, for up to `max_texts` texts in a forward.

    One that `drafts` can grow a draft tree without waiting for the tokens of each level; of any other, two forwards
    over different texts may be polled at a time, and the device computes the second when the first has ended.
    """

    supports_trees = can_pack = True
    max_picked = BRANCHES  # tokens after each row

    def __init__(
        self,
        model: Any,
        max_length: int,
        num_slots: int,
        max_texts: int = MAX_TEXTS,
        stream: Any = None,
        sizes: Sequence[int] = SIZES,
        drafts: bool = False,
    ) -> None:
        if not supports_triton(model):
            raise ValueError(f"a {model.config.model_type} model has no kernels for forwards of several texts")
        self.model, self.context, self.device = model.eval(), max_length, model.device
        self.on_gpu = self.device.type == "cuda"
        self.pool = TextPool(num_slots, max_texts, max_length)
        self.drafts, self.row_kernels = drafts, RowKernels.of(self.on_gpu)
        self.sample_texts = self.row_kernels.sample_texts
        self.forwards_in_flight = 1 if drafts else IN_FLIGHT
        # Of plans and picked tokens, those that no forward uses: the first of `MAX_STEPS` each.
        self._free_copies = [MAX_STEPS * number for number in range(self.forwards_in_flight)]
        self.stream = own_stream(stream, self.device, drafts)
        self.sms = self._num_sms()
        self._cache = self._create_cache(num_slots)
        self.kv_heads = self._cache.layers[0].keys.shape[1]
        self.programs = num_programs(self.kv_heads, self.sms)
        self.groups = model.config.num_attention_heads // self.kv_heads
        # One buffer for kernels to read: tables of texts, tokens that were picked, here or by another model, and the
        # plan of each forward.
        self._sizes = sorted(sizes)
        layouts = [PlanLayout(size, self.groups) for size in self._sizes]
        self.max_rows = layouts[-1].size
        first_picked = aligned(self.pool.num_tables * max_length)
        steps = DRAFTED_STEPS if drafts else MAX_STEPS
        self._most_picked = steps * self.max_rows * BRANCHES  # of forwards that follow one another
        self.unread = first_picked + self.forwards_in_flight * self._most_picked
        self.first_given = aligned(self.unread + BRANCHES)
        end_given = self.first_given + self.max_rows * BRANCHES
        begin, *ends = accumulate((aligned(layout.length) for layout in layouts), initial=aligned(end_given))
        self.tables = torch.zeros(ends[-1], dtype=torch.int32, device=self.device)
        self.picked = self.tables[first_picked : self.unread]
        self._given = self.tables[self.first_given : end_given]  # what another model has picked
        self.launched: LaunchedTree | None = None
        self.first_picked, self.host_picked = first_picked, torch.zeros_like(self.picked, device="cpu")
        if self.on_gpu:
            self.host_picked = self.host_picked.pin_memory()
        self._host_rows = self.host_picked.numpy().reshape(-1, BRANCHES)
        self._forwards = {
            layout.size: PackedForward(self, layout, place) for layout, place in zip(layouts, (begin, *ends))
        }
        if self.on_gpu:
            self._capture()

    def _num_sms(self) -> int:
        if not self.on_gpu:
            return 1
        from dsi.models.cuda.linear import device_sms

        return stream_sms(self.stream) or device_sms(self.device)

    def _create_cache(self, num_slots: int) -> Any:
        cache = static_cache(self.model.config, num_slots)
        with torch.inference_mode(), on(self.stream):
            positions = torch.zeros(1, dtype=torch.int64, device=self.device)
            for layer in cache.layers:
                layer.cumulative_length, layer.positions = positions[0], positions
            self.model(input_ids=positions[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
        return cache

    def patched(self) -> AbstractContextManager[None]:
        kernels = triton_kernels(self.model.dtype, self.sms, packed=True) if self.on_gpu else torch_kernels()
        return triton_forward(self.model, self.context, self.sms, kernels)

    def _capture(self) -> None:
        with torch.inference_mode(), on(self.stream), self.patched():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory cannot be freed during a capture
            pool = torch.cuda.graph_pool_handle()
            for forward in reversed(self._forwards.values()):  # the largest first: the others fit into its memory
                for _ in range(2):  # warm-up: libraries initialise during the first forwards
                    forward.compute()
                torch.cuda.synchronize()
                forward.graph = CapturedForward(forward.compute, (), pool, self.stream)
            torch.cuda.synchronize()

    def logits(self, ids: Tensor, rows: PackedRows) -> Tensor:
        for layer in self._cache.layers:
            layer.rows = rows
        logits: Tensor = self.model(
            input_ids=ids[None],
            position_ids=rows.plan.positions[None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]
        return logits

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Tensor:
        [logits] = self.forward_packed([ForwardRequest(tokens, start, cancelled=cancelled)])
        return logits

    def forward_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Tensor]:  # noqa: ARG002
        return run_to_end(self.poll_forward_packed(requests))

    def poll_forward_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Tensor]]:
        """The logits of each request, which the current stream may read: those that fit share a forward.

        Yield while the device computes.
        """
        return (yield from self._poll(requests, picks=False))

    def poll_picked(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[np.ndarray]]:
        """The likeliest tokens after each row that a request asks about, the likeliest first: picked on the device."""
        return (yield from self._poll(requests, picks=True))

    def num_cached(self, tokens: Sequence[int]) -> int:
        return self.pool.num_cached(tokens)

    def _poll(self, requests: Sequence[ForwardRequest], picks: bool) -> Generator[None, None, list[Any]]:
        """Logits or tokens of each request, of one forward or of several."""
        parts: list[list[Any]] = [[] for _ in requests]
        left = list(enumerate(requests))
        while left:
            computed = yield from self._compute([request for _, request in left], picks)
            for part in computed:
                number, request = left.pop(0)
                parts[number].append(part)
            if not computed:
                number, request = left[0]
                left[:1] = [(number, piece) for piece in self._split(request)]
            elif left and left[0][0] == number:
                self.pool.continue_with(left[0][1].tokens, request.tokens)
        return list(map(self._joined, parts))

    def _joined(self, parts: Sequence[Any]) -> Any:
        """The rows of the pieces of a request."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        with torch.inference_mode():
            return torch.cat(list(parts))

    def _split(self, request: ForwardRequest) -> tuple[ForwardRequest, ForwardRequest]:
        """As much of a request as fits into a forward, and the rest: of its text first, then of its tree."""
        tokens, start = request.tokens, request.start
        begin = len(tokens) - self.pool.num_new(request)
        end = min(begin + self.max_rows, len(tokens) - 1)
        if end > begin:
            piece = ForwardRequest(list(tokens[:end]), min(max(start, begin + 1), end + 1))
            return piece, replace(request, start=max(start, end + 1))
        if len(request.asked) < 2:
            raise ValueError(f"a tree of {len(request.tree)} draft tokens: a forward has {self.max_rows} rows")
        half, after = len(request.asked) // 2, len(tokens) + 1
        return replace(request, asked=request.asked[:half]), replace(request, start=after, asked=request.asked[half:])

    def _compute(self, requests: Sequence[ForwardRequest], picks: bool) -> Generator[None, None, list[Any]]:
        """Run one forward over the first requests, as many as fit: none, if one alone does not."""
        while not self._free_copies:
            yield None
        while (begun := self._begin(requests)) is None:
            num_ended = self.pool.num_ended
            while self.pool.num_ended == num_ended:  # to look for room takes time
                yield None
        count = sum(pooled.rows.num_rows for pooled in begun)
        if not count:
            self.pool.release(begun)
            return [self._nothing(picks) for _ in begun]
        if count > self.max_rows:
            self.pool.cancel(begun)
            return []
        wanted, copy = list(wanted_rows(begun)), self._free_copies.pop()
        try:
            forward = self.forward_of(count)
            with torch.inference_mode(), on(self.stream):
                rows = [pooled.rows for pooled in begun if pooled.rows.num_rows]
                forward.fill(rows, self._moves(begun), copy, list(chain(*wanted)) if picks else ())
                forward.launch()
                answers: list[Any] = [] if picks else list(self._logits_of(forward, wanted))
                end = self._end()
            while not end.query():
                yield None
            if picks:
                answers = self._picked_tokens(wanted, copy)
        except BaseException:
            self._give_up(begun)
            raise
        finally:
            self._free_copies.append(copy)
        self.pool.finish(begun)
        if not picks:
            keep_for_current_stream(answers, self.stream)
        return answers

    def _end(self) -> Any:
        """The event that all that was launched has ended."""
        if not self.on_gpu:
            return Completed()
        end = event()
        end.record(self.stream)
        return end

    def _begin(self, requests: Sequence[ForwardRequest]) -> list[PooledRows] | None:
        """What a forward computes; None while there is room only once another forward has ended."""
        try:
            return self.pool.begin(requests, self.max_rows)
        except NoRoom:
            if not self.pool.has_in_flight:
                raise
            return None

    def picked_from(self, copy: int) -> int:
        """Where in the buffer the tokens go that a forward picks."""
        return self.first_picked + copy // MAX_STEPS % self.forwards_in_flight * self._most_picked

    def _nothing(self, picks: bool) -> Any:
        """The answer about a text all of which is cached."""
        return np.empty((0, BRANCHES), np.int32) if picks else torch.empty((0, 0), device=self.device)

    def _give_up(self, begun: Sequence[PooledRows]) -> None:
        try:
            if self.on_gpu:
                self.stream.synchronize()  # what describes the forwards may be overwritten
        finally:
            self.pool.cancel(begun)

    def _picked_tokens(self, wanted: Sequence[Sequence[int]], copy: int) -> list[np.ndarray]:
        ends = list(accumulate(map(len, wanted)))
        picked = self._host_rows[(self.picked_from(copy) - self.first_picked) // BRANCHES :][: ends[-1]].copy()
        return [picked[end - len(rows) : end] for end, rows in zip(ends, wanted)]

    def _logits_of(self, forward: PackedForward, wanted: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        # As what is sampled from everywhere; a copy, as the next forward overwrites these.
        logits = forward.logits.to(torch.float32, copy=True)
        for rows in wanted:
            if rows and rows[-1] + 1 - rows[0] == len(rows) and all(b > a for a, b in pairwise(rows)):
                yield logits[rows[0] : rows[-1] + 1]
            else:
                yield logits.index_select(0, self._to_device(list(rows)))

    def forward_of(self, count: int) -> PackedForward:
        """The smallest forward of so many rows."""
        if count > self.max_rows:
            raise ValueError(f"{count} rows: a forward has {self.max_rows} at most")
        return self._forwards[self._sizes[bisect_left(self._sizes, count)]]

    def _moves(self, begun: Sequence[PooledRows]) -> Moves:
        """Slots of positions that no forward has written: those of nodes that became text, and of forks."""
        moves: list[Moves] = []
        for pooled in begun:
            known, length = pooled.text.in_table, pooled.rows.length
            if known < length:
                first = pooled.text.table * self.context
                moves.append(np.empty((2, length - known), np.int64))
                moves[-1][:] = range(first + known, first + length), pooled.text.slots[known:length]
        if not moves:
            return NO_MOVES
        joined = np.concatenate(moves, 1) if len(moves) > 1 else moves[0]
        if joined.shape[1] <= MOVES:
            return joined
        places, slots = self._to_device(joined)
        self.tables.scatter_(0, places, slots.int())
        return NO_MOVES

    def _to_device(self, numbers: Any) -> Tensor:
        """Copied without waiting for the forward that the device computes."""
        tensor = torch.as_tensor(numbers, dtype=torch.int64)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else tensor

    def poll_generated(
        self,
        requests: Sequence[ForwardRequest],
        counts: Sequence[int],
        stop: StopFlag,
        teacher: Teacher | None = None,
    ) -> Generator[list[Tokens] | None, None, bool]:
        """Generate so many of the likeliest tokens of each text, some forwards ahead of the host.

        Yield the next tokens of each text when they are there, None while the device computes. Launch no more where
        it is to stop. Return whether there was room for all texts: nothing was done if not.
        """
        while not self._free_copies:
            yield None
        begun = self._begin_steps(requests, counts)
        if begun is None:
            return False
        steps, copy = TokenSteps(begun, requests, counts, teacher), self._free_copies.pop()
        try:
            yield from self._run_steps(steps, begun, copy, stop)
        except BaseException:
            self._give_up(begun)
            raise
        finally:
            self._free_copies.append(copy)
        steps.end(self.pool.slots.give_back)
        self.pool.finish(begun)
        return True

    def _begin_steps(self, requests: Sequence[ForwardRequest], counts: Sequence[int]) -> list[PooledRows] | None:
        with with_stand_ins(requests, counts) as lengthened:
            try:
                begun = self.pool.begin(lengthened)
            except NoRoom:
                return None
        num_rows = sum(pooled.rows.num_rows + 1 - count for pooled, count in zip(begun, counts))
        if len(begun) < len(requests) or num_rows > self.max_rows:
            self.pool.cancel(begun)
            return None
        return begun

    def _run_steps(
        self, steps: TokenSteps, begun: Sequence[PooledRows], copy: int, stop: StopFlag
    ) -> Generator[list[Tokens] | None, None, None]:
        """Launch up to so many forwards as there is room for their tokens; read half of them at a time."""
        count = len(begun)
        most = max(1, min(MAX_STEPS, self._most_picked // (BRANCHES * count)))
        ends: list[Any] = []
        read, total = 0, len(steps)
        while read < total or read < len(ends):
            self._launch_steps(steps, begun, copy, ends, min(total, read + most), most)
            after = len(ends) if self.drafts else min(len(ends), read + max(1, most // 2))
            while not ends[after - 1].query():
                yield None
            known = list(map(len, steps.tokens))
            for step in range(read, after):
                first = (self.picked_from(copy) - self.first_picked) // BRANCHES + step % most * count
                steps.add(step, self._host_rows[first : first + len(steps.going_on(step))])
            read = after
            total = 0 if stop.is_set() else total
            self._launch_steps(steps, begun, copy, ends, min(total, read + most), most)  # before they are handled
            yield [tuple(tokens[start:]) for tokens, start in zip(steps.tokens, known)]

    def _launch_steps(
        self, steps: TokenSteps, begun: Sequence[PooledRows], copy: int, ends: list[Any], end: int, most: int
    ) -> None:
        """Launch the forwards up to this one; `ends` has an event for each that is launched."""
        for step in range(len(ends), end):
            number = step % most
            first_picked = self.picked_from(copy) + number * BRANCHES * len(begun)
            with torch.inference_mode(), on(self.stream):
                if step:
                    forward = self.forward_of(len(steps.going_on(step)))
                    forward.fill_step(steps, step, copy + number, first_picked)
                else:
                    rows = steps.first_rows(first_picked, self.unread)
                    forward = self.forward_of(sum(own.num_rows for own in rows))
                    forward.fill(rows, self._moves(begun), copy)
                forward.launch()
                ends.append(self._end())
            steps.teach(step)

    def can_grow(self, request: ForwardRequest, levels: Sequence[Level]) -> bool:
        """Whether `poll_levels` can grow such a tree."""
        count, most = num_expanded(tuple(map(tuple, levels)))
        if not self.drafts or len(levels) >= MAX_LEVELS or max((most, *request.num_children)) > BRANCHES:
            return False
        known = request.num_cached  # where that is wrong, and too much is new, `poll_levels` raises
        num_new = self.pool.num_new(request) if known is None else len(request.tokens) - min(known, request.start - 1)
        return request.num_positions + count + len(request.tree) + num_new <= self.max_rows

    def poll_levels(
        self, request: ForwardRequest, levels: Sequence[Level]
    ) -> Generator[tuple[Tokens, ...] | None, None, None]:
        """The children of each level of a growing tree, as they come: greedy; yield None while the device computes."""
        growth = DeviceGrowth(request, levels)
        [pooled] = begun = self.pool.begin([growth.request])
        try:
            ends = self._launch_levels(growth, pooled)
            self.launched = LaunchedTree(growth, self.picked[: len(self._given)], self.stream, ends[-1])
            for number, end in enumerate(ends):
                while not end.query():
                    yield None
                children = growth.children(number, self._host_rows)
                if number < len(levels):
                    yield children
        except BaseException:
            self._give_up(begun)
            raise
        finally:
            launched, self.launched = self.launched, None
            if launched is not None:
                launched.close()
        self.pool.finish(begun)
        self.pool.name_nodes(pooled, self.pool.named_nodes(pooled, growth.tokens))
        yield children

    def can_follow(self, request: ForwardRequest, launched: LaunchedGrowth) -> bool:
        """Whether `poll_following` can compute that tree after this text."""
        if not isinstance(launched, LaunchedTree) or request.tree or not launched.is_fresh:
            return False
        fits = bool(self._free_copies) and self.pool.num_new(request) + len(launched.tree) <= self.max_rows
        return fits and launched.picked.device == self.device and len(launched.picked) <= len(self._given)

    def poll_following(
        self, request: ForwardRequest, launched: LaunchedTree, grown: Callable[[], Tree | None]
    ) -> Generator[None, None, np.ndarray]:
        """The likeliest tokens after a text and after each node of a tree that the same device drafts.

        All is launched at once. Yield while the device computes, and until `grown` says what the tree is.
        """
        asked = range(len(launched.tree))
        [pooled] = begun = self.pool.begin([replace(request, tree=launched.tree, asked=asked)], self.max_rows)
        wanted, copy = list(wanted_rows(begun)), self._free_copies.pop()
        try:
            forward = self.forward_of(pooled.rows.num_rows)
            own_ids = forward.rows.own_ids
            own = range(own_ids, own_ids + len(pooled.rows.tokens))
            rows = replace(pooled.rows, sources=[*own, *launched.sources(self.first_given)])
            with torch.inference_mode(), on(self.stream):
                launched.copy_picked(self._given, self.stream)
                forward.fill([rows], self._moves(begun), copy, wanted[0])
                forward.launch()
                end = self._end()
            while (tree := grown()) is None:  # first: the rest needs no time after the forward has ended
                yield None
            tokens = {stand_in: token for (_, stand_in), (_, token) in zip(launched.tree, tree, strict=True)}
            named = self.pool.named_nodes(pooled, tokens)
            while not end.query():
                yield None
            [picked] = self._picked_tokens(wanted, copy)  # before another forward picks
        except BaseException:
            self._give_up(begun)
            raise
        finally:
            self._free_copies.append(copy)
        self.pool.finish(begun)
        self.pool.name_nodes(pooled, named)
        return picked

    def _launch_levels(self, growth: DeviceGrowth, pooled: PooledRows) -> list[Any]:
        """Launch all forwards of a growing tree; return the events of their ends."""
        ends = []
        with on(self.stream):
            moves = self._moves([pooled])
            for number, rows in enumerate(growth.rows(pooled, self.first_picked, self.unread)):
                forward = self.forward_of(rows.num_rows)
                forward.fill([rows], NO_MOVES if number else moves, number)
                forward.launch()
                ends.append(self._end())
        return ends
