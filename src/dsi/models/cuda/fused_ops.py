"""The same forward in fewer kernels, for as long as it is being recorded.

On a GPU a small forward is mostly small kernels: each takes microseconds whatever it computes, and servers on
one GPU wait for one another to begin theirs. Here a norm is one kernel; queries and keys turn together;
queries that read the same keys are rows of one attention, where transformers copies the keys for each. The
numbers are the same to the rounding of their format.
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

NAME = "dsi_grouped"
PLAIN = "sdpa"
ROTATION = "apply_rotary_pos_emb"  # in the module of each decoder that turns its queries
MORE = ("position_bias", "softcap", "s_aux", "cache")  # what an attention may be asked for besides
Rotation = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def fused(model: Any) -> Iterator[None]:
    with ExitStack() as parts:
        parts.enter_context(_grouped(model))
        parts.enter_context(_turning(sys.modules[type(model).__module__]))
        parts.enter_context(normed(model))
        yield


@contextmanager
def swapped(of: Any, name: str, new: Any) -> Iterator[None]:
    """An attribute, for a while another."""
    own, old = name in vars(of), getattr(of, name)
    setattr(of, name, new)
    try:
        yield
    finally:
        if own:
            setattr(of, name, old)
        else:
            delattr(of, name)


class Once:
    """What is the same in all layers of a forward is made in the first."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, of: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What has been made of this very tensor, which is kept: another could come to lie in its place."""
        if id(of) not in self._made:
            self._made[id(of)] = of, make(of)
        return self._made[id(of)][1]

    def forget(self) -> None:
        self._made.clear()


# Queries that read the same keys.

_masks = Once()


@contextmanager
def _grouped(model: Any) -> Iterator[None]:
    if model.config._attn_implementation != PLAIN:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(PLAIN)
        _masks.forget()


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention as transformers calls it: one mask for all heads says which places each token sees."""
    asked = any(more.get(name) is not None for name in MORE)
    if attention_mask is None or attention_mask.shape[1] > 1 or asked:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return plain
    batch, heads, new, size = query.shape
    groups = heads // key.shape[1]
    rows = functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * new, size),
        key,
        value,
        attn_mask=_masks(attention_mask, lambda mask: _added(mask, groups, query.dtype)),
        scale=scaling,
    )
    return rows.reshape(batch, heads, new, -1).transpose(1, 2).contiguous(), None


def _added(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, for the rows of all groups."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.repeat(1, 1, groups, 1)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


# Queries and keys that turn with their places.


@contextmanager
def _turning(module: Any) -> Iterator[None]:
    plain: Rotation | None = getattr(module, ROTATION, None)
    if plain is None or not turns_halves(plain):
        yield
        return
    with swapped(module, ROTATION, together(plain)):
        yield


def together(plain: Rotation) -> Rotation:
    """Both in one go, each with its other half; whatever has another form, as it was."""
    signed = Once()

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        whole = cos.dim() == 3 and q.dim() == k.dim() == 4 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if more or named or not whole or cos.dtype != q.dtype:
            return plain(q, k, cos, sin, *more, **named)
        both, half = torch.cat((q, k), 1), q.shape[-1] // 2
        sines = signed(sin, lambda each: torch.cat((-each[..., :half], each[..., half:]), -1))
        found = torch.addcmul(both * cos[:, None], both.roll(half, -1), sines[:, None])
        return torch.split(found, [q.shape[1], k.shape[1]], 1)

    return turned


def turns_halves(plain: Rotation) -> bool:
    """Whether a decoder's rotation is the usual one: some turn neighbours, not halves."""
    dice = torch.Generator().manual_seed(1)
    q, k, cos, sin = (torch.rand(shape, generator=dice) for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 4), (1, 3, 4)))
    inputs = q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    try:
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain(*inputs), together(plain)(*inputs)))
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False  # it is called in another way


# Norms.


@contextmanager
def normed(model: Any) -> Iterator[None]:
    kinds: dict[tuple[Any, ...], bool] = {}
    with ExitStack() as changed:
        for part in model.modules():
            weight = getattr(part, "weight", None)
            if not type(part).__name__.endswith("RMSNorm") or weight is None or weight.dtype != model.dtype:
                continue
            kind = type(part), part.weight.shape
            if kind not in kinds:
                kinds[kind] = is_plain_norm(part)
            if kinds[kind]:
                changed.enter_context(swapped(part, "forward", norm(part)))
        yield


def norm(part: Any) -> Callable[[Tensor], Tensor]:
    weight, epsilon = part.weight, _epsilon(part)
    return lambda x: functional.rms_norm(x, weight.shape, weight, epsilon)


def is_plain_norm(part: Any) -> bool:
    """Whether it is what its name says: some add one to their weights."""
    if _epsilon(part) is None:
        return False
    near = 1e-5 if part.weight.dtype == torch.float32 else 3e-2
    with torch.inference_mode():
        x = torch.linspace(-3, 2, part.weight.shape[-1]).to(part.weight)
        return bool(torch.allclose(part(x), norm(part)(x), atol=near, rtol=near))


def _epsilon(part: Any) -> float | None:
    found: float | None = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    return found
