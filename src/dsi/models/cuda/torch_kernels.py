"""What the Triton kernels of packed forwards compute, in torch: for devices that Triton does not compile for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dsi.models.cuda.packed_rows import BRANCHES, KEYS, ROWS, TAIL, PackedRows, Part


def take_tokens(rows: PackedRows) -> Tensor:
    rows.tables[rows.plan.moves[0].long()] = rows.plan.moves[1].clone()
    rows.tables[rows.plan.places.long()] = rows.plan.slots.clone()
    ids: Tensor = rows.tables[rows.plan.sources.long()]
    return ids


def pick_tokens(logits: Tensor, rows: PackedRows) -> None:
    count = min(BRANCHES, logits.shape[-1])
    places = rows.plan.outputs.long()[:, None] + torch.arange(count, device=logits.device)
    rows.tables[places] = logits.topk(count, -1).indices.int()


def norm(x: Tensor, weight: Tensor, shift: Tensor | None, epsilon: float | None) -> Tensor:
    if shift is not None:
        return functional.layer_norm(x, weight.shape, weight, shift, epsilon or 0.0)
    return functional.rms_norm(x, weight.shape, weight, epsilon)


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
    arrivals: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    """Row by row: with the positions of its text and its path, in order."""
    kv_heads, _, size = keys.shape[-3:]
    groups = qkv.shape[-1] // size // kv_heads - 2
    plan = rows.plan
    heads = qkv.view(len(qkv), -1, size)
    queries, new_keys, new_values = torch.split(heads, [groups * kv_heads, kv_heads, kv_heads], 1)
    queries = rotated(queries, q_norm, epsilon, cos, sin, plan.positions)
    new_keys = rotated(new_keys, k_norm, epsilon, cos, sin, plan.positions)
    out = torch.zeros_like(queries)
    attended = list(row_slots(rows, groups))
    written = torch.tensor([row for row, _ in attended])
    for cache, new in ((keys, new_keys), (values, new_values)):
        cache[..., plan.slots[written].long(), :] = new[written].transpose(0, 1)
    for row, slots in attended:
        seen = slots[-window:] if window else slots
        k, v = (cache.view(kv_heads, -1, size)[:, seen] for cache in (keys, values))
        query = queries[row].view(kv_heads, groups, size)
        out[row] = functional.scaled_dot_product_attention(query, k, v, scale=scale).reshape(-1, size)
    return out.flatten(1)


def row_slots(rows: PackedRows, groups: int) -> Iterator[tuple[int, Tensor]]:
    """Each row that is a token or a node, and the slots of the positions that it sees."""
    plan = rows.plan
    for number, part in enumerate(Part(*fields) for fields in plan.parts.tolist()):
        tail = (part.length + part.chain) // KEYS * KEYS
        text = rows.tables[part.table * rows.table_length : (part.table + 1) * rows.table_length]
        first_query = part.number * ROWS
        for token in range(first_query // groups, min(part.rows, (first_query + ROWS - 1) // groups + 1)):
            query = max(0, token * groups - first_query)
            row = part.begin + (token if token < part.chain else int(plan.order[part.begin + token]))
            end = int(plan.positions[row]) + 1
            if part.leaves and end > tail:
                table = part.begin + int(plan.tail_tables[number, plan.leaves[number, query]])
                path = rows.tables[rows.tails + table * TAIL :][: end - tail]
                yield row, torch.cat((text[:tail], path)).long()
            else:
                yield row, text[:end].long()


def rotated(
    x: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor | None, sin: Tensor | None, positions: Tensor
) -> Tensor:
    """Apply the norm of a head and the rotary embedding, where given."""
    if weight is not None:
        x = functional.rms_norm(x, weight.shape, weight, epsilon)
    if cos is None or sin is None:
        return x
    index = positions.long()
    first, second = x.chunk(2, -1)
    return x * cos[0][index, None] + torch.cat((-second, first), -1) * sin[0][index, None]
