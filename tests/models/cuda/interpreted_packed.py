"""Attention of packed forwards in Triton's interpreter: run by `test_triton_kernels.py` with TRITON_INTERPRET=1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsi.core.tree_shape import END, Chances, Tree, best_paths, rank_chances
from dsi.models.cuda import torch_kernels
from dsi.models.cuda.packed_attention import attend_packed
from dsi.models.cuda.packed_rows import (
    BRANCHES,
    TAIL,
    PackedRows,
    PlanLayout,
    SlotRows,
    aligned,
    fill_plan,
    split_limits,
)
from dsi.models.cuda.packed_tokens import pick_tokens, take_tokens
from dsi.models.cuda.triton_kernels import attend
from dsi.models.tree_cache import TreeRows

SIZE, SLOTS, LENGTH, TABLES = 32, 400, 192, 3
TREE = ((END, 5), (END, 6), (0, 7), (1, 7), (2, 8), (0, 9), (4, 3))  # a chain of four, with siblings on three levels
SMS = 256
OPTIONS: dict[str, Any] = {"scale": 0.05, "epsilon": 1e-5}


def packed_rows(texts: list[SlotRows], size: int, heads: int, kv_heads: int) -> PackedRows:
    layout, unread = PlanLayout(size, heads // kv_heads), TABLES * LENGTH
    begin = aligned(unread + BRANCHES)
    tables = np.zeros(begin + layout.length, np.int32)
    limits = split_limits(size, heads // kv_heads, kv_heads, LENGTH, SMS)
    region = tables[begin:]
    tails = region[layout.tails :].reshape(size, TAIL)
    rows = PackedRows(layout.fields(region), tables, LENGTH, begin + layout.tails, begin, unread, *limits)
    fill_plan(rows.plan, tails, texts, layout, rows, 2 * SMS // kv_heads)
    for text in texts:
        tables[text.table * LENGTH :][: text.end] = text.slots[: text.end]
    buffer = torch.from_numpy(tables)
    return replace(rows, tables=buffer, plan=layout.fields(buffer[begin:]))


def three_texts(slots: np.ndarray) -> list[SlotRows]:
    """A long text and a short one, and one whose tree goes on beyond a tile of keys; its first node is cached."""
    tree = TreeRows.of({}, TREE, range(len(TREE)))
    return [
        SlotRows(2, slots[:130], 127, [1, 2, 3]),
        SlotRows(0, slots[130:141], 10, [4]),
        SlotRows(1, slots[141:204], 61, [5, 6], tree, slots[204 : 204 + len(TREE)].tolist()),
    ]


def texts_with_large_trees(slots: np.ndarray) -> list[SlotRows]:
    """Trees that are cut into parts on their paths; some paths of the second go on in another tile of keys.

    Of the third tree, the first nodes are cached.
    """
    nodes = grown_tree(rank_chances(0.8, 0.5, 3), 24, 9)
    tree, cached = TreeRows.of({}, nodes, range(24)), {(END, 5): 0, (END, 6): 1, (0, 7): 2}
    below = TreeRows.of(cached, ((END, 5), (0, 7), (0, 8), (1, 5), (1, 6), (4, 6), (4, 8)), range(3, 7))
    return [
        SlotRows(2, slots[:130], 127, [1, 2, 3], tree, slots[200:224].tolist()),
        SlotRows(0, slots[130:190], 58, [4, 5], tree, slots[224:248].tolist()),
        SlotRows(1, slots[248:270], 22, [], below, slots[270 : 270 + len(below.nodes)].tolist()),
    ]


def grown_tree(chances: Chances, size: int, depth: int) -> Tree:
    """The best tree of a size, level by level, as a drafter grows it."""
    paths = sorted((path for path, _ in best_paths(chances, size, depth)), key=len)
    return tuple((paths.index(path[:-1]) if path[:-1] else END, path[-1]) for path in paths)


def paths(text: SlotRows) -> list[tuple[list[int], list[int]]]:
    """The cached nodes that each last row of a text sees, and the rows, in order."""
    chain, count, computed = list(range(len(text.tokens))), len(text.tokens), list(text.nodes)
    known: list[tuple[list[int], list[int]]] = []
    for node, (parent, _) in enumerate(text.tree.nodes):
        cached, rows = ([], chain) if parent == END else known[parent]
        is_computed = node in computed
        known.append((cached, [*rows, count + computed.index(node)]) if is_computed else ([*cached, node], rows))
    return [([], chain), *(known[node] for node in computed)] if chain else [known[node] for node in computed]


@pytest.mark.parametrize(
    ("make_texts", "size", "heads", "kv_heads", "rotary", "window"),
    [
        (three_texts, 16, 4, 4, True, 0),
        (three_texts, 16, 6, 2, True, 40),
        (three_texts, 16, 20, 1, False, 0),
        (texts_with_large_trees, 64, 1, 1, True, 0),
        (texts_with_large_trees, 64, 4, 1, False, 40),
        (texts_with_large_trees, 64, 3, 1, True, 0),
        (texts_with_large_trees, 64, 20, 1, False, 0),
    ],
)
@torch.inference_mode()
def test_attend_packed_gives_the_bits_of_each_text_alone(
    make_texts: Callable[[np.ndarray], list[SlotRows]],
    size: int,
    heads: int,
    kv_heads: int,
    rotary: bool,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on tensor cores, and unlike in numpy, a row's products must not depend on where in its tile it is.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, None] * b.T[None]).sum(-1, dtype=dtype))
    generator = torch.Generator().manual_seed(heads + window)
    texts = make_texts(np.random.default_rng(1).permutation(SLOTS).astype(np.int32))
    count = sum(text.num_rows for text in texts)
    qkv = torch.randn(size, (heads + 2 * kv_heads) * SIZE, dtype=torch.float16, generator=generator)
    half = torch.randn(2, 1, LENGTH, SIZE // 2, dtype=torch.float16, generator=generator)
    cos, sin = torch.cat((half, half), -1).unbind() if rotary else (None, None)
    norm = torch.randn(SIZE, dtype=torch.float16, generator=generator) if rotary else None
    keys, values = torch.randn(2, 1, kv_heads, SLOTS, SIZE, dtype=torch.float16, generator=generator)
    options = OPTIONS | {"q_norm": norm, "k_norm": norm, "window": window}
    rows = packed_rows(texts, size, heads, kv_heads)
    arrivals = torch.zeros(kv_heads, rows.max_split_parts, dtype=torch.int32)
    cache = keys.clone(), values.clone()
    packed = attend_packed(qkv, cos, sin, *cache, rows, arrivals=arrivals, **options)
    assert int(rows.plan.splits) > 1
    by_one = attend_packed(qkv, cos, sin, keys.clone(), values.clone(), rows, **options)
    assert torch.equal(by_one[:count], packed[:count])

    def alone(text: SlotRows, begin: int, nodes: list[int], path: list[int]) -> Tensor:
        """The last row of a path, computed as one text whose keys are in order."""
        own_keys, own_values = torch.zeros(2, 1, kv_heads, LENGTH, SIZE, dtype=torch.float16)
        cached = torch.tensor([*text.slots[: text.length].tolist(), *(text.node_slots[node] for node in nodes)])
        own_keys[:, :, : len(cached)], own_values[:, :, : len(cached)] = keys[:, :, cached], values[:, :, cached]
        inputs = qkv[[begin + row for row in path]]
        return attend(inputs, cos, sin, own_keys, own_values, torch.tensor(len(cached)), **options)[-1]

    begin = 0
    for text in texts:
        for nodes, path in paths(text):
            assert torch.equal(packed[begin + path[-1]], alone(text, begin, nodes, path))
        begin += text.num_rows
    tensors = {"qkv": qkv, "cos": cos, "sin": sin, "keys": keys, "values": values, "q_norm": norm, "k_norm": norm}
    floats = {name: None if x is None else x.float() for name, x in tensors.items()}
    reference = torch_kernels.attend_packed(rows=rows, **options | floats)
    assert torch.allclose(packed[:count].float(), reference[:count], atol=5e-3)
    for cached, new in zip(cache, (keys, values)):
        unwritten = [slot for slot in range(SLOTS) if slot not in rows.plan.slots[:count].tolist()]
        assert torch.equal(cached[:, :, unwritten], new[:, :, unwritten])


@torch.inference_mode()
def test_tokens_are_taken_and_picked_as_in_torch() -> None:
    """Also where logits are equal, and where there are more of them than a program looks at together."""
    texts = three_texts(np.random.default_rng(2).permutation(SLOTS).astype(np.int32))
    texts[0] = replace(texts[0], outputs=[0, 8, 4])
    rows = packed_rows(texts, 16, 4, 2)
    rows.tables[12] = 77
    rows.plan.sources[1] = 12
    expected = replace(rows, tables=rows.tables.clone())
    expected = replace(expected, plan=PlanLayout(16, 2).fields(expected.tables[rows.own_ids :]))
    assert torch.equal(take_tokens(rows), torch_kernels.take_tokens(expected))
    assert take_tokens(rows).tolist()[:5] == [1, 77, 3, 4, 5]
    logits = torch.randn(16, 40000, generator=torch.Generator().manual_seed(5)).to(torch.float16)
    logits[:, [5, 39999]] = 9.0
    rows.tables[rows.unread : rows.unread + BRANCHES] = -1
    pick_tokens(logits, rows)
    assert rows.tables[rows.unread : rows.unread + BRANCHES].tolist() == [-1] * BRANCHES  # of rows nobody asks about
    best = logits.sort(stable=True, descending=True).indices[:3, :BRANCHES]
    assert rows.tables[:12].reshape(3, BRANCHES).tolist() == best[[0, 2, 1]].tolist()
    assert rows.tables[:2].tolist() == [5, 39999]
