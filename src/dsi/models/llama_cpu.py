"""A Llama forward with few operator calls, for small models on a CPU, where call overhead dominates.

It uses the same weights and KV cache and gives the same logits as the transformers model, in a third of the
calls: query, key and value projections are one matrix, gate and up projections another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache

from dsi.models.hf import Transformer
from dsi.models.kv_sequence import KVLayer, KVSequence
from dsi.models.masked_rows import MaskedRows

STANDARD = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "model_type": "llama"}


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights, with fused projections."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaCpu(Transformer):
    """`LlamaCpu.supports` says which models can run this way; the others run in transformers."""

    supports_trees = True
    attends_apart = False  # it has no other attention than one over all keys

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config
        if not is_standard_llama(model):
            return False
        full_heads = config.num_key_value_heads == config.num_attention_heads == config.hidden_size // config.head_dim
        return bool(rope_type(config) == "default" and full_heads and model.device.type == "cpu")

    def __init__(self, model: Any, max_sequences: int = 4) -> None:
        super().__init__(model, max_sequences)
        self._epsilon = model.config.rms_norm_eps
        self._layers = [fuse_projections(layer) for layer in model.model.layers]
        self._heads = len(self._layers[0].qkv) // (3 * model.config.head_dim)
        self._embedding, self._norm = model.model.embed_tokens.weight.data, model.model.norm.weight.data
        self._lm_head = model.lm_head.weight.data
        with torch.inference_mode():
            positions = torch.arange(self.context)[None]
            cos, sin = model.model.rotary_emb(self._embedding[:1], positions)
        self._cos, self._sin = cos[0].clone(), sin[0].clone()

    def _compute(self, sequence: KVSequence, new_tokens: list[int], num_positions: int) -> Any:
        length, kv_layers = len(sequence.tokens), sequence.cache.layers
        while len(kv_layers) < len(self._layers):
            kv_layers.append(KVLayer())
        try:
            with torch.inference_mode():
                return self._forward(torch.tensor(new_tokens), length, kv_layers, num_positions)
        except BaseException:
            sequence.truncate(length)
            raise

    def _forward(self, ids: Tensor, length: int, kv_layers: list[KVLayer], num_positions: int) -> Tensor:
        end = length + len(ids)
        mask = None if len(ids) == 1 else torch.ones(len(ids), end, dtype=torch.bool).tril(length)
        return self._run(ids, slice(length, end), mask, kv_layers, slice(len(ids) - num_positions, len(ids)))

    def _run_masked(self, cache: Cache, rows: MaskedRows) -> Tensor:
        ids, wanted = torch.tensor(rows.tokens), torch.tensor(rows.wanted, dtype=torch.int64)
        return self._run(ids, rows.positions, rows.visible, cache.layers, wanted)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor | slice,
        mask: Tensor | None,
        kv_layers: list[KVLayer],
        wanted: Tensor | slice,
    ) -> Tensor:
        """The logits of the rows wanted."""
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = functional.embedding(ids, self._embedding)
        for layer, kv_layer in zip(self._layers, kv_layers):
            self._check_cancelled()
            normed = self._rms_norm(x, layer.input_norm)
            x = x + self._all_reduce(self._attend(normed, layer, kv_layer, cos, sin, mask))
            normed = self._rms_norm(x, layer.post_attention_norm)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
            x = x + self._all_reduce(functional.linear(functional.silu(gate) * up, layer.down))
        last = self._rms_norm(x[wanted], self._norm)
        return self._all_gather(functional.linear(last, self._lm_head)).float()

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the partial results of all tensor-parallel ranks; here there is only one."""
        return partial

    def _all_gather(self, logits: Tensor) -> Tensor:
        """Concatenate the logits of all tensor-parallel ranks; here there is only one."""
        return logits

    def _attend(
        self, x: Tensor, layer: LlamaLayer, kv_layer: KVLayer, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        qkv = functional.linear(x, layer.qkv).view(len(x), 3 * self._heads, -1)
        queries_keys = _apply_rotary(qkv[:, : 2 * self._heads], cos, sin).transpose(0, 1)[None]
        values = qkv[:, 2 * self._heads :].transpose(0, 1)[None]
        cached = kv_layer.update(queries_keys[:, self._heads :], values)
        queries = queries_keys[:, : self._heads]
        attention = functional.scaled_dot_product_attention(queries, *cached, attn_mask=mask)
        return functional.linear(attention[0].transpose(0, 1).reshape(len(x), -1), layer.out)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._epsilon)


def is_standard_llama(model: Any) -> bool:
    """Whether this is an unmodified Llama of any size: plain linear layers, without adapters."""
    if type(model) is not LlamaForCausalLM:
        return False
    if any(getattr(model.config, name, None) != value for name, value in STANDARD.items()):
        return False
    blocks = [block for layer in model.model.layers for block in (layer.self_attn, layer.mlp)]
    return all(is_plain_linear(module) for block in blocks for module in block.children() if hasattr(module, "weight"))


def is_plain_linear(module: Any) -> bool:
    """Whether this is a linear layer without an adapter."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def rope_type(config: Any) -> str:
    """The kind of rotary position embedding."""
    kind: str = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return kind


def fuse_projections(layer: Any) -> LlamaLayer:
    """Fuse a layer's projections; the original parameters become views, so that no memory is added."""
    attention, mlp = layer.self_attn, layer.mlp
    return LlamaLayer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=fuse(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        out=attention.o_proj.weight.data,
        post_attention_norm=layer.post_attention_layernorm.weight.data,
        gate_up=fuse(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=mlp.down_proj.weight.data,
    )


def fuse(*parameters: Tensor) -> Tensor:
    """Concatenate weights or biases along their output dimension; those that are adjacent already stay."""
    tensors = [parameter.data for parameter in parameters]
    heights = [len(tensor) for tensor in tensors]
    if not _are_adjacent(tensors):
        with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():  # the model can still be trained
            fused = torch.cat(tensors)
            for parameter, tensor in zip(parameters, torch.split(fused, heights)):
                parameter.data = tensor
        return fused
    return torch.as_strided(tensors[0], (sum(heights), *tensors[0].shape[1:]), tensors[0].stride())


def _are_adjacent(weights: list[Tensor]) -> bool:
    if not all(weight.is_contiguous() and weight.dtype == weights[0].dtype for weight in weights):
        return False
    ends = [weight.data_ptr() + weight.nbytes for weight in weights[:-1]]
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return one_storage and ends == [weight.data_ptr() for weight in weights[1:]]


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
