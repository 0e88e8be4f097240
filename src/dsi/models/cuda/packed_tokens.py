"""The first and the last kernel of a packed forward: which tokens its rows are, and the likeliest tokens after them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from dsi.models.cuda.packed_rows import BRANCHES, PackedRows

MAX_BLOCK = 32768  # logits that a program looks at together
WARPS = 16


def take_tokens(rows: PackedRows) -> Tensor:
    """The token of each row, wherever it was picked; the slots of new tokens go into the tables of their texts."""
    plan = rows.plan
    ids = torch.empty_like(plan.ids)
    _take_tokens[(1,)](
        rows.tables, plan.sources, plan.places, plan.slots, plan.moves, ids, ROWS=len(ids), MOVES=plan.moves.shape[1]
    )
    return ids


@triton.jit
def _take_tokens(buffer, sources, places, slots, moves, ids, ROWS: tl.constexpr, MOVES: tl.constexpr):
    row, move = tl.arange(0, ROWS), tl.arange(0, MOVES)
    tl.store(buffer + tl.load(moves + move), tl.load(moves + MOVES + move))
    tl.store(buffer + tl.load(places + row), tl.load(slots + row))
    tl.store(ids + row, tl.load(buffer + tl.load(sources + row)))


def pick_tokens(logits: Tensor, rows: PackedRows) -> None:
    """Write the likeliest tokens after each row to where its plan says, the likeliest first, if anybody asks."""
    vocab = logits.shape[-1]
    block = min(next_power_of_2(vocab), MAX_BLOCK)
    _pick_tokens[(len(logits),)](
        logits, rows.plan.outputs, rows.tables, vocab, rows.unread, BRANCHES=BRANCHES, BLOCK=block, num_warps=WARPS
    )


@triton.jit
def _pick_tokens(logits, outputs, buffer, vocab, unread, BRANCHES: tl.constexpr, BLOCK: tl.constexpr):
    """Each token is the first of the largest logits among those that come after the one picked before."""
    row = tl.program_id(0)
    output = tl.load(outputs + row)
    if output != unread:
        last_logit, last = float("inf"), -1
        for rank in tl.static_range(BRANCHES):
            best_logit, best = -float("inf"), vocab - 1
            for start in tl.range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                logit = tl.load(logits + row.to(tl.int64) * vocab + token, token < vocab, -float("inf")).to(tl.float32)
                after = (logit < last_logit) | ((logit == last_logit) & (token > last))
                logit = tl.where(after, logit, -float("inf"))
                top, index = tl.max(logit, 0, return_indices=True)
                better = top > best_logit
                best, best_logit = tl.where(better, start + index, best), tl.where(better, top, best_logit)
            tl.store(buffer + output + rank, best)
            last_logit, last = best_logit, best
