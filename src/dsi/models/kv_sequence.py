"""KV caches of texts: over-allocated buffers that are cut back and forked, and keep the accepted path of a tree."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from dsi.core.tree_shape import END
from dsi.models.tree_cache import CachedNodes, cached_path, nodes_below

MIN_MAPPED = 1 << 16  # bytes of a buffer that is mapped by itself
GROWTH = 64  # tokens allocated beyond what is needed, so that buffers rarely grow
NEAR_BEGIN = 4  # tokens that are compared one by one
NEAR_END = 16  # two texts of one request usually diverge within so many tokens of the end


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for keys or values that goes back to the system once it is freed.

    The C library would keep it in pieces, and a server's memory grow with the requests that it has seen.
    """
    size = prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < MIN_MAPPED:
        return like.new_empty(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


class KVLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values in an over-allocated buffer: truncation only changes the length."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.slots: tuple[Tensor, int] | None = None  # of a forward's keys and values, and how many it sees; or behind

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.slots is not None:
            return self._update_slots(*self.slots, key_states, value_states)
        end = self.length + key_states.shape[-2]
        if not self.is_initialized or end > self.keys.shape[-2]:
            self._grow(key_states, value_states, end + GROWTH)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _update_slots(self, slots: Tensor, end: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if end > self.keys.shape[-2]:
            self._grow(key_states, value_states, end + GROWTH)
        self.keys[..., slots, :] = key_states
        self.values[..., slots, :] = value_states
        return self.keys[..., :end, :], self.values[..., :end, :]

    def move(self, sources: list[int], first: int) -> None:
        """Move what is in these slots, none of which is before its destination, to `first` and behind."""
        with torch.inference_mode():
            for states in (self.keys, self.values):
                states[..., first : first + len(sources), :] = states[..., sources, :]

    def _grow(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        previous = (self.keys, self.values) if self.is_initialized else None
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            empty(states, (*states.shape[:-2], max(capacity, 2 * self.length), states.shape[-1]))
            for states in (key_states, value_states)
        )
        if previous is not None:
            length = previous[0].shape[-2]  # all of it: a tree may be cached behind the text
            self.keys[..., :length, :] = previous[0]
            self.values[..., :length, :] = previous[1]

    def reserve(self, length: int, shape: tuple[int, ...]) -> None:
        """Have room for so many tokens in float32; `shape` is that of no tokens' keys."""
        if not self.is_initialized or length > self.keys.shape[-2]:
            none = torch.empty(shape, dtype=torch.float32, device="cpu")
            self._grow(none, none, length + GROWTH)

    def copy(self, length: int) -> KVLayer:
        other = KVLayer()
        other.update(self.keys[..., :length, :], self.values[..., :length, :])
        return other

    def get_seq_length(self) -> int:
        return self.length


@dataclass(eq=False)
class KVSequence:
    """The KV cache of one text and of a tree of draft tokens after it, and their tokens."""

    cache: Cache = field(default_factory=lambda: Cache(layer_class_to_replicate=KVLayer))
    tokens: list[int] = field(default_factory=list)
    nodes: CachedNodes = field(default_factory=dict)
    addresses: Any = None  # of the keys and values, where compiled kernels use them
    owner: Sequence[int] | None = None  # the list of tokens that used it last, kept so that no other has its identity

    def fork(self, length: int) -> KVSequence:
        """Copy the first `length` tokens' keys and values into a new sequence."""
        forked = KVSequence(tokens=self.tokens[:length])
        forked.cache.layers[:] = [layer.copy(length) for layer in self.cache.layers] if length else []
        return forked

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.nodes = {}
        layers = self.cache.layers
        if layers and layers[0].length > length:  # the first grows first
            for layer in layers:
                layer.length = min(layer.length, length)

    def set_slots(self, slots: Tensor | None, end: int = 0) -> None:
        """Put the next forward's keys and values into these slots, of which it sees those before `end`."""
        for layer in self.cache.layers:
            layer.slots = None if slots is None else (slots, end)

    def accept(self, tokens: Sequence[int]) -> None:
        """Make cached nodes that this text goes on with text; keep those below its end, and no others."""
        length = len(self.tokens)
        path = cached_path(self.nodes, tokens[length:])
        is_cached = length + len(path) == len(tokens)
        below, self.nodes = nodes_below(self.nodes, path[-1] if path else END) if is_cached else ([], {})
        self._move([length + slot for slot in (*path, *below)], length)
        self.tokens += tokens[length : length + len(path)]
        for layer in self.cache.layers:
            layer.length = len(self.tokens)

    def _move(self, sources: list[int], first: int) -> None:
        if sources == list(range(first, first + len(sources))):
            return
        for states in self.cache.layers if self.addresses is None else [self.addresses]:
            states.move(sources, first)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Two texts of one request diverge near the end, if at all, and those of two requests mostly near the beginning.
    """
    length = min(len(a), len(b))
    near = max(0, length - NEAR_END)
    for i in range(min(near, NEAR_BEGIN)):
        if a[i] != b[i]:
            return i
    if a.__class__ is not b.__class__:
        a, b = list(a), list(b)
    if a[:near] != b[:near]:
        return _bisect_prefix(a, b, near)
    if a[near:length] == b[near:length]:
        return length
    for i in range(near, length):
        if a[i] != b[i]:
            return i
    return length


def _bisect_prefix(a: Sequence[int], b: Sequence[int], high: int) -> int:
    """The same for texts that diverge before `high`, by bisection: comparing slices is fast."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
