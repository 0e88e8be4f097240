"""A decoder's forward in eight kernels per layer, patched in while a forward is captured.

`fused_ops.py` uses torch operators and works for any decoder; here everything between two matrix
multiplications is one Triton kernel (`triton_kernels.py`), and residual adds are fused into the output
projections. No mask is materialised, and only the filled part of the KV cache is read, or its sliding window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from dsi.models.cuda.fused_ops import epsilon_of, fused_norms, is_rms_norm, patched
from dsi.models.hf import decoder_layers, is_of_transformers, sliding_window
from dsi.models.llama_cpu import fuse, is_plain_linear, rope_type

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_bigcode")
HEAD_SIZES = (32, 64, 96, 128, 256)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # kinds that do not depend on the text's length
GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # torch's names for what it approximates them by
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")  # functions in the decoders' modules

RotaryTables = tuple[Tensor | None, Tensor | None]  # cosines and sines of all positions
NO_ROTARY: RotaryTables = (None, None)
# By context length. Captured graphs read them for as long as a model lives.
_rotary_tables: WeakKeyDictionary[Any, dict[int, RotaryTables]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LayerModules:
    """The modules of a layer, by what they do; those of one tuple are fused into one matrix."""

    attention: Any
    input_norm: Any
    qkv: tuple[Any, ...]
    out: Any
    mlp_norm: Any
    up: tuple[Any, ...]  # with the gate before it, if there is one
    down: Any
    head_norms: tuple[Any, ...] = ()  # of queries and keys

    @classmethod
    def of(cls, layer: Any, model_type: str) -> LayerModules:
        mlp = layer.mlp
        if model_type == "gpt_bigcode":
            own = layer.attn
            return cls(own, layer.ln_1, (own.c_attn,), own.c_proj, layer.ln_2, (mlp.c_fc,), mlp.c_proj)
        own, norm, mlp_norm = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        if model_type == "phi3":
            return cls(own, norm, (own.qkv_proj,), own.o_proj, mlp_norm, (mlp.gate_up_proj,), mlp.down_proj)
        qkv, up = (own.q_proj, own.k_proj, own.v_proj), (mlp.gate_proj, mlp.up_proj)
        head_norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else ()
        return cls(own, norm, qkv, own.o_proj, mlp_norm, up, mlp.down_proj, head_norms)

    def are_plain(self) -> bool:
        """Whether nothing but what these kernels know is computed: linear layers have no adapters, for one."""
        groups = self.qkv, self.up, (self.out,), (self.down,)
        one_kind = all(len({(linear.bias is None, linear.weight.dtype) for linear in group}) == 1 for group in groups)
        linears = [linear for group in groups for linear in group]
        return one_kind and all(map(is_plain_linear, linears)) and all(map(is_rms_norm, self.head_norms))


def supports_triton(model: Any) -> bool:
    """Whether a model's forward can be computed by these kernels."""
    config, layers = model.config, decoder_layers(model)
    if not is_of_transformers(model) or config.model_type not in MODEL_TYPES or find_spec("triton") is None:
        return False
    if config.model_type == "gpt_bigcode":
        known = config.multi_query and config.activation_function in GELU and not config.add_cross_attention
    else:
        known = config.hidden_act == "silu" and rope_type(config) in STATIC_ROPE
    if not known or not len(layers):
        return False
    modules = [LayerModules.of(layer, config.model_type) for layer in layers]
    size = modules[0].attention.head_dim
    rotary = getattr(model.base_model, "rotary_emb", None)
    whole = rotary is None or 2 * len(rotary.inv_freq) == size  # some rotate only a part of each head
    return size in HEAD_SIZES and whole and all(layer.are_plain() for layer in modules)


@contextmanager
def triton_forward(model: Any, max_length: int, exact: bool = False) -> Iterator[None]:
    """Patch a model's layers for texts of up to `max_length` tokens; `exact` as in `triton_kernels.attend`."""
    decoder, tables = model.base_model, _tables(model, max_length)
    with ExitStack() as patches:
        patches.enter_context(fused_norms(model))
        if tables is not NO_ROTARY:
            patches.enter_context(patched(decoder.rotary_emb, "forward", lambda *_, **__: tables))
        module = sys.modules[type(model).__module__]
        for name in MASKS:
            if hasattr(module, name):
                patches.enter_context(patched(module, name, lambda **_: None))
        for number, layer in enumerate(decoder_layers(model)):
            patches.enter_context(patched(layer, "forward", _layer_forward(layer, number, model.config, exact)))
        yield


def _tables(model: Any, max_length: int) -> RotaryTables:
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return NO_ROTARY
    by_length = _rotary_tables.setdefault(model, {})
    if max_length not in by_length:
        positions = torch.arange(max_length, device=model.device)[None]
        by_length[max_length] = rotary(model.lm_head.weight, positions)
    return by_length[max_length]


def _layer_forward(layer: Any, number: int, config: Any, exact: bool) -> Callable[..., Tensor]:
    from dsi.models.cuda.triton_kernels import attend

    modules = LayerModules.of(layer, config.model_type)
    (qkv_weight, qkv_bias), (up_weight, up_bias) = _fuse(modules.qkv), _fuse(modules.up)
    out, down = modules.out, modules.down
    activate = _activation(config)
    head_norms = [norm.weight for norm in modules.head_norms] or [None, None]
    epsilon = epsilon_of(modules.head_norms[0]) if modules.head_norms else 0.0
    fixed = modules.attention.scaling, *head_norms, epsilon, sliding_window(config, modules.attention), exact

    def forward(
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: RotaryTables = NO_ROTARY,
        past_key_values: Any = None,
        layer_past: Any = None,  # as GPT-BigCode calls it
        **__: Any,
    ) -> Tensor:
        caches = layer_past if past_key_values is None else past_key_values
        x, cache = hidden_states[0], caches.layers[number]
        qkv = functional.linear(_norm(modules.input_norm, x, out.bias), qkv_weight, qkv_bias)
        kv = cache.keys, cache.values, cache.cumulative_length
        x.addmm_(attend(qkv, *position_embeddings, *kv, *fixed), out.weight.T)
        up = functional.linear(_norm(modules.mlp_norm, x, down.bias), up_weight, up_bias)
        x.addmm_(activate(up), down.weight.T)
        return hidden_states

    return forward


def _fuse(linears: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """One weight matrix and bias; the parameters become views of them, so captured graphs can read them."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return fuse(*(linear.weight for linear in linears)), fuse(*biases) if biases else None


def _norm(norm: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of the rows of `x`, to which the bias of the next output projection is added already."""
    from dsi.models.cuda.triton_kernels import norm_and_add

    normed: Tensor = norm(x) if bias is None else norm_and_add(x, norm, epsilon_of(norm), bias)
    return normed


def _activation(config: Any) -> Callable[[Tensor], Tensor]:
    from dsi.models.cuda.triton_kernels import silu_and_mul

    if config.model_type != "gpt_bigcode":
        return silu_and_mul
    return lambda x: functional.gelu(x, approximate=GELU[config.activation_function])
