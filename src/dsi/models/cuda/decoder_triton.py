"""A decoder's forward in seven kernels per layer, patched in while a forward is captured.

`fused_ops.py` uses torch operators and works for any decoder; here everything between two linear layers is one Triton
kernel (`triton_kernels.py`). Biases, activations and residual adds are fused into the linear layers (`linear.py`). No
mask is materialised, and only the filled part of the KV cache is read, or its sliding window. In half precision a
token's logits have the same bits whatever is computed beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from dsi.models.cuda.fused_ops import epsilon_of, is_rms_norm, patched
from dsi.models.cuda.packed_rows import PackedRows
from dsi.models.hf import decoder_layers, is_of_transformers, sliding_window
from dsi.models.llama_cpu import fuse, is_plain_linear, rope_type

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_bigcode")
GATED = "silu"  # as in `linear.py`, which needs triton
HALF_PRECISION = torch.float16, torch.bfloat16
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
    head = is_plain_linear(model.lm_head) and model.lm_head.weight.dtype == model.dtype
    return size in HEAD_SIZES and whole and head and all(layer.are_plain() for layer in modules)


def is_on_one_gpu(model: Any) -> bool:
    """Whether all of a model is on one GPU."""
    return model.device.type == "cuda" and {weight.device for weight in model.parameters()} == {model.device}


def has_invariant_rows(model: Any) -> bool:
    """Whether these kernels compute a token's logits with the same bits in every forward: in half precision."""
    return is_on_one_gpu(model) and model.dtype in HALF_PRECISION and supports_triton(model)


@contextmanager
def triton_forward(model: Any, max_length: int, sms: int = 0, kernels: Kernels | None = None) -> Iterator[None]:
    """Patch a model for texts of up to `max_length` tokens, on so many multiprocessors (0: all of the device)."""
    decoder, tables, kernels = model.base_model, _tables(model, max_length), kernels or triton_kernels(model.dtype, sms)
    arrivals = SplitArrivals(len(decoder_layers(model)), sms)
    with ExitStack() as patches:
        if tables is not NO_ROTARY:
            patches.enter_context(patched(decoder.rotary_emb, "forward", lambda *_, **__: tables))
        module = sys.modules[type(model).__module__]
        for name in MASKS:
            if hasattr(module, name):
                patches.enter_context(patched(module, name, lambda **_: None))
        for number, layer in enumerate(decoder_layers(model)):
            patches.enter_context(
                patched(layer, "forward", _layer_forward(layer, number, model.config, kernels, arrivals))
            )
        final_norm = decoder.ln_f if model.config.model_type == "gpt_bigcode" else decoder.norm
        patches.enter_context(patched(final_norm, "forward", lambda x: _norm(kernels, final_norm, x[0])[None]))
        head = model.lm_head
        patches.enter_context(patched(head, "forward", lambda x: kernels.linear(x[0], head.weight, head.bias)[None]))
        yield


class Kernels(NamedTuple):
    """What a decoder is computed with."""

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    attend: Callable[..., Tensor]  # of one text, or of rows of several


def triton_kernels(dtype: torch.dtype, sms: int = 0, packed: bool = False) -> Kernels:
    from dsi.models.cuda.packed_attention import attend_packed
    from dsi.models.cuda.triton_kernels import attend, norm

    return Kernels(_linear_for(dtype, sms), norm, attend_packed if packed else attend)


def torch_kernels() -> Kernels:
    """The same for packed forwards where Triton does not compile."""
    from dsi.models.cuda.torch_kernels import attend_packed, norm

    return Kernels(linear_by_torch, norm, attend_packed)


def _tables(model: Any, max_length: int) -> RotaryTables:
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return NO_ROTARY
    by_length = _rotary_tables.setdefault(model, {})
    if max_length not in by_length:
        positions = torch.arange(max_length, device=model.device)[None]
        by_length[max_length] = rotary(model.lm_head.weight, positions)
    return by_length[max_length]


def _linear_for(dtype: torch.dtype, sms: int) -> Callable[..., Tensor]:
    """The linear layers: in half precision with rows that do not depend on each other, otherwise torch's."""
    from dsi.models.cuda.linear import linear

    return partial(linear, sms=sms) if dtype in HALF_PRECISION else linear_by_torch


def linear_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = ""
) -> Tensor:
    """As `linear.linear`, in torch's kernels."""
    if residual is not None:
        if bias is not None:
            residual.add_(bias)
        return residual.addmm_(x, weight.T)
    y = functional.linear(x, weight, bias)
    if activation == GATED:
        gate, up = y.chunk(2, -1)
        return functional.silu(gate) * up
    return functional.gelu(y, approximate=GELU[activation]) if activation else y


class SplitArrivals:
    """Counts, for each layer, the programs of attention that have finished their share of the keys."""

    def __init__(self, layers: int, sms: int) -> None:
        self._layers, self._sms = layers, sms
        self._counts: Tensor

    def of_layer(self, number: int, qkv: Tensor, keys: Tensor, rows: PackedRows | None) -> Tensor:
        if number == 0:  # all layers' are set to zero at the start of a forward
            shape = self._shape(qkv, keys) if rows is None else (keys.shape[-3], rows.max_split_parts)
            self._counts = torch.zeros(self._layers, *shape, dtype=torch.int32, device=qkv.device)
        return self._counts[number]

    def _shape(self, qkv: Tensor, keys: Tensor) -> tuple[int, ...]:
        from dsi.models.cuda.linear import device_sms
        from dsi.models.cuda.triton_kernels import split_counts

        kv_heads, capacity, size = keys.shape[-3:]
        heads = qkv.shape[-1] // size - 2 * kv_heads
        return split_counts(len(qkv), heads, kv_heads, capacity, self._sms or device_sms(qkv.device))


def _layer_forward(
    layer: Any, number: int, config: Any, kernels: Kernels, arrivals: SplitArrivals
) -> Callable[..., Tensor]:
    modules, linear = LayerModules.of(layer, config.model_type), kernels.linear
    qkv, up = _fuse(modules.qkv), _fuse(modules.up)
    out, down = ((module.weight, module.bias) for module in (modules.out, modules.down))
    activation = config.activation_function if config.model_type == "gpt_bigcode" else GATED
    options: dict[str, Any] = {
        "scale": modules.attention.scaling,
        "window": sliding_window(config, modules.attention),
    }
    if modules.head_norms:
        q_norm, k_norm = modules.head_norms
        options |= {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "epsilon": epsilon_of(q_norm)}

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
        rows: PackedRows | None = getattr(cache, "rows", None)
        fused = linear(_norm(kernels, modules.input_norm, x), *qkv)
        kv = cache.keys, cache.values, cache.cumulative_length if rows is None else rows
        arrived = arrivals.of_layer(number, fused, cache.keys, rows)
        attention = kernels.attend(fused, *position_embeddings, *kv, arrivals=arrived, **options)
        linear(attention, *out, residual=x)
        linear(linear(_norm(kernels, modules.mlp_norm, x), *up, activation=activation), *down, residual=x)
        return hidden_states

    return forward


def _fuse(linears: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """One weight matrix and bias; the parameters become views of them, so captured graphs can read them."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return fuse(*(linear.weight for linear in linears)), fuse(*biases) if biases else None


def _norm(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.norm(x, module.weight, getattr(module, "bias", None), epsilon_of(module))
