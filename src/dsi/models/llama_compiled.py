"""A Llama forward in compiled kernels, for CPUs: it reads each weight once for all tokens of a forward.

With several threads, each computes its share of every product, and the logits are the same to the bit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsi.models.hf import KVLayer
from dsi.models.llama_cpu import LlamaCpu, is_standard_llama, rope_type

WIDTH_MULTIPLE, HEAD_MULTIPLE = 16, 32  # no kernel handles the rest of a vector
NONE = np.empty(0, np.float32)  # scales of weights that have none


def kernels() -> Any:
    """Return the compiled kernels, or None without numba."""
    try:
        return import_module("dsi.models.cpu_kernels")
    except ImportError:
        return None


class LlamaCompiled(LlamaCpu):
    """`LlamaCompiled.supports` says which models can run this way. As many threads compute as torch is set to."""

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
        config = model.config
        self._query_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._kv_shape = (1, self._kv_heads, 0, config.head_dim)
        self._norms = [
            (layer.input_norm.float().contiguous(), layer.post_attention_norm.float().contiguous())
            for layer in self._layers
        ]
        self._addresses = np.array([self._layer_addresses(i) for i in range(len(self._layers))], np.int64)
        self._matrix_type = as_array(self._layers[0].qkv[:0])
        self._final_norm, self._head = self._norm.float().numpy(), as_array(self._lm_head)
        self._rotary = self._cos.float().numpy(), self._sin.float().numpy()
        self._compile()

    def _compile(self) -> None:
        """Compile or load the kernels now, so that processes forked later have them: one token, in this thread."""
        x, kv_layers = np.zeros((1, self._embedding.shape[1]), np.float32), [KVLayer() for _ in self._layers]
        layers = self._with_caches(kv_layers, 1)
        self._run_layers(x, layers[:1], 0, kv_layers[0].keys.shape[-2], 1)
        self._kernels.rms_norm(x, self._final_norm, self._epsilon, x)
        self._logits(x, 1)

    def _layer_addresses(self, i: int) -> list[int]:
        """Where a layer's norms, matrices, biases and caches are; 0 is nowhere, or not known yet."""
        layer, (input_norm, post_attention_norm) = self._layers[i], self._norms[i]
        tensors = input_norm, layer.qkv, None, layer.out, post_attention_norm, layer.gate_up, layer.down, None, None
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    @property
    def _kernels(self) -> Any:
        return kernels()  # a module, which an object that is copied must not hold

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Threads beside this one; made where they compute, since they do not survive a fork."""
        return ThreadPoolExecutor(64)

    def _forward(self, ids: Tensor, length: int, kv_layers: list[KVLayer], num_positions: int) -> Tensor:
        x = self._embedding[ids].float().numpy()
        layers = self._with_caches(kv_layers, length + len(x))
        threads = torch.get_num_threads()
        for part in [layers] if threads > 1 else np.split(layers, len(layers)):
            self._check_cancelled()
            self._run_layers(x, part, length, kv_layers[0].keys.shape[-2], threads)
        for kv_layer in kv_layers:
            kv_layer.length = length + len(x)
        last = np.empty((num_positions, x.shape[1]), np.float32)
        self._kernels.rms_norm(x[len(x) - num_positions :], self._final_norm, self._epsilon, last)
        return torch.from_numpy(self._logits(last, threads))

    def _with_caches(self, kv_layers: list[KVLayer], end: int) -> Any:
        """The addresses of all layers, with those of caches that have room for `end` tokens."""
        layers = self._addresses.copy()
        for row, kv_layer in zip(layers, kv_layers):
            row[7:9] = [buffer.data_ptr() for buffer in kv_layer.reserve(end, self._kv_shape)]
        return layers

    def _run_layers(self, x: Any, layers: Any, length: int, room: int, threads: int) -> None:
        rows, width = len(x), self._kv_shape[3]
        sizes = (self._query_heads + 2 * self._kv_heads) * width, self._query_heads * width
        inner = self._layers[0].down.shape[1]
        buffers = [np.empty((rows, size), np.float32) for size in (*sizes, 2 * inner, inner)]
        cos, sin = (table[length : length + rows] for table in self._rotary)
        shape, counter = (self._query_heads, self._kv_heads, room), np.array([0, threads])
        arguments = counter, x, layers, shape, self._matrix_type, self._epsilon, cos, sin, length, *buffers
        self._on_threads(threads, lambda rank: self._kernels.decoder_layers(rank, *arguments))

    def _logits(self, x: Any, threads: int) -> Any:
        logits, size = np.empty((len(x), len(self._head)), np.float32), len(self._head)
        shares = [self._kernels.share(size, self._kernels.COLUMNS, rank, threads) for rank in range(threads)]
        self._on_threads(threads, lambda rank: self._kernels.linear(x, self._head, NONE, logits, False, *shares[rank]))
        return logits

    def _on_threads(self, threads: int, work: Any) -> None:
        others = [self._pool.submit(work, rank) for rank in range(1, threads)]
        work(0)
        for other in others:
            other.result()


def as_array(weights: Tensor) -> Any:
    """The same memory as numpy's array; bfloat16 as its bits."""
    return weights.view(torch.int16).numpy().view(np.uint16) if weights.dtype == torch.bfloat16 else weights.numpy()
