"""A Llama forward in compiled kernels, for CPUs: it reads each weight once for all tokens of a forward."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsi.models.hf import KVLayer
from dsi.models.llama_cpu import LlamaCpu, is_standard_llama, rope_type

WIDTH_MULTIPLE, HEAD_MULTIPLE = 16, 32  # no kernel handles the rest of a vector


def kernels() -> Any:
    """Return the compiled kernels, or None without numba."""
    try:
        return import_module("dsi.models.cpu_kernels")
    except ImportError:
        return None


class LlamaCompiled(LlamaCpu):
    """`LlamaCompiled.supports` says which models can run this way."""

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config
        if not is_standard_llama(model) or rope_type(config) != "default" or model.device.type != "cpu":
            return False
        fits = not (config.hidden_size % WIDTH_MULTIPLE or config.intermediate_size % WIDTH_MULTIPLE)
        fits = fits and config.head_dim % HEAD_MULTIPLE == 0 and model.dtype in (torch.float32, torch.bfloat16)
        return fits and kernels() is not None

    def __init__(self, model: Any, max_sequences: int = 4) -> None:
        super().__init__(model, max_sequences)
        self._kernels, config = kernels(), model.config
        self._query_heads, self._kv_shape = (
            config.num_attention_heads,
            (1, config.num_key_value_heads, 0, config.head_dim),
        )
        none = np.empty(0, np.float32)
        self._compiled_layers = [
            (
                as_float32(layer.input_norm),
                as_array(layer.qkv),
                none,
                as_array(layer.out),
                as_float32(layer.post_attention_norm),
                as_array(layer.gate_up),
                as_array(layer.down),
            )
            for layer in self._layers
        ]
        self._final_norm, self._head = as_float32(self._norm), as_array(self._lm_head)
        self._rotary = as_float32(self._cos), as_float32(self._sin)

    def _forward(self, ids: Tensor, length: int, kv_layers: list[KVLayer], num_positions: int) -> Tensor:
        end = length + len(ids)
        cos, sin = (table[length:end] for table in self._rotary)
        x = self._embedding[ids].float().numpy()
        for weights, kv_layer in zip(self._compiled_layers, kv_layers):
            self._check_cancelled()
            keys, values = kv_layer.reserve(end, self._kv_shape)
            arrays = keys[0].numpy(), values[0].numpy()
            self._kernels.decoder_layer(x, *weights, self._epsilon, cos, sin, *arrays, self._query_heads, length)
            kv_layer.length = end
        last = np.empty((num_positions, x.shape[1]), np.float32)
        self._kernels.rms_norm(x[len(x) - num_positions :], self._final_norm, self._epsilon, last)
        logits = np.empty((num_positions, len(self._head)), np.float32)
        self._kernels.linear(last, self._head, NONE, logits, False, 0, len(self._head))
        return torch.from_numpy(logits)


NONE = np.empty(0, np.float32)  # scales of weights that have none


def as_float32(tensor: Tensor) -> Any:
    return tensor.float().contiguous().numpy()


def as_array(weights: Tensor) -> Any:
    """The same memory as numpy's array; bfloat16 as its bits."""
    return weights.view(torch.int16).numpy().view(np.uint16) if weights.dtype == torch.bfloat16 else weights.numpy()
