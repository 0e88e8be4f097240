"""Triton kernels for what lies between the matrix multiplications of a decoder layer."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

MIN_TILE = 16  # rows, keys and half a head: the smallest operands of tensor cores
MAX_TILE = 64


def attend(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 0.0,
    window: int = 0,
    exact: bool = False,
) -> Tensor:
    """Apply rotary embeddings, append new keys and values to the cache, and compute causal attention.

    A row of `qkv` is one new token; the cache is laid out head by head and filled up to `length`. Before the rotary
    embedding each query and key head is divided by its RMS and multiplied by `q_norm` and `k_norm`, where given. With a
    `window`, a token attends to that many tokens, itself included. With `exact`, keys are taken in the same tiles and
    order wherever the text was cut into forwards.
    """
    new, (kv_heads, capacity, size) = len(qkv), keys.shape[-3:]
    heads = qkv.shape[-1] // size - 2 * kv_heads
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
        q_norm,
        k_norm,
        epsilon,
        scale,
        capacity,
        NEW=new,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HALF_TILE=next_power_of_2(size // 2),
        ROWS=tile,
        NEW_TILE=min(MAX_TILE, max(MIN_TILE, next_power_of_2(new))),
        CACHED_TILE=MAX_TILE,
        WINDOW=window,
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
    q_norm,
    k_norm,
    epsilon,
    scale,
    capacity,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    NEW_TILE: tl.constexpr,
    CACHED_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One KV head, and a tile of the query rows that read it: all of a token before those of the next.

    Normally new keys come first, read where they were computed. With EXACT, tiles begin at multiples of their size and
    keys come in the order of the text; the last tiles hold cached and new keys. Tiles before the window of the first
    token are skipped, which changes no bit: a tile that a row does not see leaves its result as it is.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    cached = tl.load(length)
    groups: tl.constexpr = HEADS // KV_HEADS
    size: tl.constexpr = 2 * HALF
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * size
    whole = tl.arange(0, 2 * HALF_TILE)
    row = part * ROWS + tl.arange(0, ROWS)
    token, query = row // groups, head * groups + row % groups
    inside = (token < NEW)[:, None]
    queries = qkv + (token * stride + query * size)[:, None]
    q1, q2 = _rotate(queries, q_norm, epsilon, cos, sin, cached + token, inside, HALF, HALF_TILE)
    row_max = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, 2 * HALF_TILE), tl.float32)
    cached_end = cached // CACHED_TILE * CACHED_TILE if EXACT else cached
    for start in tl.range(0, 0 if EXACT else NEW, NEW_TILE, num_stages=1):  # each token attends to itself
        new = start + tl.arange(0, NEW_TILE)
        valid = (new < NEW)[:, None]
        new_kv = qkv + (new * stride + (HEADS + head) * size)[:, None]
        k1, k2 = _rotate(new_kv, k_norm, epsilon, cos, sin, cached + new, valid, HALF, HALF_TILE)
        v = tl.load(new_kv + KV_HEADS * size + whole[None, :], _columns(valid, size, 2 * HALF_TILE), 0.0)
        if part == 0:
            _store_kv(keys, values, k1, k2, v, head * capacity + cached + new, valid, HALF, HALF_TILE)
        visible = (new[None, :] <= token[:, None]) & (new < NEW)[None, :]
        visible = _in_window(visible, new, token, WINDOW)
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result, WINDOW)
    for start in range(_first_tile(cached + part * ROWS // groups, CACHED_TILE, WINDOW), cached_end, CACHED_TILE):
        old = start + tl.arange(0, CACHED_TILE)
        filled = (old < cached)[:, None]
        k1, k2, v = _load_kv(keys, values, head * capacity + old, filled, HALF, HALF_TILE)
        visible = _in_window((old < cached)[None, :], old, cached + token, WINDOW)
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result, WINDOW)
    for start in range(cached_end, cached + NEW if EXACT else cached_end, CACHED_TILE):
        position = start + tl.arange(0, CACHED_TILE)
        is_new = (position >= cached)[:, None]
        valid = is_new & (position < cached + NEW)[:, None]
        filled = (position < cached)[:, None]
        k1, k2, v = _load_kv(keys, values, head * capacity + position, filled, HALF, HALF_TILE)
        new_kv = qkv + ((position - cached) * stride + (HEADS + head) * size)[:, None]
        new_k1, new_k2 = _rotate(new_kv, k_norm, epsilon, cos, sin, position, valid, HALF, HALF_TILE)
        k1, k2 = tl.where(is_new, new_k1, k1), tl.where(is_new, new_k2, k2)
        new_v = tl.load(new_kv + KV_HEADS * size + whole[None, :], _columns(valid, size, 2 * HALF_TILE), 0.0)
        v = tl.where(is_new, new_v, v)
        if part == 0:
            _store_kv(keys, values, k1, k2, v, head * capacity + position, valid, HALF, HALF_TILE)
        visible = (position[None, :] <= (cached + token)[:, None]) & (position < cached + NEW)[None, :]
        visible = _in_window(visible, position, cached + token, WINDOW)
        row_max, total, result = _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result, WINDOW)
    if WINDOW:  # rows beyond the last token may have seen no key at all
        total = tl.where(token < NEW, total, 1.0)
    output = out + (token * HEADS * size + query * size)[:, None] + whole[None, :]
    tl.store(output, (result / total[:, None]).to(out.dtype.element_ty), _columns(inside, size, 2 * HALF_TILE))


@triton.jit
def _columns(rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The mask of these rows of a tile whose columns may be more than the tensor's: tiles are powers of two."""
    if WIDTH != TILE:
        rows = rows & (tl.arange(0, TILE) < WIDTH)[None, :]
    return rows


@triton.jit
def _first_tile(query, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Where the tile of keys begins that holds the first key of a query's window."""
    start = 0
    if WINDOW:
        start = tl.maximum(query - WINDOW + 1, 0) // TILE * TILE
    return start


@triton.jit
def _in_window(visible, key, query, WINDOW: tl.constexpr):
    if WINDOW:
        visible = visible & (key[None, :] > query[:, None] - WINDOW)
    return visible


@triton.jit
def _rotate(pointer, norm, epsilon, cos, sin, position, inside, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    """Load both halves of queries or keys, and apply the norm of a head and the rotary embedding, where given."""
    half = tl.arange(0, HALF_TILE)
    inside = _columns(inside, HALF, HALF_TILE)
    a, b = tl.load(pointer + half[None, :], inside, 0.0), tl.load(pointer + HALF + half[None, :], inside, 0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + epsilon)[:, None]
        x = x * factor * tl.load(norm + half, half < HALF, 0.0).to(tl.float32)[None, :]
        y = y * factor * tl.load(norm + HALF + half, half < HALF, 0.0).to(tl.float32)[None, :]
    if cos is not None:
        table = position[:, None] * (2 * HALF) + half[None, :]
        c = tl.load(cos + table, inside, 0.0).to(tl.float32)
        s = tl.load(sin + table, inside, 0.0).to(tl.float32)
        x, y = x * c - y * s, y * c + x * s
    return x.to(a.dtype), y.to(a.dtype)


@triton.jit
def _load_kv(keys, values, row, filled, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    """Both halves of the keys, and the values, in these rows of the cache."""
    half, whole, source = tl.arange(0, HALF_TILE), tl.arange(0, 2 * HALF_TILE), row[:, None] * (2 * HALF)
    filled_half = _columns(filled, HALF, HALF_TILE)
    k1 = tl.load(keys + source + half[None, :], filled_half, 0.0)
    k2 = tl.load(keys + source + HALF + half[None, :], filled_half, 0.0)
    return k1, k2, tl.load(values + source + whole[None, :], _columns(filled, 2 * HALF, 2 * HALF_TILE), 0.0)


@triton.jit
def _store_kv(keys, values, k1, k2, v, row, valid, HALF: tl.constexpr, HALF_TILE: tl.constexpr):
    half, whole, target = tl.arange(0, HALF_TILE), tl.arange(0, 2 * HALF_TILE), row[:, None] * (2 * HALF)
    valid_half = _columns(valid, HALF, HALF_TILE)
    tl.store(keys + target + half[None, :], k1, valid_half)
    tl.store(keys + target + HALF + half[None, :], k2, valid_half)
    tl.store(values + target + whole[None, :], v, _columns(valid, 2 * HALF, 2 * HALF_TILE))


@triton.jit
def _accumulate(q1, q2, k1, k2, v, visible, scale, row_max, total, result, WINDOW: tl.constexpr):
    """One step of online softmax: add a tile of keys and values to the running result."""
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee") * scale
    score = tl.where(visible, score, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    offset = new_max
    if WINDOW:  # a row may have seen no key yet, and -inf less -inf is no number
        offset = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight = tl.exp(score - offset[:, None])
    rescale = tl.exp(row_max - offset)
    result = tl.dot(weight.to(v.dtype), v, result * rescale[:, None], input_precision="ieee")
    return new_max, total * rescale + tl.sum(weight, 1), result


def norm_and_add(x: Tensor, norm: Any, epsilon: float | None, bias: Tensor) -> Tensor:
    """Return the RMS or layer norm of each row, and add a bias to the rows themselves, in place.

    The bias is that of the next output projection, into which the residual add is fused.
    """
    out, width = torch.empty_like(x), x.shape[-1]
    shift = getattr(norm, "bias", None)
    _norm_and_add[(len(x),)](
        x, norm.weight, shift, bias, out, epsilon, WIDTH=width, BLOCK=next_power_of_2(width), CENTRED=shift is not None
    )
    return out


@triton.jit
def _norm_and_add(
    x, weight, shift, bias, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0) * WIDTH + column
    row = tl.load(x + place, inside, 0.0).to(tl.float32)
    tl.store(x + place, (row + tl.load(bias + column, inside, 0.0).to(tl.float32)).to(x.dtype.element_ty), inside)
    if CENTRED:
        row = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    row = row * tl.load(weight + column, inside, 0.0).to(tl.float32)
    if CENTRED:
        row = row + tl.load(shift + column, inside, 0.0).to(tl.float32)
    tl.store(out + place, row.to(out.dtype.element_ty), inside)


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
