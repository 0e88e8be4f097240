"""A Llama with little around its matrices: for small models, whose forward is mostly the calls between them.

The same weights, cache and answers as the transformers model it is made from, in a third of the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from dsi.models.hf import KVLayer, KVSequence, Transformer
from dsi.models.protocol import Cancelled

PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "model_type": "llama"}


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights; query, key and value in one matrix, gate and up in another."""

    before: Tensor
    qkv: Tensor
    out: Tensor
    after: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaCpu(Transformer):
    """`Lean.fits` says which models can be read this way; the others stay as they are."""

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config
        if not is_plain(model):
            return False
        whole = config.num_key_value_heads == config.num_attention_heads == config.hidden_size // config.head_dim
        return bool(rotation(config) == "default" and whole and model.device.type == "cpu")

    def __init__(self, model: Any, max_sequences: int = 4) -> None:
        super().__init__(model, max_sequences)
        self._epsilon = model.config.rms_norm_eps
        self._layers = [joined(layer) for layer in model.model.layers]
        self._heads = len(self._layers[0].qkv) // (3 * model.config.head_dim)
        self._embedding, self._norm = model.model.embed_tokens.weight.data, model.model.norm.weight.data
        self._words = model.lm_head.weight.data
        with torch.inference_mode():
            places = torch.arange(self.context)[None]
            cos, sin = model.model.rotary_emb(self._embedding[:1], places)
        self._cos, self._sin = cos[0].clone(), sin[0].clone()

    def _compute(self, slot: KVSequence, fresh: list[int], places: int) -> Any:
        length, layers = len(slot.tokens), slot.cache.layers
        while len(layers) < len(self._layers):
            layers.append(KVLayer())
        try:
            with torch.inference_mode():
                return self._forward(torch.tensor(fresh), length, layers, places)
        except BaseException:
            slot.cut(length)
            raise

    def _forward(self, ids: Tensor, length: int, shelves: list[KVLayer], places: int) -> Tensor:
        end = length + len(ids)
        cos, sin = self._cos[length:end, None], self._sin[length:end, None]
        seen = None if len(ids) == 1 else _seen(len(ids), end)
        x = functional.embedding(ids, self._embedding)
        for layer, shelf in zip(self._layers, shelves):
            if self._flag.is_set():
                raise Cancelled
            x = x + self._total(self._attend(self._normed(x, layer.before), layer, shelf, cos, sin, seen))
            gate, up = functional.linear(self._normed(x, layer.after), layer.gate_up).chunk(2, -1)
            x = x + self._total(functional.linear(functional.silu(gate) * up, layer.down))
        last = self._normed(x[len(ids) - places :], self._norm)
        return self._every_word(functional.linear(last, self._words)).float()

    def _total(self, part: Tensor) -> Tensor:
        """What all that hold a part of this model have found; this one holds it all."""
        return part

    def _every_word(self, scores: Tensor) -> Tensor:
        return scores

    def _attend(
        self, x: Tensor, layer: LlamaLayer, shelf: KVLayer, cos: Tensor, sin: Tensor, seen: Tensor | None
    ) -> Tensor:
        qkv = functional.linear(x, layer.qkv).view(len(x), 3 * self._heads, -1)
        turned = _rotated(qkv[:, : 2 * self._heads], cos, sin).transpose(0, 1)[None]
        values = qkv[:, 2 * self._heads :].transpose(0, 1)[None]
        held = shelf.update(turned[:, self._heads :], values)
        found = functional.scaled_dot_product_attention(turned[:, : self._heads], *held, attn_mask=seen)
        return functional.linear(found[0].transpose(0, 1).reshape(len(x), -1), layer.out)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._epsilon)


def is_plain(model: Any) -> bool:
    """A Llama as it was published, whatever its sizes: its matrices are all there is, with no adapters."""
    if type(model) is not LlamaForCausalLM:
        return False
    if any(getattr(model.config, name, None) != value for name, value in PLAIN.items()):
        return False
    halves = [half for layer in model.model.layers for half in (layer.self_attn, layer.mlp)]
    matrices = [part for half in halves for part in half.children() if hasattr(part, "weight")]
    return all(type(part) is nn.Linear and "forward" not in vars(part) for part in matrices)


def rotation(config: Any) -> str:
    """The kind by which queries and keys are turned with their places."""
    found: str = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return found


def joined(layer: Any) -> LlamaLayer:
    """A layer's weights; what it had in several matrices are now parts of one, and take no more room."""
    attention, mlp = layer.self_attn, layer.mlp
    return LlamaLayer(
        before=layer.input_layernorm.weight.data,
        qkv=_one(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj.weight.data,
        after=layer.post_attention_layernorm.weight.data,
        gate_up=_one(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.data,
    )


def _one(*parts: Any) -> Tensor:
    """The matrices of these, one below the other; those that lie so already stay."""
    weights: list[Tensor] = [part.weight.data for part in parts]
    heights = [len(weight) for weight in weights]
    if not _adjoin(weights):
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():  # it can be trained as before
            whole = torch.cat(weights)
            for part, weight in zip(parts, torch.split(whole, heights)):
                part.weight.data = weight
        return whole
    wide = weights[0].shape[1]
    return torch.as_strided(weights[0], (sum(heights), wide), (wide, 1))


def _adjoin(weights: list[Tensor]) -> bool:
    if not all(weight.is_contiguous() and weight.dtype == weights[0].dtype for weight in weights):
        return False
    ends = [weight.data_ptr() + weight.nbytes for weight in weights[:-1]]
    one = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return one and ends == [weight.data_ptr() for weight in weights[1:]]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _seen(new: int, end: int) -> Tensor:
    """Each new token sees what came before it, and itself."""
    return torch.ones(new, end, dtype=torch.bool).tril(end - new)
