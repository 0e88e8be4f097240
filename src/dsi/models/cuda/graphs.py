"""A decoder whose forwards are recorded once and replayed: static cache and inputs, only token ids come back.

Each number of new tokens that is a power of two has a recording; others are padded up to the next, and what
the padding leaves in the cache lies beyond the text and is written over. Cutting the cache back is writing
its length. A recording is in pieces of a few layers, and a forward that nobody wants any longer ends between
two. Models on slices of one device fill one cache together (`shelf.py`).
Where nothing can be recorded, the model runs as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from ctypes import c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from dsi.core.sequence import Tokens
from dsi.models.cuda.draft_pipeline import DraftPipeline
from dsi.models.cuda.fused_ops import fused
from dsi.models.cuda.green_contexts import driver
from dsi.models.cuda.kv_cache import CudaForward, InflightForward, SharedKVCache
from dsi.models.cuda.llama_triton import fits, swift
from dsi.models.hf import common_prefix_length, decoder_layers
from dsi.models.protocol import CancelFlag, Cancelled, ForwardRequest, Model
from dsi.sampling.acceptance_rules import match

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are recorded
LAYERS = 2  # of a piece
MASKED = ("gpt_neo",)  # which see their places by a mask of their own that knows nothing of the cache


How = Callable[[Any], AbstractContextManager[Any]]  # what is done to a model while it is being recorded


class Ended:
    """The mark of what has ended."""

    def query(self) -> bool:
        return True


class EagerForward:
    """A forward as it stands, looking at its flag before the first layer of each piece."""

    segments = 1

    def __init__(self, compute: Callable[[], Tensor], cuts: Sequence[Any], stream: Any = None) -> None:
        self._compute, self._cuts, self._stream = compute, cuts, stream
        self.rows = torch.empty(0)

    def launch(self, piece: int, after: Any, cancelled: CancelFlag) -> Ended:  # noqa: ARG002
        """It has ended when it has begun."""

        def look(*_: Any) -> None:
            if cancelled.is_set():
                raise Cancelled

        with ExitStack() as hooks, torch.inference_mode(), on(self._stream):
            for layer in self._cuts:
                hooks.callback(layer.register_forward_pre_hook(look).remove)
            try:
                self.rows = self._compute()
            finally:
                if self._stream is not None:
                    self._stream.synchronize()  # what it reads may be written over, what it writes read
        return Ended()


class CapturedForward:
    """A forward as CUDA graphs, one for each piece: a replay costs the interpreter next to nothing."""

    def __init__(self, compute: Callable[[], Tensor], cuts: Sequence[Any], pool: Any, stream: Any) -> None:
        self._pool, self._stream = pool, stream
        self._graphs: list[Any] = []
        with ExitStack() as hooks:
            for layer in cuts:
                hooks.callback(layer.register_forward_pre_hook(self._cut).remove)
            self._record()
            try:
                self.rows = compute()
            finally:
                self._graphs[-1].capture_end()  # or the stream would stay as it is
        self.segments = len(self._graphs)
        self._ends = [event() for _ in self._graphs]
        self._replays = [replay(graph, stream) for graph in self._graphs]

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def _cut(self, *_: Any) -> None:
        """What the pieces share lives on in the frames of the forward that is being recorded."""
        self._graphs[-1].capture_end()
        self._record()

    def launch(self, piece: int, after: Any, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        end = self._ends[piece]
        if after is not None and after is not end:
            self._stream.wait_event(after)
        self._replays[piece]()
        end.record(self._stream)
        return end


def replay(graph: Any, stream: Any) -> Callable[[], None]:
    """Asked of the driver itself: torch first makes this stream the current one, which takes it longer."""
    try:
        begin = driver().cuGraphLaunch
        recording, lane = c_void_p(graph.raw_cuda_graph_exec()), c_void_p(stream.cuda_stream)
    except (AttributeError, ValueError):  # another maker's, or an older torch
        return lambda: in_stream(graph, stream)

    def launch() -> None:
        if begin(recording, lane):
            in_stream(graph, stream)  # which looks after the device, and says what is wrong

    return launch


def in_stream(graph: Any, stream: Any) -> None:
    with on(stream):  # which the caller's own work must not find changed
        graph.replay()


def ways(model: Any, room: int) -> list[How]:
    """How a model may be recorded, the fastest first: not all models can be, nor on all machines."""
    return [*([partial(swift, room=room)] if fits(model) else []), fused, nullcontext]


def static_cache(config: Any, room: int) -> Any:
    """All layers with room for the whole text.

    One that keeps a window could not be cut back to before it, and the mask lets no token see beyond its
    window anyway.
    """
    cache = StaticCache(config=config, max_cache_len=room)
    if config.model_type in MASKED or not all(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError(f"a {config.model_type} model keeps a state that cannot be cut back to an earlier token")
    if not hasattr(cache.layers[0], "cumulative_length"):
        raise ValueError("this transformers keeps no length in its caches: version 5.4 and later do")
    cache.layers = [StaticKVLayer(max_cache_len=room) for _ in cache.layers]
    return cache


class StaticKVLayer(StaticLayer):  # type: ignore[misc]
    """Its length and the places to fill are told for all layers at once, not counted in each."""

    places: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self.places.to(self.keys.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values


def on(stream: Any) -> AbstractContextManager[Any]:
    """With this stream for the current one, and the one before afterwards."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class CudaGraphModel:
    """A model on one device, on a slice of it, or spread over several (`pipeline.py`), with a cache for one
    text of up to `room` tokens.

    Several may share the model's weights, each with a stream of its own; one that is made `beside` another
    fills the same cache. One that `guesses` has a cache to itself.
    """

    def __init__(
        self,
        model: Any,
        room: int,
        stream: Any = None,
        segments: int | None = None,
        sizes: Sequence[int] = SIZES,
        share_cache_with: CudaGraphModel | None = None,
        drafts: bool = False,
    ) -> None:
        self.model = model.eval()
        self.context = room
        self.eager_reason = ""  # the forwards are recorded, if there is no reason here
        self._device = model.device
        self._sizes = sorted(size for size in sizes if size <= room)
        self._shelf: SharedKVCache
        self._cache: Any
        deep = list(decoder_layers(model))
        self.segments = max(1, min(len(deep), max(2, len(deep) // LAYERS) if segments is None else segments))
        self._cuts = [deep[i * len(deep) // self.segments] for i in range(1, self.segments)]
        self._stream = self._lane(stream)
        self._length = torch.zeros((), dtype=torch.int64, device=self._device)
        self._length_here = self._here(1)
        self._ids_here, self._found_here = self._here(max(self._sizes)), self._here(max(self._sizes))
        self._found = torch.zeros_like(self._found_here, device=self._device)
        self._next_here = self._here(2)
        # The same memory for the interpreter: writing a number through a tensor takes it ten times as long.
        self._length_now, self._ids_now, self._found_now, self._next_now = (
            each.numpy() for each in (self._length_here, self._ids_here, self._found_here, self._next_here)
        )
        if drafts and share_cache_with is not None:
            raise ValueError("a model that guesses has its cache to itself")
        self._followers: list[CudaForward] = []
        self._guess_seconds: dict[int, float] = {}  # by the piece of a guess: what it took lately
        self._forwards = self._prepared(share_cache_with, drafts)

    @property
    def cached_tokens(self) -> list[int]:
        """The text in the cache."""
        return self._shelf.tokens

    def shares_cache_with(self, other: CudaGraphModel) -> bool:
        """Whether both fill one cache."""
        return self._shelf is other._shelf

    @property
    def cancel_points(self) -> int:
        """In how many parts virtual time sees a forward: it ends after one and a half pieces on average,
        as one is on its way while another computes.
        """
        return max(1, self.segments // 3)

    @property
    def on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _here(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self.on_gpu)

    def _lane(self, stream: Any) -> Any:
        if stream is None and self.on_gpu:
            return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def _prepared(
        self, share_cache_with: CudaGraphModel | None, drafts: bool
    ) -> dict[int, EagerForward | CapturedForward]:
        plain = {size: EagerForward(self._computer(size), self._cuts, self._stream) for size in self._sizes}
        if self.on_gpu:
            torch.cuda.synchronize(self._device)  # the weights are there
        with torch.inference_mode(), on(self._stream):
            self._take_cache(share_cache_with)
            devices = dict.fromkeys(str(weight.device) for weight in self.model.parameters())
            if not self.on_gpu or len(devices) > 1:
                self.eager_reason = f"forwards on {' and '.join(devices)} are not recorded"
                return dict(plain)
            for how in ways(self.model, self.context):
                try:
                    found, self.eager_reason = self._recorded(how, drafts), ""
                    return found
                except torch.OutOfMemoryError:
                    raise  # as it stands, it would not fit either
                except Exception as error:
                    said = str(error).splitlines() or [type(error).__name__]
                    self.eager_reason = f"forwards cannot be recorded ({said[0]})"
            self._take_cache(None)  # it could not keep step with others
            return dict(plain)

    def _take_cache(self, share_cache_with: CudaGraphModel | None) -> None:
        """The other's, unless that one's forwards could not be recorded: such take no turns."""
        self._shelf, self._cache = SharedKVCache(), static_cache(self.model.config, self.context)
        self._computed(1)  # its layers get their tensors
        if not all(layer.is_initialized for layer in self._cache.layers):
            raise ValueError(f"a {self.model.config.model_type} model does not use the cache it is given")
        if share_cache_with is not None and not (self.on_gpu and share_cache_with.eager_reason):
            self._share(share_cache_with)

    def _share(self, other: CudaGraphModel) -> None:
        """Each keeps a length of its own: forwards in one piece may be at different places of the text."""
        if (other.model, other.context, other.segments) != (self.model, self.context, self.segments):
            raise ValueError("models that fill one cache must be the same, in the same pieces")
        self._shelf = other._shelf
        self.cached_tokens.clear()  # recording leaves its traces in the cache
        for mine, its in zip(self._cache.layers, other._cache.layers):
            mine.keys, mine.values = its.keys, its.values

    def _recorded(self, how: How, drafts: bool) -> dict[int, EagerForward | CapturedForward]:
        with how(self.model):  # it may have put the weights together, elsewhere
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what is free now could not be had while a forward is being recorded
        pool = torch.cuda.graph_pool_handle()
        found: dict[int, EagerForward | CapturedForward] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            found[size] = self._recording(self._computer(size), how, pool)
        turns = (0, 1) if drafts else ()
        self._followers = [self._recording(self._follower(turn), how, pool) for turn in turns]
        torch.cuda.synchronize()
        return found

    def _recording(self, compute: Callable[[], Tensor], how: How, pool: Any) -> CapturedForward:
        with how(self.model):
            for _ in range(2):  # libraries set themselves up at the first forwards
                compute()
            torch.cuda.synchronize()
            return CapturedForward(compute, self._cuts, pool, self._stream)

    def _computer(self, size: int) -> Callable[[], Tensor]:
        return lambda: self._computed(size)

    def _computed(self, size: int) -> Tensor:
        """One forward, from numbers in this machine's memory to numbers in it: rows stay on the device."""
        ids = self._ids_here[:size].to(self._device, non_blocking=True)
        self._length.copy_(self._length_here[0], non_blocking=True)
        return self._rows(ids, self._found_here[:size])

    def _follower(self, turn: int) -> Callable[[], Tensor]:
        """A forward over the token that the last one found: it need not come here and go back.

        They take turns: what one has told is read while the other computes.
        """

        def follow() -> Tensor:
            self._length.add_(1)
            return self._rows(self._found[:1], self._next_here[turn : turn + 1])

        return follow

    def _rows(self, ids: Tensor, told: Tensor) -> Tensor:
        size = len(ids)
        places = self._length + torch.arange(size, device=self._device)
        for layer in self._cache.layers:
            layer.cumulative_length, layer.places = self._length, places
        rows: Tensor = self.model(
            input_ids=ids[None], position_ids=places[None], past_key_values=self._cache, use_cache=True
        ).logits[0]
        torch.argmax(rows, -1, out=self._found[:size])
        told.copy_(self._found[:size], non_blocking=True)
        return rows

    def answer(self, request: ForwardRequest) -> Tokens:
        steps = self.poll_answer(request)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Tokens = end.value
                return found

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """As `answer`, but it yields while the GPU computes."""
        self._check(request)
        while self._shelf.reader is not None:
            yield None
        begin = self._kept(request)
        found: Tokens = ()
        try:
            while begin < len(request.tokens):
                fresh, size = self._next(request.tokens, begin)
                self._shelf.reader = self if begin + len(fresh) < len(request.tokens) else None
                found += yield from self._reading(request, begin, fresh, size)
                begin += len(fresh)
        finally:
            if self._shelf.reader is self:
                self._shelf.reader = None
        return found[len(found) - request.num_positions :]

    def poll_draft(self, request: ForwardRequest, count: int, teacher: Model | None = None) -> Iterator[int | None]:
        """Guess after guess; `mind` says what is guessed in place of the model itself."""
        [token] = yield from self.poll_answer(request)
        if teacher is not None:
            [token] = teacher.answer(request)
        if self._followers and request.sampling.temperature == 0:
            yield from self._chain(request, token, count, teacher)
        else:
            yield from self._one_by_one(request, token, count, teacher)

    def _chain(self, request: ForwardRequest, token: int, count: int, teacher: Model | None) -> Iterator[int | None]:
        """Each forward is sent after the one before it shortly before that ends: the GPU has no gaps."""
        text = [*request.tokens, token]
        forwards = min(count - 1, self.context + 1 - len(text))
        if forwards:
            self._ids_now[0], self._length_now[0] = token, len(text) - 1
            link = DraftPipeline(self._forwards[1], request.cancelled, self._guess_seconds)
        yield token
        for place in range(forwards):
            said = teacher.answer(ForwardRequest(text, len(text))) if teacher is not None else ()
            yield from link.ended(self._followers[place % 2] if place + 1 < forwards else None)
            self._shelf.hold(len(text) - 1, text[-1:])
            [token] = said or (int(self._next_now[(place - 1) % 2] if place else self._found_now[0]),)
            text.append(token)
            yield token
        if forwards < count - 1:
            yield from self.poll_answer(ForwardRequest(text, len(text)))  # which says that there is no room

    def _one_by_one(
        self, request: ForwardRequest, token: int, count: int, teacher: Model | None
    ) -> Iterator[int | None]:
        text = [*request.tokens, token]
        yield token
        for _ in range(count - 1):
            further = ForwardRequest(text, len(text), None, request.sampling, request.cancelled)
            [token] = yield from self.poll_answer(further)
            if teacher is not None:
                [token] = teacher.answer(further)
            text.append(token)
            yield token

    def _check(self, request: ForwardRequest) -> None:
        if request.start < 1:
            raise ValueError("an empty text: a transformers model needs at least one token to begin with")
        if len(request.tokens) > self.context:
            raise ValueError(f"a text of {len(request.tokens)} tokens: there is room for {self.context}")

    def _kept(self, request: ForwardRequest) -> int:
        """How much of this text need not be read again."""
        return min(common_prefix_length(self.cached_tokens, request.tokens), request.start - 1)

    def _next(self, tokens: Sequence[int], begin: int) -> tuple[list[int], int]:
        """What one forward reads after the first tokens, and how wide a forward."""
        size = self._size(begin, len(tokens) - begin)
        return list(tokens[begin : begin + size]), size

    def _begin(self, forward: CudaForward, begin: int, fresh: list[int], cancelled: CancelFlag) -> InflightForward:
        self._ids_now[: len(fresh)], self._length_now[0] = fresh, begin
        return self._shelf.begin(forward, begin, fresh, cancelled)

    def _reading(
        self, request: ForwardRequest, begin: int, fresh: list[int], size: int
    ) -> Generator[None, None, Tokens]:
        """One forward over these tokens of the text, and the tokens found after each of its places."""
        forward, new = self._forwards[size], len(fresh)
        yield from self._shelf.going_on(self._begin(forward, begin, fresh, request.cancelled))
        if request.sampling.temperature == 0:
            found: Tokens = tuple(self._found_now[:new].tolist())
            return found
        asked = max(0, request.start - begin - 1)  # rows before it are not asked about
        with torch.inference_mode(), on(self._stream):
            return match(forward.rows[asked:new].float(), request.sampling, begin + 1 + asked)

    def _size(self, begin: int, new: int) -> int:
        """The next recorded size that holds all that is new; at the end of the room, one without padding."""
        room = self.context - begin
        for size in self._sizes:
            if new <= size <= room:
                return size
        return max(size for size in self._sizes if size <= new and size <= room)
