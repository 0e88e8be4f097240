"""How far ahead the kernels prefetch weights: what is fastest differs from one processor to the next."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_int64
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch

from dsi.models.cpu.compiler import declare, kernel
from dsi.models.cpu.linear import CompiledLinear

FEW = (64, 0)  # bytes ahead with one or two tokens; 0: left to the processor
MANY = ((4096, False), (2560, True), (1536, True))  # with more tokens, and whether into the L1 cache
TOKENS = (1, 5)  # of the products that are timed
MIN_BYTES = 48 << 20  # of weights that are read one after the other: fewer might stay in a cache
REPEATS = 5

Prefetching = tuple[int, int, bool]

declare("set_prefetching", None, c_int64, c_int64, c_int32)


def use_prefetching(few: int, many: int, into_l1: bool) -> None:
    """Set it for all compiled forwards of this process, and of those that it forks. It changes no bit of a result."""
    kernel("set_prefetching")(few, many, int(into_l1))


def measure_prefetching(layers: Sequence[Any]) -> Prefetching:
    """Return the fastest for these linear layers, on one thread, and use it."""
    products = [CompiledLinear(layer) for layer in enough(layers)]
    times: dict[tuple[Any, int], list[float]] = {}
    for _ in range(REPEATS):
        for few, (many, into_l1) in product(FEW, MANY):
            use_prefetching(few, many, into_l1)
            for setting, tokens in ((few, TOKENS[0]), ((many, into_l1), TOKENS[1])):
                times.setdefault((setting, tokens), []).append(seconds(products, tokens))
    few = min(FEW, key=lambda setting: median(times[setting, TOKENS[0]]))
    many, into_l1 = min(MANY, key=lambda setting: median(times[setting, TOKENS[1]]))
    use_prefetching(few, many, into_l1)
    return few, many, into_l1


def enough(layers: Sequence[Any]) -> list[Any]:
    """As many layers as take `MIN_BYTES`, or all."""
    taken, size = [], 0
    for layer in layers:
        if size >= MIN_BYTES:
            break
        taken.append(layer)
        size += layer.weight.nbytes
    return taken


def seconds(products: Sequence[CompiledLinear], tokens: int) -> float:
    inputs = {product: torch.ones((tokens, product.matrix.in_features)) for product in products}
    began = perf_counter()
    for compiled, x in inputs.items():
        compiled(x)
    return perf_counter() - began
