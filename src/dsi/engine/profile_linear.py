"""Which linear layers are faster compiled, up to how many tokens, and how their weights are best prefetched.

Measured once, then kept for this machine.
"""

from __future__ import annotations

import math
from typing import Any

from dsi.engine.profile_cache import keep_profile, profile_key, read_profile
from dsi.models.cpu.compiler import library_path
from dsi.models.cpu.decoder import linear_layers
from dsi.models.cpu.prefetching import measure_prefetching, use_prefetching
from dsi.models.cpu.transformer import Shape, compilable_layers, measure_max_rows, shape_of

MIN_BYTES = 16 << 20  # of weights; those of a smaller model stay in the cache


def kept_max_rows(model: Any) -> dict[Shape, float]:
    """Up to how many tokens the compiled product of each shape of linear layer is the fastest one."""
    layers: dict[Shape, list[Any]] = {}
    for layer in compilable_layers(model):
        layers.setdefault(shape_of(layer), []).append(layer)
    return {shape: _max_rows(shape, same) for shape, same in layers.items()}


def use_kept_prefetching(model: Any) -> None:
    """Prefetch weights of compiled decoders as is fastest for their number format on this machine."""
    layers = list(linear_layers(model))
    key = profile_key("prefetching", str(layers[0].weight.dtype), library_path().name)
    kept = read_profile(key).get("prefetching")
    if isinstance(kept, list) and len(kept) == 3:
        use_prefetching(int(kept[0]), int(kept[1]), bool(kept[2]))
    elif sum(layer.weight.nbytes for layer in layers) >= MIN_BYTES:
        keep_profile(key, prefetching=list(measure_prefetching(layers)))


def _max_rows(shape: Shape, layers: list[Any]) -> float:
    key = profile_key("linear", shape, library_path().name)
    kept = read_profile(key).get("max_rows")
    if isinstance(kept, int | float):
        return math.inf if kept < 0 else kept
    rows = measure_max_rows(layers)
    keep_profile(key, max_rows=-1 if math.isinf(rows) else rows)  # JSON has no infinity
    return rows
