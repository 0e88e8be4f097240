"""Triton kernels for what lies between the matrix multiplications of a Llama layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

MIN_TILE = 16  # rows, keys and half a head: the smallest operands of tensor cores
MAX_TILE = 64


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    heads: int,
    exact: bool = False,
) -> Tensor:
    """Apply rotary embeddings, append new keys and values to the cache, and compute causal attention.

    A row of `qkv` is one new token; the cache is laid out head by head and filled up to `length`. With `exact`, keys
    are taken in the same tiles and order wherever the text was cut into forwards.
    """
    new, (kv_heads, capacity, size) = len(qkv), keys.shape[-3:]
    out = torch.empty(new, heads * size, dtype=qkv.dtype, device=qkv.device)
    rows = new * (heads // kv_heads)
    tile = min(MAX_TILE, max(MIN_TILE, next_power_of_2(rows)))
    _attend[(kv_heads, cdiv(rows, tile))](
        qkv,
        cos,
        sin,
        keys,
        values,
        length,
        out,
        size**-0.5,
        capacity,
        NEW=new,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        ROWS=tile,
        NEW_TILE=min(MAX_TILE, max(MIN_TILE, next_power_of_2(new))),
        CACHED_TILE=MAX_TILE,
        EXACT=exact,
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
    capacity,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NEW_TILE: tl.constexpr,
    CACHED_TILE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One KV head, and a tile of the query rows that read it: all of a token before those of the next.

    Normally new keys come first, read where they were computed. With EXACT, tiles begin at multiples of their size and
    keys come in the order of the text; the last tiles hold cached and new keys.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    cached = tl.load(length)
    groups: tl.constexpr = HEADS // KV_HEADS
    size: tl.constexpr = 2 * HALF
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * size
    half, whole = tl.arange(0, HALF), tl.arange(0, size)
    row = part * ROWS + tl.arange(0, ROWS)
    token, query = row // groups, head * groups + row % groups
    inside = (token < NEW)[:, None]
    queries = qkv + (token * stride + query * size)[:, None] + half[None, :]
    q1, q2 = _rotate(queries, cos, sin, cached + token, inside, HALF)
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, size), tl.float32)
    cached_end = cached // CACHED_TILE * CACHED_TILE if EXACT else cached
    for start in tl.range(0, 0 if EXACT else NEW, NEW_TILE, num_stages=1):  # each token attends to itself
        new = start + tl.arange(0, NEW_TILE)
        valid = (new < NEW)[:, None]
        new_kv = qkv + (new * stride + (HEADS + head) * size)[:, None]
        k1, k2 = _rotate(new_kv + half[None, :], cos, sin, cached + new, valid, HALF)
        v = tl.load(new_kv + KV_HEADS * size + whole[None, :], valid, 0.0)
        if part == 0:
            _store_kv(keys, values, k1, k2, v, head * capacity + cached + new, valid, HALF)
        visible = (new[None, :] <= token[:, None]) & (new < NEW)[None, :]
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result)
    for start in range(0, cached_end, CACHED_TILE):
        old = start + tl.arange(0, CACHED_TILE)
        k1, k2, v = _load_kv(keys, values, head * capacity + old, (old < cached)[:, None], HALF)
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, (old < cached)[None, :], scale, row_max, total, result)
    for start in range(cached_end, cached + NEW if EXACT else cached_end, CACHED_TILE):
        position = start + tl.arange(0, CACHED_TILE)
        is_new = (position >= cached)[:, None]
        valid = is_new & (position < cached + NEW)[:, None]
        k1, k2, v = _load_kv(keys, values, head * capacity + position, (position < cached)[:, None], HALF)
        new_kv = qkv + ((position - cached) * stride + (HEADS + head) * size)[:, None]
        new_k1, new_k2 = _rotate(new_kv + half[None, :], cos, sin, position, valid, HALF)
        k1, k2 = tl.where(is_new, new_k1, k1), tl.where(is_new, new_k2, k2)
        v = tl.where(is_new, tl.load(new_kv + KV_HEADS * size + whole[None, :], valid, 0.0), v)
        if part == 0:
            _store_kv(keys, values, k1, k2, v, head * capacity + position, valid, HALF)
        visible = (position[None, :] <= (cached + token)[:, None]) & (position < cached + NEW)[None, :]
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result)
    output = out + (token * HEADS * size + query * size)[:, None] + whole[None, :]
    tl.store(output, (result / total[:, None]).to(out.dtype.element_ty), inside)


@triton.jit
def _rotate(pointer, cos, sin, position, inside, HALF: tl.constexpr):
    """Load both halves of queries or keys, and apply the rotary embedding of their positions."""
    table = position[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + table, inside, 0.0).to(tl.float32)
    s = tl.load(sin + table, inside, 0.0).to(tl.float32)
    a, b = tl.load(pointer, inside, 0.0), tl.load(pointer + HALF, inside, 0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    return (x * c - y * s).to(a.dtype), (y * c + x * s).to(a.dtype)


@triton.jit
def _load_kv(keys, values, row, filled, HALF: tl.constexpr):
    """Both halves of the keys, and the values, in these rows of the cache."""
    half, whole, source = tl.arange(0, HALF), tl.arange(0, 2 * HALF), row[:, None] * (2 * HALF)
    k1 = tl.load(keys + source + half[None, :], filled, 0.0)
    k2 = tl.load(keys + source + HALF + half[None, :], filled, 0.0)
    return k1, k2, tl.load(values + source + whole[None, :], filled, 0.0)


@triton.jit
def _store_kv(keys, values, k1, k2, v, row, valid, HALF: tl.constexpr):
    half, whole, target = tl.arange(0, HALF), tl.arange(0, 2 * HALF), row[:, None] * (2 * HALF)
    tl.store(keys + target + half[None, :], k1, valid)
    tl.store(keys + target + HALF + half[None, :], k2, valid)
    tl.store(values + target + whole[None, :], v, valid)


@triton.jit
def _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result):
    """One step of online softmax: add a tile of keys and values to the running result."""
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee") * scale
    score = tl.where(visible, score, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    weight = tl.exp(score - new_max[:, None])
    rescale = tl.exp(row_max - new_max)
    result = tl.dot(weight.to(v.dtype), v, result * rescale[:, None], input_precision="ieee")
    return new_max, total * rescale + tl.sum(weight, 1), result


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where a row is the gate followed by the up projection."""
    new, inner = len(gate_up), gate_up.shape[-1] // 2
    out = torch.empty(new, inner, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul[(new, cdiv(inner, 1024))](gate_up, out, inner, BLOCK=1024)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)
