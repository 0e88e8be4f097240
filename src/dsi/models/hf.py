"""Any causal language model of transformers as a backend, with a cache that can be cut back.

A verification keeps what the text has in common with what the cache holds, and computes the rest. A
forward looks at its flag before every layer, so that one that nobody wants any longer stops there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from dsi.models.names import check_exists
from dsi.models.protocol import NEVER, CancelFlag, Cancelled

SPARED = 32  # tokens that one text may cost another in a cache: reading so many again is nothing
SPARE = 64  # tokens of room beyond what is asked for, so that growing is rare
NEAR = 16  # tokens before the end within which two texts of one request usually part


class KVLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values in a buffer with room to spare: cutting it back is a number."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        if not self.is_initialized or end > self.keys.shape[-2]:
            self._grow(key_states, value_states, end + SPARE)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _grow(self, key_states: Tensor, value_states: Tensor, room: int) -> None:
        held = (self.keys, self.values) if self.is_initialized else None
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            new.new_empty((*new.shape[:-2], max(room, 2 * self.length), new.shape[-1]))
            for new in (key_states, value_states)
        )
        if held is not None:
            self.keys[..., : self.length, :] = held[0][..., : self.length, :]
            self.values[..., : self.length, :] = held[1][..., : self.length, :]

    def copy(self, length: int) -> KVLayer:
        other = KVLayer()
        other.update(self.keys[..., :length, :], self.values[..., :length, :])
        return other

    def get_seq_length(self) -> int:
        return self.length


@dataclass
class KVSequence:
    """The cache of one text."""

    cache: Cache = field(default_factory=lambda: Cache(layer_class_to_replicate=KVLayer))
    tokens: list[int] = field(default_factory=list)

    def branch(self, length: int) -> KVSequence:
        """A cache of its own for a text that begins as this one does."""
        shelves = [shelf.copy(length) for shelf in self.cache.layers] if length else []
        branch = KVSequence(tokens=self.tokens[:length])
        branch.cache.layers[:] = shelves
        return branch

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        for shelf in self.cache.layers:
            shelf.length = min(shelf.length, length)


class Transformer:
    """A transformers model on one device. `slots` is how many texts it keeps caches of."""

    def __init__(self, model: Any, max_sequences: int = 4) -> None:
        self.model = model.eval()
        self.context = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        self._slots: list[KVSequence] = []
        self._capacity = max_sequences
        self.spared = SPARED
        self._flag: CancelFlag = NEVER
        self._hooks = [layer.register_forward_pre_hook(self._look) for layer in decoder_layers(model)]

    def release(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()
        self.clear_cache()

    def clear_cache(self) -> None:
        """The next text is read from its beginning."""
        self._slots = []

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag = NEVER) -> Any:
        if start < 1:
            raise ValueError("an empty text: a transformers model needs at least one token to begin with")
        if self.context and len(tokens) > self.context:
            raise ValueError(f"a text of {len(tokens)} tokens: the model's context is {self.context}")
        self._flag = cancelled
        slot, kept = self._slot(tokens, start)
        slot.cut(kept)
        fresh = list(tokens[kept:])
        if not fresh:
            return torch.empty((0, 0))
        logits = self._compute(slot, fresh, len(tokens) + 1 - start)
        slot.tokens += fresh
        return logits

    def _compute(self, slot: KVSequence, fresh: list[int], places: int) -> Any:
        """One forward over the new tokens; if it is cancelled, what some layers have added is cut off."""
        length = len(slot.tokens)
        ids = torch.tensor([fresh], device=self.model.device)
        try:
            with torch.inference_mode():
                logits = self.model(
                    input_ids=ids, past_key_values=slot.cache, use_cache=True, logits_to_keep=max(places, 1)
                ).logits[0]
        except BaseException:
            slot.cut(length)
            raise
        if {shelf.length for shelf in slot.cache.layers} != {length + len(fresh)}:
            kind = self.model.config.model_type
            raise ValueError(f"a {kind} model keeps a state that cannot be cut back to an earlier token")
        return logits[logits.shape[0] - places :].float()

    def _slot(self, tokens: Sequence[int], start: int) -> tuple[KVSequence, int]:
        """The cache with most of this text, and how much of it helps: a place asked about is read anew.

        A text that would cost another one much of what is held of it branches off into a cache of its own.
        """
        best, slot = self._nearest(tokens)
        if len(slot.tokens) - best > self.spared:
            slot = slot.branch(best)
        self._slots = [each for each in self._slots if each is not slot][-(self._capacity - 1) :]
        self._slots = [*self._slots, slot] if self._capacity > 1 else [slot]
        return slot, min(best, start - 1)

    def _nearest(self, tokens: Sequence[int]) -> tuple[int, KVSequence]:
        """Mostly the last one, which this text goes on from: then the others are not looked at."""
        best, found = 0, KVSequence()
        for slot in reversed(self._slots):
            shared = common_prefix_length(slot.tokens, tokens)
            if shared and shared == len(slot.tokens) and slot is self._slots[-1]:
                return shared, slot
            if shared > best or (shared and shared == best and len(slot.tokens) < len(found.tokens)):
                best, found = shared, slot
        return best, found

    def _look(self, *_: Any) -> None:
        if self._flag.is_set():
            raise Cancelled


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike: those of one request part near the end, if at all."""
    length = min(len(a), len(b))
    near = max(0, length - NEAR)
    if list(a[:near]) != list(b[:near]):
        return _halved(a, b, near)
    for i in range(near, length):
        if a[i] != b[i]:
            return i
    return length


def _halved(a: Sequence[int], b: Sequence[int], high: int) -> int:
    """The same for texts that part before `high`, by halving: comparing slices is fast."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers: the one list of modules that is as long as the model is deep."""
    deep = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == deep:
            return module
    return nn.ModuleList()


def load_model(folder: str | Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """The model of a local folder or of the hub."""
    check_exists(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=getattr(torch, dtype))
    except Exception as error:
        raise ValueError(f"{folder}: cannot be loaded ({_first_line(error)})") from error
    return model.to(device)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
