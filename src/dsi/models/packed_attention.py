"""Attention of a forward over new tokens of several texts: each text's rows attend to its own keys, in their buffers.

One attention over all keys with a mask would compute every row with every text's keys, and copy them all before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

NAME = "dsi_packed"  # of this attention, for transformers


class PackedStates(list[Tensor]):
    """The keys or values of each text, and how many rows attend to them."""

    def __init__(self, states: Iterable[Tensor], widths: list[int]) -> None:
        super().__init__(states)
        self.widths = widths


class PackedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values of several texts, in their own buffers, for a forward over new tokens of all.

    `apart`: as they are, for `packed_attention`; otherwise one text's after another's.
    """

    def __init__(self, layers: Sequence[Any], widths: list[int], apart: bool) -> None:
        super().__init__()
        self._layers, self._widths, self._apart = layers, widths, apart

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        new = zip(torch.split(key_states, self._widths, -2), torch.split(value_states, self._widths, -2))
        keys, values = zip(*(layer.update(*states) for layer, states in zip(self._layers, new)))
        if self._apart:
            return PackedStates(keys, self._widths), PackedStates(values, self._widths)
        return torch.cat(keys, -2), torch.cat(values, -2)

    def get_seq_length(self) -> int:
        return sum(layer.length for layer in self._layers)


def packed_attention(
    module: Any,
    query: Tensor,
    key: PackedStates,
    value: PackedStates,
    mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, text by text; the mask is that of all rows and all keys."""
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    attended, row, column = [], 0, 0
    for rows, keys, values in zip(torch.split(query, key.widths, 2), key, value):
        next_row, next_column = row + rows.shape[2], column + keys.shape[2]
        own = mask[..., row:next_row, column:next_column]
        attended.append(
            scaled_dot_product_attention(rows, keys, values, attn_mask=own, scale=scaling, enable_gqa=grouped)
        )
        row, column = next_row, next_column
    return torch.cat(attended, 2).transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def attending_apart(config: Any) -> Iterator[None]:
    """Let a model's forwards attend text by text."""
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own
