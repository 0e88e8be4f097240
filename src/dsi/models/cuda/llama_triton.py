"""A Llama forward in eight kernels per layer, patched in while a forward is captured.

`fused_ops.py` uses torch operators and works for any decoder; here everything between two matrix
multiplications is one Triton kernel (`triton_kernels.py`), and residual adds are fused into the output
projections. No mask is materialised, and only the filled part of the KV cache is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from dsi.models.cuda.fused_ops import fused_norms, patched
from dsi.models.llama_cpu import fuse_projections, is_standard_llama, rope_type

HEAD_SIZES = (32, 64, 128, 256)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # kinds that do not depend on the text's length

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines of all positions
# By context length. Captured graphs read them for as long as a model lives.
_rotary_tables: WeakKeyDictionary[Any, dict[int, RotaryTables]] = WeakKeyDictionary()


def supports_triton(model: Any) -> bool:
    """Whether a model's forward can be computed by these kernels."""
    if not is_standard_llama(model) or model.config.head_dim not in HEAD_SIZES:
        return False
    return rope_type(model.config) in STATIC_ROPE and find_spec("triton") is not None


@contextmanager
def triton_forward(model: Any, max_length: int, exact: bool = False) -> Iterator[None]:
    """Patch a model's layers for texts of up to `max_length` tokens; `exact` as in `triton_kernels.attend`."""
    decoder, tables = model.model, _tables(model, max_length)
    with ExitStack() as patches:
        patches.enter_context(fused_norms(model))
        patches.enter_context(patched(decoder.rotary_emb, "forward", lambda *_, **__: tables))
        patches.enter_context(patched(sys.modules[type(model).__module__], "create_causal_mask", lambda **_: None))
        for number, layer in enumerate(decoder.layers):
            patches.enter_context(patched(layer, "forward", _layer_forward(layer, number, model.config, exact)))
        yield


def _tables(model: Any, max_length: int) -> RotaryTables:
    by_length = _rotary_tables.setdefault(model, {})
    if max_length not in by_length:
        positions = torch.arange(max_length, device=model.device)[None]
        by_length[max_length] = model.model.rotary_emb(model.lm_head.weight, positions)
    return by_length[max_length]


def _layer_forward(layer: Any, number: int, config: Any, exact: bool) -> Callable[..., Tensor]:
    from dsi.models.cuda.triton_kernels import attend, silu_and_mul

    weights = fuse_projections(layer)

    def forward(hidden_states: Tensor, *, position_embeddings: RotaryTables, past_key_values: Any, **_: Any) -> Tensor:
        x, cache = hidden_states[0], past_key_values.layers[number]
        qkv = functional.linear(layer.input_layernorm(x), weights.qkv)
        kv = cache.keys, cache.values, cache.cumulative_length
        attention = attend(qkv, *position_embeddings, *kv, config.num_attention_heads, exact)
        x.addmm_(attention, weights.out.T)
        gate_up = functional.linear(layer.post_attention_layernorm(x), weights.gate_up)
        x.addmm_(silu_and_mul(gate_up), weights.down.T)
        return hidden_states

    return forward
