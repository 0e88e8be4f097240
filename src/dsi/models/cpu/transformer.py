"""Any transformers model on the CPU with its linear layers in compiled kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsi.models.cpu.compiler import why_unavailable
from dsi.models.cpu.linear import CompiledLinear, Int8Linear
from dsi.models.hf import Transformer

TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of tokens at which a layer is timed
MAX_LAYERS, REPEATS = 8, 3  # of one shape: one alone would stay in the processor's cache

Shape = tuple[int, int, str]  # outputs, inputs and number format of a linear layer


class FewRows(nn.Module):
    """A linear layer that is compiled for up to `max_rows` rows, and computes more as its other class does."""

    in_features: int
    max_rows: float = math.inf
    compiled: CompiledLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > self.max_rows * self.in_features:
            return super().forward(x)  # type: ignore[no-any-return]
        if self.compiled is None or self.compiled.is_stale(self):
            self.compiled = CompiledLinear(self)
        return self.compiled(x)


class FewRowsLinear(FewRows, nn.Linear):
    pass


class FewRowsInt8Linear(FewRows, Int8Linear):
    pass


COMPILED: dict[type, type] = {nn.Linear: FewRowsLinear, Int8Linear: FewRowsInt8Linear}


class CompiledTransformer(Transformer):
    """A transformers model whose linear layers are compiled for up to `max_rows` tokens, by their shape.

    With more tokens, and where gradients are needed, they compute as before. `release` gives the model back unchanged.
    """

    @staticmethod
    def supports(model: Any) -> bool:
        return not why_unavailable() and any(True for _ in compilable_layers(model))

    def __init__(self, model: Any, max_sequences: int = 4, max_rows: Mapping[Shape, float] | None = None) -> None:
        super().__init__(model, max_sequences)
        limits = max_rows or {}
        self._swapped = [(linear, type(linear)) for linear in compilable_layers(model)]
        for linear, own in self._swapped:
            linear.max_rows = limits.get(shape_of(linear), math.inf)
            linear.__class__ = COMPILED[own]

    def release(self) -> None:
        super().release()
        for linear, own in self._swapped:
            linear.__class__ = own


def compilable_layers(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if CompiledLinear.supports(module))


def shape_of(linear: Any) -> Shape:
    return linear.out_features, linear.in_features, str(linear.weight.dtype)


def measure_max_rows(layers: Sequence[nn.Linear | Int8Linear]) -> float:
    """Up to how many rows compiled products of layers of one shape are faster than torch's; infinite: at all timed."""
    layers = layers[:MAX_LAYERS]
    compiled = [CompiledLinear(layer) for layer in layers]
    own = [lambda x, layer=layer: type(layer).forward(layer, x) for layer in layers]
    dtype = torch.bfloat16 if layers[0].weight.dtype != torch.float32 else torch.float32
    fastest: float = 0
    with torch.inference_mode():
        for rows in TIMED_ROWS:
            x = torch.ones((rows, layers[0].in_features), dtype=dtype)
            if seconds(compiled, x) > seconds(own, x):
                return fastest
            fastest = rows
    return math.inf


def seconds(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """The shortest time of all products, one after the other."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for product in products:
            product(x)
        times.append(time.perf_counter() - began)
    return min(times)
