"""What lies between the matrices of a Llama's layer, as two kernels for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

LEAST = 16  # rows, keys and halves of a head: what the units that multiply matrices take
MOST = 64


def attend(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor, heads: int) -> Tensor:
    """Turn new queries and keys, keep keys and values, and let each token see what came before it.

    A row of `qkv` is one new token; the cache has one head after the other, filled up to `length`.
    """
    new, (shared, room, size) = len(qkv), keys.shape[-3:]
    out = torch.empty(new, heads * size, dtype=qkv.dtype, device=qkv.device)
    rows = new * (heads // shared)
    tile = min(MOST, max(LEAST, next_power_of_2(rows)))
    _attend[(shared, cdiv(rows, tile))](
        qkv,
        cos,
        sin,
        keys,
        values,
        length,
        out,
        size**-0.5,
        room,
        NEW=new,
        HEADS=heads,
        SHARED=shared,
        HALF=size // 2,
        ROWS=tile,
        FRESH=min(MOST, max(LEAST, next_power_of_2(new))),
        HELD=MOST,
    )
    return out


@triton.jit
def _attend(
    qkv,
    cos,
    sin,
    keys,
    values,
    length,
    out,
    scale,
    room,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    FRESH: tl.constexpr,
    HELD: tl.constexpr,
):
    """One head of keys, and some of the queries that read them: all of a token before those of the next."""
    head, part = tl.program_id(0), tl.program_id(1)
    held = tl.load(length)
    groups: tl.constexpr = HEADS // SHARED
    size: tl.constexpr = 2 * HALF
    wide: tl.constexpr = (HEADS + 2 * SHARED) * size
    half, whole = tl.arange(0, HALF), tl.arange(0, size)
    row = part * ROWS + tl.arange(0, ROWS)
    token, query = row // groups, head * groups + row % groups
    inside = (token < NEW)[:, None]
    mine = qkv + (token * wide + query * size)[:, None] + half[None, :]
    q1, q2 = _turned(mine, cos, sin, held + token, inside, HALF)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, size), tl.float32)
    for start in tl.range(0, NEW, FRESH, num_stages=1):  # these first: each token sees at least itself
        fresh = start + tl.arange(0, FRESH)
        there = (fresh < NEW)[:, None]
        its = qkv + (fresh * wide + (HEADS + head) * size)[:, None]
        k1, k2 = _turned(its + half[None, :], cos, sin, held + fresh, there, HALF)
        v = tl.load(its + SHARED * size + whole[None, :], there, 0.0)
        if part == 0:
            place = (head * room + held + fresh)[:, None] * size
            tl.store(keys + place + half[None, :], k1, there)
            tl.store(keys + place + HALF + half[None, :], k2, there)
            tl.store(values + place + whole[None, :], v, there)
        seen = (fresh[None, :] <= token[:, None]) & (fresh < NEW)[None, :]
        best, total, found = _seen(q1, q2, k1, k2, v, seen, scale, best, total, found)
    for start in range(0, held, HELD):
        old = start + tl.arange(0, HELD)
        filled = (old < held)[:, None]
        before = (head * room + old)[:, None] * size
        k1 = tl.load(keys + before + half[None, :], filled, 0.0)
        k2 = tl.load(keys + before + HALF + half[None, :], filled, 0.0)
        v = tl.load(values + before + whole[None, :], filled, 0.0)
        best, total, found = _seen(q1, q2, k1, k2, v, (old < held)[None, :], scale, best, total, found)
    answer = out + (token * HEADS * size + query * size)[:, None] + whole[None, :]
    tl.store(answer, (found / total[:, None]).to(out.dtype.element_ty), inside)


@triton.jit
def _turned(at, cos, sin, place, inside, HALF: tl.constexpr):
    """Both halves of queries or keys, turned by their places."""
    turn = place[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + turn, inside, 0.0).to(tl.float32)
    s = tl.load(sin + turn, inside, 0.0).to(tl.float32)
    a, b = tl.load(at, inside, 0.0), tl.load(at + HALF, inside, 0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    return (x * c - y * s).to(a.dtype), (y * c + x * s).to(a.dtype)


@triton.jit
def _seen(q1, q2, k1, k2, v, seen, scale, best, total, found):
    """What some more keys add to what was found."""
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee") * scale
    score = tl.where(seen, score, -float("inf"))
    better = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp(score - better[:, None])
    fade = tl.exp(best - better)
    found = tl.dot(weight.to(v.dtype), v, found * fade[:, None], input_precision="ieee")
    return better, total * fade + tl.sum(weight, 1), found


def gated(both: Tensor) -> Tensor:
    """The second half of each row, as far as the first half opens its gate."""
    new, inner = len(both), both.shape[-1] // 2
    out = torch.empty(new, inner, dtype=both.dtype, device=both.device)
    _gated[(new, cdiv(inner, 1024))](both, out, inner, BLOCK=1024)
    return out


@triton.jit
def _gated(both, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(both + row * 2 * inner + at, inside, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * inner + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)
