"""Triton kernels for what lies between the matrix multiplications of a decoder layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dsi.models.cuda.linear import launch_next, launch_options, shared_memory, wait_for_inputs
from dsi.models.cuda.packed_rows import KEYS, ROWS, num_parts, split_limits  # both attentions have the same bits

NEW = 16  # new tokens of a tile
STAGES = 3  # tiles of keys that are read ahead


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
    arrivals: Tensor | None = None,
) -> Tensor:
    """Apply rotary embeddings, append new keys and values to the cache, and compute causal attention.

    A row of `qkv` is one new token; the cache is laid out head by head and filled up to `length`. Before the rotary
    embedding each query and key head is divided by its RMS and multiplied by `q_norm` and `k_norm`, where given. With a
    `window`, a token attends to that many tokens, itself included. Tiles of keys are attended to one by one, and joined
    in the order of the text: a row's bits depend neither on the cut of the text nor on the number of programs that
    share its tiles, which is the length of a row of `arrivals` (`split_counts`), zeros; without, one does all.
    """
    new, (kv_heads, capacity, size) = len(qkv), keys.shape[-3:]
    heads = qkv.shape[-1] // size - 2 * kv_heads
    out = torch.empty(new, heads * size, dtype=qkv.dtype, device=qkv.device)
    parts = num_parts(new, heads // kv_heads)
    splits = 1 if arrivals is None else arrivals.shape[-1]
    room = kv_heads * parts * cdiv(capacity, KEYS) * ROWS if splits > 1 else 0
    _attend[(kv_heads, parts, splits)](
        qkv,
        cos,
        sin,
        keys,
        values,
        length,
        out,
        q_norm,
        k_norm,
        qkv.new_empty(room, size + 2, dtype=torch.float32),
        arrivals,
        epsilon,
        scale,
        capacity,
        new,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HALF_TILE=next_power_of_2(size // 2),
        ROWS=ROWS,
        NEW=NEW,
        KEYS=KEYS,
        STAGES=stages_for(size, qkv.element_size(), shared_memory(qkv.device)),
        SPLITS=splits,
        WINDOW=window,
        **launch_options(qkv.device),
    )
    return out


def stages_for(size: int, element_size: int, limit: int) -> int:
    """How many tiles of keys and values are read ahead in so much shared memory, beside the queries."""
    return max(1, min(STAGES, (limit - ROWS * size * element_size) // (2 * KEYS * size * element_size)))


def split_counts(new: int, heads: int, kv_heads: int, capacity: int, sms: int) -> tuple[int, int, int]:
    """The shape of `arrivals`: enough programs for every multiprocessor, but no more than there are tiles of keys."""
    groups = heads // kv_heads
    splits, _ = split_limits(new, groups, kv_heads, capacity, sms)
    return kv_heads, num_parts(new, groups), splits


@triton.jit(do_not_specialize=["new"])
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
    partial,
    arrivals,
    epsilon,
    scale,
    capacity,
    new,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    NEW: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One KV head, a tile of the query rows that read it (all of a token before those of the next), and every
    SPLITS-th tile of keys.

    A program that reads new keys and values first writes all of them up to its last token, as others do with the same
    numbers. Tiles before the window of the first token are skipped, which changes no bit: a tile that a row does not
    see leaves its result as it is. The last of the programs that share the tiles joins what they found.
    """
    head, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups: tl.constexpr = HEADS // KV_HEADS
    size: tl.constexpr = 2 * HALF
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * size
    whole = tl.arange(0, 2 * HALF_TILE)
    row = part * ROWS + tl.arange(0, ROWS)
    token, query = row // groups, head * groups + row % groups
    inside = (token < new)[:, None]
    cached = tl.load(length)
    own = tl.minimum(new, (part * ROWS + ROWS - 1) // groups + 1)  # new tokens that these rows see
    first = _first_tile(cached + part * ROWS // groups, KEYS, WINDOW)
    tiles = tl.cdiv(cached + own, KEYS) - first
    wait_for_inputs(OVERLAPS)
    launch_next(OVERLAPS)
    if split < tiles:
        queries = qkv + (token * stride + query * size)[:, None]
        q1, q2 = _rotate(queries, q_norm, epsilon, cos, sin, cached + token, inside, HALF, HALF_TILE)
        last = split + (tiles - 1 - split) // SPLITS * SPLITS
        if (first + last) * KEYS + KEYS > cached:
            for start in tl.range(0, own, NEW, num_stages=1):
                added = start + tl.arange(0, NEW)
                valid = (added < own)[:, None]
                source = qkv + (added * stride + (HEADS + head) * size)[:, None]
                k1, k2 = _rotate(source, k_norm, epsilon, cos, sin, cached + added, valid, HALF, HALF_TILE)
                v = tl.load(source + KV_HEADS * size + whole[None, :], _columns(valid, size, 2 * HALF_TILE), 0.0)
                _store_kv(keys, values, k1, k2, v, head * capacity + cached + added, valid, HALF, HALF_TILE)
            tl.debug_barrier()  # other threads of this program read them
        row_max = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, 2 * HALF_TILE), tl.float32)
        output = out + (token * HEADS * size + query * size)[:, None] + whole[None, :]
        stored = _columns(inside, size, 2 * HALF_TILE)
        room = (head * tl.num_programs(1) + part) * tl.cdiv(capacity, KEYS) * ROWS + tl.arange(0, ROWS)
        for tile in tl.range(split, tiles, SPLITS, num_stages=STAGES):
            position = (first + tile) * KEYS + tl.arange(0, KEYS)
            filled = (position < cached + own)[:, None]
            k1, k2, v = _load_kv(keys, values, head * capacity + position, filled, HALF, HALF_TILE)
            visible = position[None, :] <= (cached + token)[:, None]
            visible = _in_window(visible, position, cached + token, WINDOW)
            tile_max, tile_total, tile_result = _attend_to_tile(q1, q2, k1, k2, v, visible, scale)
            if SPLITS == 1:
                row_max, total, result = _join(row_max, total, result, tile_max, tile_total, tile_result)
            else:
                place = partial + (room + tile * ROWS) * (size + 2)
                tl.store(place, tile_max, token < new)
                tl.store(place + 1, tile_total, token < new)
                tl.store(place[:, None] + 2 + whole[None, :], tile_result, stored)
        if SPLITS == 1:
            _store_attention(output, result, total, token < new, stored, out.dtype.element_ty)
        else:
            tl.debug_barrier()  # before any thread says so, all have written
            counter = arrivals + (head * tl.num_programs(1) + part) * SPLITS
            if tl.atomic_add(counter, 1, sem="acq_rel") == tl.minimum(SPLITS, tiles) - 1:
                place = partial + room * (size + 2)
                step: tl.constexpr = ROWS * (size + 2)
                for tile in tl.range(0, tiles, 4):  # four are read at once: each takes a while to come
                    max_0, total_0, result_0 = _load_partial(place, tile, tiles, token, new, step, size, whole)
                    max_1, total_1, result_1 = _load_partial(place, tile + 1, tiles, token, new, step, size, whole)
                    max_2, total_2, result_2 = _load_partial(place, tile + 2, tiles, token, new, step, size, whole)
                    max_3, total_3, result_3 = _load_partial(place, tile + 3, tiles, token, new, step, size, whole)
                    row_max, total, result = _join(row_max, total, result, max_0, total_0, result_0)
                    row_max, total, result = _join(row_max, total, result, max_1, total_1, result_1)
                    row_max, total, result = _join(row_max, total, result, max_2, total_2, result_2)
                    row_max, total, result = _join(row_max, total, result, max_3, total_3, result_3)
                _store_attention(output, result, total, token < new, stored, out.dtype.element_ty)


@triton.jit
def _attend_to_tile(q1, q2, k1, k2, v, visible, scale):
    """Softmax over the visible keys of a tile alone: the maximum of a row, and sums that are not divided yet."""
    score = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee") * scale
    score = tl.where(visible, score, -float("inf"))
    row_max = tl.max(score, 1)
    weight = tl.exp(score - _finite(row_max)[:, None])
    return row_max, tl.sum(weight, 1), tl.dot(weight.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _load_partial(place, tile, tiles, token, new, step: tl.constexpr, size: tl.constexpr, column):
    """What another program has found for a tile; where there is none, what changes nothing."""
    valid = token < tl.where(tile < tiles, new, 0)
    row = place + tile * step
    row_max = tl.load(row, valid, -float("inf"), cache_modifier=".cg")
    total = tl.load(row + 1, valid, 0.0, cache_modifier=".cg")
    inside = valid[:, None] & (column < size)[None, :]
    return row_max, total, tl.load(row[:, None] + 2 + column[None, :], inside, 0.0, cache_modifier=".cg")


@triton.jit
def _join(row_max, total, result, tile_max, tile_total, tile_result):
    """Add a tile to those before it. A fused multiply-add is written out: the compiler must not choose one."""
    joined_max = tl.maximum(row_max, tile_max)
    before, after = tl.exp(row_max - _finite(joined_max)), tl.exp(tile_max - _finite(joined_max))
    total = tl.fma(total, before, tile_total * after)
    return joined_max, total, tl.fma(result, before[:, None], tile_result * after[:, None])


@triton.jit
def _finite(row_max):
    """A row may have seen no key yet, and -inf less -inf is no number."""
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def _store_attention(output, result, total, valid, stored, dtype: tl.constexpr):
    total = tl.where(valid, total, 1.0)  # rows beyond the last token may have seen no key at all
    tl.store(output, (result / total[:, None]).to(dtype), stored)


@triton.jit
def _columns(rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The mask of these rows of a tile whose columns may be more than the tensor's: tiles are powers of two."""
    if WIDTH != TILE:
        rows = rows & (tl.arange(0, TILE) < WIDTH)[None, :]
    return rows


@triton.jit
def _first_tile(query, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tile of keys that holds the first key of a query's window."""
    tile = 0
    if WINDOW:
        tile = tl.maximum(query - WINDOW + 1, 0) // TILE
    return tile


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
        x, y = tl.fma(x, c, -(y * s)), tl.fma(y, c, x * s)  # as in `_join`
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


def norm(x: Tensor, weight: Tensor, shift: Tensor | None, epsilon: float | None) -> Tensor:
    """The RMS norm of each row, or with a `shift` the layer norm. A row is one program, alone or among others."""
    out, width = torch.empty_like(x), x.shape[-1]
    block = next_power_of_2(width)
    _norm[(len(x),)](
        x,
        weight,
        shift,
        out,
        epsilon,
        WIDTH=width,
        BLOCK=block,
        CENTRED=shift is not None,
        num_warps=min(16, max(1, block // 256)),
        **launch_options(x.device),
    )
    return out


@triton.jit
def _norm(
    x,
    weight,
    shift,
    out,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0) * WIDTH + column
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAPS)
    launch_next(OVERLAPS)
    row = tl.load(x + place, inside, 0.0).to(tl.float32)
    if CENTRED:
        row = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0.0)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon) * w
    if CENTRED:
        row = row + tl.load(shift + column, inside, 0.0).to(tl.float32)
    tl.store(out + place, row.to(out.dtype.element_ty), inside)
