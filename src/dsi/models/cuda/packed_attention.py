"""Attention over new tokens and draft trees of several texts, whose keys and values are in slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from dsi.models.cuda.linear import launch_next, launch_options, shared_memory, wait_for_inputs
from dsi.models.cuda.packed_rows import KEYS, ROWS, TAIL, PackedRows, Part
from dsi.models.cuda.triton_kernels import (
    NEW,
    _attend_to_tile,
    _columns,
    _first_tile,
    _in_window,
    _join,
    _load_kv,
    _load_partial,
    _rotate,
    _store_attention,
    _store_kv,
    stages_for,
)


def attend_packed(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 0.0,
    window: int = 0,
    arrivals: Tensor | None = None,
) -> Tensor:
    """As `attend`, for rows of several texts, with the bits of each text alone.

    A token attends to its text up to itself; a node to its text and to its path. Every key stands in its tile at the
    column of its position, wherever its slot is, so that sums are taken in the same order.
    """
    kv_heads, slots, size = keys.shape[-3:]
    heads = qkv.shape[-1] // size - 2 * kv_heads
    plan, splits = rows.plan, 1 if arrivals is None else rows.max_splits
    room = kv_heads * rows.max_split_parts * rows.max_items * ROWS if splits > 1 else 0
    out = torch.empty(len(qkv), heads * size, dtype=qkv.dtype, device=qkv.device)
    _attend_packed[(kv_heads, splits, len(plan.parts))](  # parts that a forward does not have come last
        qkv,
        cos,
        sin,
        keys,
        values,
        plan.parts,
        plan.positions,
        plan.slots,
        plan.order,
        plan.leaves,
        plan.tail_tables,
        plan.splits,
        rows.tables,
        out,
        q_norm,
        k_norm,
        qkv.new_empty(room, size + 2, dtype=torch.float32),
        arrivals,
        epsilon,
        scale,
        slots,
        rows.table_length,
        rows.tails,
        rows.max_split_parts,
        rows.max_items,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HALF_TILE=next_power_of_2(size // 2),
        ROWS=ROWS,
        NEW=NEW,
        KEYS=KEYS,
        TAIL=TAIL,
        FIELDS=len(Part._fields),
        STAGES=stages_for(size, qkv.element_size(), shared_memory(qkv.device)),
        SHARED=splits > 1,
        WINDOW=window,
        **launch_options(qkv.device),
    )
    return out


@triton.jit
def _attend_packed(
    qkv,
    cos,
    sin,
    keys,
    values,
    parts,
    positions,
    slots,
    order,
    leaves,
    tail_tables,
    shared_by,
    tables,
    out,
    q_norm,
    k_norm,
    partial,
    arrivals,
    epsilon,
    scale,
    capacity,
    table_length,
    tails,
    split_parts,
    max_items,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    NEW: tl.constexpr,
    KEYS: tl.constexpr,
    TAIL: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One KV head, a part of the query rows that read it, and every so manieth item: a tile of keys.

    Where a part has nodes, its rows share the tiles before the one in which the text ends; behind, each leaf of the
    part has tiles with the end of its path, of which only the rows of that path see anything. As in `_attend`, a
    program that reads new keys first writes all of them up to its last row, and the last of several programs joins
    their items.
    """
    head, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups: tl.constexpr = HEADS // KV_HEADS
    size: tl.constexpr = 2 * HALF
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * size
    whole = tl.arange(0, 2 * HALF_TILE)
    fields = parts + part * FIELDS
    begin, count, number, chain = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    cached, table, num_leaves = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)
    long_leaves, seen = tl.load(fields + 7), tl.load(fields + 8)
    programs = tl.minimum(tl.load(shared_by), tl.num_programs(1))
    in_part = tl.arange(0, ROWS)
    row = number * ROWS + in_part
    token, query = row // groups, head * groups + row % groups
    is_node = (token >= chain) & (token < count)
    token = tl.where(is_node, tl.load(order + begin + token, is_node, 0), token)
    valid = token < count
    inside = valid[:, None]
    position = tl.load(positions + begin + token, valid, 0)
    has_nodes = num_leaves > 0
    leaf = tl.load(leaves + part * ROWS + in_part, token < tl.where(has_nodes, count, 0), 0)
    tables_of_leaves = tl.load(tail_tables + part * ROWS + in_part)  # while the kernels before this one end
    # New rows that these may see.
    own = tl.where(has_nodes, seen, tl.minimum(count, (number * ROWS + ROWS - 1) // groups + 1))
    tail = (cached + chain) // KEYS * KEYS
    common = tl.where(has_nodes, tail // KEYS, tl.cdiv(cached + own, KEYS))
    nearest = tl.min(tl.where(valid, position, cached + count), 0)
    first = tl.minimum(_first_tile(nearest, KEYS, WINDOW), common)
    items = common + num_leaves + long_leaves - first
    if split < tl.minimum(items, programs):
        wait_for_inputs(OVERLAPS)
        launch_next(OVERLAPS)
        queries = qkv + ((begin + token) * stride + query * size)[:, None]
        q1, q2 = _rotate(queries, q_norm, epsilon, cos, sin, position, inside, HALF, HALF_TILE)
        last = first + split + (items - 1 - split) // programs * programs
        if tl.where(last < common, last, common) * KEYS + KEYS > cached:
            for start in tl.range(0, own, NEW, num_stages=1):
                added = start + tl.arange(0, NEW)
                valid_new = added < own
                place = tl.load(positions + begin + added, valid_new, 0)
                slot = tl.load(slots + begin + added, valid_new, 0)
                source = qkv + ((begin + added) * stride + (HEADS + head) * size)[:, None]
                k1, k2 = _rotate(source, k_norm, epsilon, cos, sin, place, valid_new[:, None], HALF, HALF_TILE)
                stored_new = _columns(valid_new[:, None], size, 2 * HALF_TILE)
                v = tl.load(source + KV_HEADS * size + whole[None, :], stored_new, 0.0)
                _store_kv(keys, values, k1, k2, v, head * capacity + slot, valid_new[:, None], HALF, HALF_TILE)
            tl.debug_barrier()  # other threads of this program read them
        row_max = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, 2 * HALF_TILE), tl.float32)
        output = out + ((begin + token) * HEADS * size + query * size)[:, None] + whole[None, :]
        stored = _columns(inside, size, 2 * HALF_TILE)
        room = (head * split_parts + part) * max_items * ROWS + tl.arange(0, ROWS)
        for item in tl.range(split, items, programs, num_stages=STAGES):
            behind = first + item - common
            in_tail, goes_on = behind >= 0, behind >= num_leaves
            of_leaf = behind - tl.where(goes_on, num_leaves, 0)
            key = tl.where(in_tail, common + tl.where(goes_on, 1, 0), first + item) * KEYS + tl.arange(0, KEYS)
            own_table = tl.sum(tl.where(in_part == of_leaf, tables_of_leaves, 0), 0)
            entry = tl.where(in_tail, tails + (begin + own_table) * TAIL + key - tail, table * table_length + key)
            # No slot (negative): behind the last row of a part, and in the table of a path behind its leaf.
            slot = tl.load(tables + entry, key < tl.where(in_tail, tail + TAIL, cached + own), -1)
            k1, k2, v = _load_kv(keys, values, head * capacity + slot, (slot >= 0)[:, None], HALF, HALF_TILE)
            own_tile = tl.where(in_tail, leaf, of_leaf) == of_leaf
            visible = (key[None, :] <= position[:, None]) & own_tile[:, None]
            visible = _in_window(visible, key, position, WINDOW)
            tile_max, tile_total, tile_result = _attend_to_tile(q1, q2, k1, k2, v, visible, scale)
            row_max, total, result = _join(row_max, total, result, tile_max, tile_total, tile_result)
            if SHARED:
                kept = own_tile & (token < tl.where(programs > 1, count, 0))
                place = partial + (room + item * ROWS) * (size + 2)
                tl.store(place, tile_max, kept)
                tl.store(place + 1, tile_total, kept)
                kept_columns = _columns(kept[:, None], size, 2 * HALF_TILE)
                tl.store(place[:, None] + 2 + whole[None, :], tile_result, kept_columns)
        if programs == 1:
            _store_attention(output, result, total, valid, stored, out.dtype.element_ty)
        elif SHARED:
            tl.debug_barrier()  # before any thread says so, all have written
            if tl.atomic_add(arrivals + head * split_parts + part, 1, sem="acq_rel") == tl.minimum(programs, items) - 1:
                row_max = tl.full((ROWS,), -float("inf"), tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                result = tl.zeros((ROWS, 2 * HALF_TILE), tl.float32)
                place = partial + room * (size + 2)
                step: tl.constexpr = ROWS * (size + 2)
                shared = common - first
                # Of a row: those that rows share, then the one or two of its leaf.
                row_items = shared + tl.where(has_nodes, 1, 0) + tl.where(leaf < long_leaves, 1, 0)
                joined = shared + tl.where(has_nodes, 1, 0) + tl.where(long_leaves > 0, 1, 0)
                for i in tl.range(0, joined, 4):  # four are read at once: each takes a while to come
                    max_0, total_0, result_0 = _load_item(
                        place, i, shared, row_items, leaf, num_leaves, token, count, step, size, whole
                    )
                    max_1, total_1, result_1 = _load_item(
                        place, i + 1, shared, row_items, leaf, num_leaves, token, count, step, size, whole
                    )
                    max_2, total_2, result_2 = _load_item(
                        place, i + 2, shared, row_items, leaf, num_leaves, token, count, step, size, whole
                    )
                    max_3, total_3, result_3 = _load_item(
                        place, i + 3, shared, row_items, leaf, num_leaves, token, count, step, size, whole
                    )
                    row_max, total, result = _join(row_max, total, result, max_0, total_0, result_0)
                    row_max, total, result = _join(row_max, total, result, max_1, total_1, result_1)
                    row_max, total, result = _join(row_max, total, result, max_2, total_2, result_2)
                    row_max, total, result = _join(row_max, total, result, max_3, total_3, result_3)
                _store_attention(output, result, total, valid, stored, out.dtype.element_ty)


@triton.jit
def _load_item(
    place, i, shared, row_items, leaf, num_leaves, token, count, step: tl.constexpr, size: tl.constexpr, column
):
    """What a program has found for the i-th item of each row: first those that rows share, then its leaf's."""
    item = i + tl.where(i < shared, 0, leaf) + tl.where(i > shared, num_leaves - 1, 0)
    return _load_partial(place, item, tl.where(i < row_items, item + 1, 0), token, count, step, size, column)
