"""Patches that make any decoder's forward use fewer kernels, active while it is captured.

A small forward on a GPU is dominated by kernel launches: each takes microseconds, and servers on one GPU queue
for them. Here a norm is one kernel; rotary embeddings are applied to queries and keys together; grouped query
heads are rows of one attention, where transformers copies the keys for each. Results are equal up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "dsi_grouped"
SDPA = "sdpa"
APPLY_ROTARY = "apply_rotary_pos_emb"  # the function in each decoder's module
UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache")  # attention arguments left to transformers
ApplyRotary = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def fused_forward(model: Any) -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(_grouped_attention(model))
        patches.enter_context(_fused_rotary(sys.modules[type(model).__module__]))
        patches.enter_context(fused_norms(model))
        yield


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute temporarily."""
    own, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


class DerivedTensors:
    """Cache tensors that are the same in all layers of a forward, computed in the first."""

    def __init__(self) -> None:
        self._by_source: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, source: Tensor, derive: Callable[[Tensor], Tensor]) -> Tensor:
        """Derive once per source, which is kept alive: else another tensor could get its id."""
        if id(source) not in self._by_source:
            self._by_source[id(source)] = source, derive(source)
        return self._by_source[id(source)][1]

    def clear(self) -> None:
        self._by_source.clear()


# Grouped-query attention without copies of the keys.

_masks = DerivedTensors()


@contextmanager
def _grouped_attention(model: Any) -> Iterator[None]:
    if model.config._attn_implementation != SDPA:
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(SDPA)
        _masks.clear()


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention implementation for transformers, with one mask for all heads."""
    unsupported = any(others.get(name) is not None for name in UNSUPPORTED)
    if attention_mask is None or attention_mask.shape[1] > 1 or unsupported:
        default: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return default
    batch, heads, new, size = query.shape
    groups = heads // key.shape[1]
    attention = functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * new, size),
        key,
        value,
        attn_mask=_masks(attention_mask, lambda mask: _additive_mask(mask, groups, query.dtype)),
        scale=scaling,
    )
    return attention.reshape(batch, heads, new, -1).transpose(1, 2).contiguous(), None


def _additive_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Convert a mask to an additive one, repeated for all query groups."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.repeat(1, 1, groups, 1)


AttentionInterface.register(GROUPED, attend)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


# Rotary embeddings of queries and keys together.


@contextmanager
def _fused_rotary(module: Any) -> Iterator[None]:
    original: ApplyRotary | None = getattr(module, APPLY_ROTARY, None)
    if original is None or not rotates_halves(original):
        yield
        return
    with patched(module, APPLY_ROTARY, fuse_rotary(original)):
        yield


def fuse_rotary(original: ApplyRotary) -> ApplyRotary:
    """Rotate queries and keys in one operation; calls of another form go to the original."""
    signed_sines = DerivedTensors()

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = cos.dim() == 3 and q.dim() == k.dim() == 4 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if args or kwargs or not whole or cos.dtype != q.dtype:
            return original(q, k, cos, sin, *args, **kwargs)
        both, half = torch.cat((q, k), 1), q.shape[-1] // 2
        sines = signed_sines(sin, lambda sin: torch.cat((-sin[..., :half], sin[..., half:]), -1))
        rotated = torch.addcmul(both * cos[:, None], both.roll(half, -1), sines[:, None])
        return torch.split(rotated, [q.shape[1], k.shape[1]], 1)

    return apply


def rotates_halves(original: ApplyRotary) -> bool:
    """Whether a decoder rotates the two halves of a head, as most do, and not neighbouring elements."""
    generator = torch.Generator().manual_seed(1)
    q, k, cos, sin = (
        torch.rand(shape, generator=generator) for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 4), (1, 3, 4))
    )
    inputs = q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    try:
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(original(*inputs), fuse_rotary(original)(*inputs)))
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False  # it has another signature


# Norms.


@contextmanager
def fused_norms(model: Any) -> Iterator[None]:
    standard: dict[tuple[Any, ...], bool] = {}
    with ExitStack() as patches:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dtype != model.dtype:
                continue
            kind = type(module), module.weight.shape
            if kind not in standard:
                standard[kind] = is_rms_norm(module)
            if standard[kind]:
                patches.enter_context(patched(module, "forward", fuse_norm(module)))
        yield


def fuse_norm(module: Any) -> Callable[[Tensor], Tensor]:
    weight, epsilon = module.weight, epsilon_of(module)
    return lambda x: functional.rms_norm(x, weight.shape, weight, epsilon)


def is_rms_norm(module: Any) -> bool:
    """Whether a module computes the standard RMS norm: some add one to their weights."""
    if epsilon_of(module) is None:
        return False
    tolerance = 1e-5 if module.weight.dtype == torch.float32 else 3e-2
    with torch.inference_mode():
        x = torch.linspace(-3, 2, module.weight.shape[-1]).to(module.weight)
        return bool(torch.allclose(module(x), fuse_norm(module)(x), atol=tolerance, rtol=tolerance))


def epsilon_of(module: Any) -> float | None:
    epsilon: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon
