"""Forwards captured as CUDA graphs, with a static KV cache and static inputs; only token ids are copied back.

A graph is captured for each power of two of new tokens; other numbers are padded up to the next, and the keys
and values of the padding lie beyond the text and are overwritten. Truncating the cache means setting its
length. A forward is captured in segments of a few layers, and a cancelled one stops between two. Models on
green contexts of one device can fill one KV cache together (`kv_cache.py`).
A token's logits are the same to the bit in every forward where the kernels have invariant rows
(`decoder_triton.py`). Elsewhere that takes `exact_size`: every forward computes that many tokens, padded, so operands
always have the same shapes and libraries always choose the same kernels.
Where capture is impossible, the model runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from ctypes import c_void_p
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.cuda.decoder_triton import has_invariant_rows, is_on_one_gpu, supports_triton, triton_forward
from dsi.models.cuda.draft_pipeline import DraftPipeline
from dsi.models.cuda.fused_ops import fused_forward
from dsi.models.cuda.green_contexts import driver, stream_sms
from dsi.models.cuda.kv_cache import CudaForward, SharedKVCache
from dsi.models.hf import decoder_layers
from dsi.models.kv_sequence import common_prefix_length
from dsi.models.protocol import CancelFlag, Cancelled, ForwardRequest, Model, run_to_end
from dsi.sampling.acceptance_rules import match

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are captured
LAYERS_PER_SEGMENT = 2
OWN_MASK = ("gpt_neo",)  # models whose attention mask ignores the KV cache

Patch = Callable[[Any], AbstractContextManager[Any]]  # patches a model while it is captured


class Completed:
    """The event of work that has ended."""

    def query(self) -> bool:
        return True


class EagerForward:
    """A forward without a graph, which checks its cancel flag at the start of each segment."""

    segments = 1

    def __init__(self, compute: Callable[[], Tensor], segment_starts: Sequence[Any], stream: Any = None) -> None:
        self._compute, self._segment_starts, self._stream = compute, segment_starts, stream
        self.logits = torch.empty(0)

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> Completed:  # noqa: ARG002
        """Compute it synchronously."""

        def check_cancelled(*_: Any) -> None:
            if cancelled.is_set():
                raise Cancelled

        with ExitStack() as hooks, torch.inference_mode(), on(self._stream):
            for layer in self._segment_starts:
                hooks.callback(layer.register_forward_pre_hook(check_cancelled).remove)
            try:
                self.logits = self._compute()
            finally:
                if self._stream is not None:
                    self._stream.synchronize()  # its inputs may be overwritten and its outputs read afterwards
        return Completed()


class CapturedForward:
    """A forward as CUDA graphs, one per segment: replaying them takes Python next to no time."""

    def __init__(self, compute: Callable[[], Tensor], segment_starts: Sequence[Any], pool: Any, stream: Any) -> None:
        self._pool, self._stream = pool, stream
        self._graphs: list[Any] = []
        with ExitStack() as hooks:
            for layer in segment_starts:
                hooks.callback(layer.register_forward_pre_hook(self._next_segment).remove)
            self._begin_capture()
            try:
                self.logits = compute()
            finally:
                self._graphs[-1].capture_end()  # else the stream would stay in capture mode
        self.segments = len(self._graphs)
        self._ends = [event() for _ in self._graphs]
        self._replays = [replay(graph, stream) for graph in self._graphs]

    def _begin_capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def _next_segment(self, *_: Any) -> None:
        """Tensors that segments share stay alive in the stack frames of the forward being captured."""
        self._graphs[-1].capture_end()
        self._begin_capture()

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        end = self._ends[segment]
        if after is not None and after is not end:
            self._stream.wait_event(after)
        self._replays[segment]()
        end.record(self._stream)
        return end


def replay(graph: Any, stream: Any) -> Callable[[], None]:
    """Launch through the driver: torch would first switch the current stream, which takes longer."""
    try:
        graph_launch = driver().cuGraphLaunch
        executable, handle = c_void_p(graph.raw_cuda_graph_exec()), c_void_p(stream.cuda_stream)
    except (AttributeError, ValueError):  # not an NVIDIA GPU, or an older torch
        return lambda: replay_in_torch(graph, stream)

    def launch() -> None:
        if graph_launch(executable, handle):
            replay_in_torch(graph, stream)  # which sets the device, and reports what is wrong

    return launch


def replay_in_torch(graph: Any, stream: Any) -> None:
    with on(stream):  # the caller's current stream must not change
        graph.replay()


def capture_patches(model: Any, max_length: int, sms: int = 0) -> list[Patch]:
    """Return the ways to capture a model, fastest first: not all work for every model and machine."""
    triton = [partial(triton_forward, max_length=max_length, sms=sms)] if supports_triton(model) else []
    return [*triton, fused_forward, nullcontext]


def static_cache(config: Any, max_length: int) -> Any:
    """Create a static KV cache with room for the whole text in every layer.

    A layer with a sliding window could not be truncated to before it, and the mask enforces the window anyway.
    """
    cache = StaticCache(config=config, max_cache_len=max_length)
    if config.model_type in OWN_MASK or not all(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError(f"a {config.model_type} model keeps a state that cannot be cut back to an earlier token")
    if not hasattr(cache.layers[0], "cumulative_length"):
        raise ValueError("this transformers keeps no length in its caches: version 5.4 and later do")
    cache.layers = [StaticKVLayer(max_cache_len=max_length) for _ in cache.layers]
    return cache


class StaticKVLayer(StaticLayer):  # type: ignore[misc]
    """A layer whose length and write positions are set for all layers at once, not counted in each."""

    positions: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self.positions.to(self.keys.device)
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values


def last_line(error: Exception) -> str:
    """What an error says: compilers begin with where it is."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def on(stream: Any) -> AbstractContextManager[Any]:
    """Make this stream the current one temporarily."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def hand_over(tensors: Iterable[Tensor], stream: Any) -> None:
    """Let the current stream read what another one computes: it waits for that, and the memory is kept meanwhile."""
    if stream is None:
        return
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    keep_for_current_stream(tensors, stream)


def keep_for_current_stream(tensors: Iterable[Tensor], stream: Any) -> None:
    """Keep the memory of what another stream has computed until the current one has read it."""
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    for tensor in tensors:
        tensor.record_stream(current)


def token_sampler(model: Any) -> Any:
    """What samples tokens in captured forwards; None where it cannot."""
    if find_spec("triton") is None or not is_on_one_gpu(model):
        return None
    sampler = import_module("dsi.models.cuda.token_sampling")
    logits, numbers = torch.zeros(1, 4096, device=model.device), torch.zeros(5, dtype=torch.int64, device=model.device)
    try:
        with torch.cuda.device(model.device):
            sampler.sample_tokens(logits, numbers[:3], numbers[3:4], numbers[4:])
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it cannot be compiled here; a line says why of the kernels that are used most
        return None
    return sampler


def unmarked(token: int) -> int:
    """A token that a device has chosen, marked or not: of a draft token either will do."""
    return token if token >= 0 else -1 - token


def own_stream(stream: Any, device: torch.device, drafts: bool = False) -> Any:
    """The given stream, or a new one of a GPU: a drafter's short forwards go before those of a target beside them."""
    if stream is None and device.type == "cuda":
        return torch.cuda.Stream(device, priority=-drafts)  # type: ignore[no-untyped-call]
    return stream


def event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class CudaGraphModel:
    """A model on one device, on a green context, or split over devices (`device_map.py`), with a KV cache for
    one text of up to `max_length` tokens.

    Several can share the model's weights, each with its own stream; `share_cache_with` makes two fill the same
    KV cache. A model that `drafts` has its own.
    """

    def __init__(
        self,
        model: Any,
        max_length: int,
        stream: Any = None,
        segments: int | None = None,
        sizes: Sequence[int] = SIZES,
        share_cache_with: CudaGraphModel | None = None,
        drafts: bool = False,
        exact_size: int | None = None,
    ) -> None:
        self.model = model.eval()
        self.context = max_length
        self.eager_reason = ""  # why forwards are not captured; empty if they are
        self.slower_reason = ""  # why not with the fastest kernels; empty if they are
        self._device = model.device
        self.exact = False  # whether logits have the same bits in every forward
        self.exact_size: int | None = None
        self._sizes = sorted(size for size in sizes if size <= max_length)
        self._padding = exact_size
        self._has_invariant_rows = has_invariant_rows(model)
        if not self._has_invariant_rows:
            self._pad()
        self._kv: SharedKVCache
        self._cache: Any
        layers = list(decoder_layers(model))
        default_segments = max(2, len(layers) // LAYERS_PER_SEGMENT)
        self.segments = max(1, min(len(layers), default_segments if segments is None else segments))
        self._segment_starts = [layers[i * len(layers) // self.segments] for i in range(1, self.segments)]
        self._stream = own_stream(stream, self._device, drafts)
        self._sampler = token_sampler(self.model)
        # The length of the text before a forward, and how its tokens are sampled.
        self._host_settings = self._host_buffer(3)
        self._settings = torch.zeros_like(self._host_settings, device=self._device)
        self._length = self._settings[0]
        largest = max(*self._sizes, min(exact_size or 0, max_length))  # padding may come later
        self._host_ids, self._host_tokens = self._host_buffer(largest), self._host_buffer(largest)
        self._tokens = torch.zeros_like(self._host_tokens, device=self._device)
        self._marked_tokens = torch.zeros_like(self._tokens)  # the same, marked where the host has to sample
        self._offsets = torch.arange(largest, device=self._device)
        self._host_next = self._host_buffer(2)
        # The same memory as numpy arrays: writing a number through a tensor takes Python ten times as long.
        self._settings_array, self._ids_array, self._tokens_array, self._next_array = (
            buffer.numpy() for buffer in (self._host_settings, self._host_ids, self._host_tokens, self._host_next)
        )
        if drafts and share_cache_with is not None:
            raise ValueError("a model that guesses has its cache to itself")
        self._last_size = self._sizes[0]
        self._followers: list[CudaForward] = []
        self._draft_seconds: dict[int, float] = {}  # by segment of a draft forward: a moving average
        self._forwards = self._prepare(share_cache_with, drafts)

    @property
    def cached_tokens(self) -> list[int]:
        """The text in the KV cache."""
        return self._kv.tokens

    def shares_cache_with(self, other: CudaGraphModel) -> bool:
        return self._kv is other._kv

    @property
    def cancel_points(self) -> int:
        """The cancel points of a forward in simulation: it ends after one and a half segments on average, since
        one is enqueued while another runs.
        """
        return max(1, self.segments // 3)

    @property
    def stream(self) -> Any:
        """The stream that it computes on, by which it may have a slice of a GPU; None on other devices."""
        return self._stream

    @property
    def is_slice(self) -> bool:
        """Whether it has only a part of a GPU's multiprocessors."""
        return bool(self.on_gpu and stream_sms(self._stream))

    @property
    def on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    @property
    def device_name(self) -> str:
        """The kind of GPU."""
        return torch.cuda.get_device_name(self._device) if self.on_gpu else self._device.type

    def _host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self.on_gpu)

    def _prepare(
        self, share_cache_with: CudaGraphModel | None, drafts: bool
    ) -> dict[int, EagerForward | CapturedForward]:
        if self.on_gpu:
            torch.cuda.synchronize(self._device)  # the weights have been copied
        with torch.inference_mode(), on(self._stream):
            self._create_cache(share_cache_with)
            devices = dict.fromkeys(str(weight.device) for weight in self.model.parameters())
            if not self.on_gpu or len(devices) > 1:
                self.eager_reason = f"forwards on {' and '.join(devices)} are not captured"
                return self._eager()
            reason = ""
            patches = capture_patches(self.model, self.context, stream_sms(self._stream))
            for patch in patches:
                try:
                    captured = self._capture_all(patch, drafts)
                    self.slower_reason = reason and f"forwards on the GPU run without the fastest kernels ({reason})"
                    self.exact = self.exact or (self._has_invariant_rows and patch is patches[0])
                    return captured
                except torch.OutOfMemoryError:
                    raise  # an eager forward would not fit either
                except Exception as error:
                    reason = reason or last_line(error)
                    self._pad()
            self.eager_reason = f"forwards cannot be captured ({reason})"
            self._create_cache(None)  # eager forwards cannot interleave with others
            return self._eager()

    def _pad(self) -> None:
        """Compute forwards of one size from now on, if they have to be exact."""
        if self._padding is not None:
            self.exact_size, self.exact = min(self._padding, self.context), True
            self._sizes = [self.exact_size]

    def _eager(self) -> dict[int, EagerForward | CapturedForward]:
        return {
            size: EagerForward(partial(self._compute, size), self._segment_starts, self._stream) for size in self._sizes
        }

    def _create_cache(self, share_cache_with: CudaGraphModel | None) -> None:
        """Create the KV cache, and share the other model's unless that one runs eagerly."""
        self._kv, self._cache = SharedKVCache(), static_cache(self.model.config, self.context)
        self._compute(1)  # initialises the layers' tensors
        if not all(layer.is_initialized for layer in self._cache.layers):
            raise ValueError(f"a {self.model.config.model_type} model does not use the cache it is given")
        if share_cache_with is not None and not (self.on_gpu and share_cache_with.eager_reason):
            self._share(share_cache_with)

    def _share(self, other: CudaGraphModel) -> None:
        """Share the keys and values; each model keeps its own length, as forwards may be at different positions."""
        if (other.model, other.context, other.segments) != (self.model, self.context, self.segments):
            raise ValueError("models that fill one cache must be the same, in the same segments")
        self._kv = other._kv
        self.cached_tokens.clear()  # capturing overwrites the cache
        for own_layer, other_layer in zip(self._cache.layers, other._cache.layers):
            own_layer.keys, own_layer.values = other_layer.keys, other_layer.values

    def _capture_all(self, patch: Patch, drafts: bool) -> dict[int, EagerForward | CapturedForward]:
        with patch(self.model):  # which may have fused the weights into new memory
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory cannot be freed during a capture
        pool = torch.cuda.graph_pool_handle()
        forwards: dict[int, EagerForward | CapturedForward] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            forwards[size] = self._capture(partial(self._compute, size), patch, pool)
        buffers = (0, 1) if drafts else ()
        self._followers = [self._capture(self._follower(buffer), patch, pool) for buffer in buffers]
        torch.cuda.synchronize()
        return forwards

    def _capture(self, compute: Callable[[], Tensor], patch: Patch, pool: Any) -> CapturedForward:
        with patch(self.model):
            for _ in range(2):  # warm-up: libraries initialise during the first forwards
                compute()
            torch.cuda.synchronize()
            return CapturedForward(compute, self._segment_starts, pool, self._stream)

    def _compute(self, size: int) -> Tensor:
        """Run one forward from host memory to host memory: logits stay on the device."""
        ids = self._host_ids[:size].to(self._device, non_blocking=True)
        self._settings.copy_(self._host_settings, non_blocking=True)
        return self._logits(ids, self._host_tokens[:size])

    def _follower(self, buffer: int) -> Callable[[], Tensor]:
        """A forward over the previous one's token, which need not be copied to the host and back.

        Two host buffers alternate: one is read while the other is being written.
        """

        def follow() -> Tensor:
            self._length.add_(1)
            return self._logits(self._tokens[:1], self._host_next[buffer : buffer + 1])

        return follow

    def _logits(self, ids: Tensor, host_tokens: Tensor) -> Tensor:
        size = len(ids)
        positions = self._length + self._offsets[:size]
        for layer in self._cache.layers:
            layer.cumulative_length, layer.positions = self._length, positions
        logits: Tensor = self.model(
            input_ids=ids[None], position_ids=positions[None], past_key_values=self._cache, use_cache=True
        ).logits[0]
        if self._sampler is None:
            torch.argmax(logits, -1, out=self._tokens[:size])
            host_tokens.copy_(self._tokens[:size], non_blocking=True)
        else:
            self._sampler.sample_tokens(logits, self._settings, self._tokens[:size], self._marked_tokens[:size])
            host_tokens.copy_(self._marked_tokens[:size], non_blocking=True)
        return logits

    def last_logits(self) -> Tensor:
        """A copy of the logits of the last forward's tokens, and of the padding after them, for the current stream."""
        with torch.inference_mode(), on(self._stream):
            logits = self._forwards[self._last_size].logits.clone()
        hand_over([logits], self._stream)
        return logits

    def answer(self, request: ForwardRequest) -> Tokens:
        return run_to_end(self.poll_answer(request))

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """As `answer`, but yield while the GPU computes."""
        self._check(request)
        while self._kv.prefilling is not None:
            yield None
        begin = min(common_prefix_length(self.cached_tokens, request.tokens), request.start - 1)  # cached
        tokens: Tokens = ()
        try:
            while begin < len(request.tokens):
                size = self._captured_size(begin, len(request.tokens) - begin)
                begin = min(begin, self.context - size)  # where an exact forward would end beyond the context
                chunk = list(request.tokens[begin : begin + size])
                self._kv.prefilling = self if begin + len(chunk) < len(request.tokens) else None
                tokens += yield from self._run_chunk(request, begin, chunk, size)
                begin += len(chunk)
        finally:
            if self._kv.prefilling is self:
                self._kv.prefilling = None
        return tokens[len(tokens) - request.num_positions :]

    def poll_draft(self, request: ForwardRequest, count: int, teacher: Model | None = None) -> Iterator[int | None]:
        """Draft token after token; a `teacher` determines the tokens in place of the model itself."""
        [token] = yield from self.poll_answer(request)
        if teacher is not None:
            [token] = teacher.answer(request)
        if self._followers and (request.sampling.temperature == 0 or self._samples(request.sampling)):
            yield from self._draft_pipelined(request, token, count, teacher)
        else:
            yield from self._draft_one_by_one(request, token, count, teacher)

    def _draft_pipelined(
        self, request: ForwardRequest, token: int, count: int, teacher: Model | None
    ) -> Iterator[int | None]:
        """Launch each forward shortly before the previous one ends: the GPU has no gaps."""
        text = [*request.tokens, token]
        forwards = min(count - 1, self.context + 1 - len(text))
        if forwards:
            self._ids_array[0] = token
            self._set(len(text) - 1, request.sampling)
            pipeline = DraftPipeline(self._forwards[1], request.cancelled, self._draft_seconds)
        yield token
        for i in range(forwards):
            taught = (
                teacher.answer(ForwardRequest(text, len(text), None, request.sampling)) if teacher is not None else ()
            )
            yield from pipeline.finish(self._followers[i % 2] if i + 1 < forwards else None)
            self._kv.set_tokens(len(text) - 1, text[-1:])
            [token] = taught or (unmarked(int(self._next_array[(i - 1) % 2] if i else self._tokens_array[0])),)
            text.append(token)
            yield token
        if forwards < count - 1:
            yield from self.poll_answer(ForwardRequest(text, len(text)))  # raises: the cache is full

    def _draft_one_by_one(
        self, request: ForwardRequest, token: int, count: int, teacher: Model | None
    ) -> Iterator[int | None]:
        text = [*request.tokens, token]
        yield token
        for _ in range(count - 1):
            extended = ForwardRequest(text, len(text), None, request.sampling, request.cancelled)
            [token] = yield from self.poll_answer(extended)
            if teacher is not None:
                [token] = teacher.answer(extended)
            text.append(token)
            yield token

    def _check(self, request: ForwardRequest) -> None:
        if request.start < 1:
            raise ValueError("an empty text: a transformers model needs at least one token to begin with")
        if len(request.tokens) > self.context:
            raise ValueError(f"a text of {len(request.tokens)} tokens: there is room for {self.context}")

    def _run_chunk(
        self, request: ForwardRequest, begin: int, chunk: list[int], size: int
    ) -> Generator[None, None, Tokens]:
        """Run one forward over these tokens, and return the token after each of them."""
        forward, new, self._last_size = self._forwards[size], len(chunk), size
        self._ids_array[:new] = chunk
        self._set(begin, request.sampling)
        yield from self._kv.run(self._kv.begin(forward, begin, chunk, request.cancelled))
        if len(chunk) < request.start - begin:
            return ()  # none of these positions is asked about
        skipped = max(0, request.start - begin - 1)  # logits that are not requested
        sampling, tokens = request.sampling, tuple(self._tokens_array[skipped:new].tolist())
        if sampling.temperature == 0:
            return tokens
        if self._samples(sampling):
            return tuple(
                [token if token >= 0 else self._sampled(request, begin, skipped + i) for i, token in enumerate(tokens)]
            )
        with torch.inference_mode(), on(self._stream):
            if self.exact_size:  # sampling, too, with one shape
                return match(forward.logits.float(), sampling, begin + 1)[skipped:new]
            return match(forward.logits[skipped:new].float(), sampling, begin + 1 + skipped)

    def _sampled(self, request: ForwardRequest, begin: int, row: int) -> int:
        """The token after a row that the device could not decide."""
        with torch.inference_mode(), on(self._stream):
            logits = self._forwards[self._last_size].logits[row : row + 1].float()
            [token] = match(logits, request.sampling, begin + 1 + row)
        return token

    def _samples(self, sampling: Sampling) -> bool:
        """Whether tokens are sampled on the device, in the forward itself."""
        return self._sampler is not None and bool(self._sampler.samples(sampling))

    def _set(self, length: int, sampling: Sampling) -> None:
        """Tell the next forward the length of the text before it, and how to sample: greedy where the host does."""
        settings = self._sampler.settings_of(sampling) if self._samples(sampling) else (0, 0)
        self._settings_array[:] = length, *settings

    def _captured_size(self, begin: int, new: int) -> int:
        """The next captured size that holds all new tokens; at the end of the cache, one without padding."""
        if self.exact_size:
            return self.exact_size
        room = self.context - begin
        for size in self._sizes:
            if new <= size <= room:
                return size
        return max(size for size in self._sizes if size <= new and size <= room)
