"""Growing a draft tree on the device, which picks the tokens of each level: forwards follow without the host.

The shape of the tree is known before its tokens are, and with it the slots, positions and paths of all nodes. So all
forwards are described and launched at once; the tokens of a level are read where the forward before it wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Level, Tree, with_ancestors
from dsi.models.cuda.graphs import event
from dsi.models.cuda.kv_pool import PooledRows
from dsi.models.cuda.packed_rows import BRANCHES, SlotRows
from dsi.models.protocol import ForwardRequest
from dsi.models.tree_cache import TreeRows

MAX_LEVELS = 32  # of forwards that are launched at once


class GrowthShape:
    """What is known of a growing tree before its tokens are. A node that is not drafted yet has a negative number for
    its token, each another."""

    def __init__(self, tree: Tree, levels: Sequence[Level]) -> None:
        nodes = list(tree)
        self.levels = levels
        self.picked: dict[int, int] = {}  # by expanded node: where its children are among the picked tokens
        self.children: dict[int, range] = {}
        for node, count in chain(*levels):
            self.picked[node] = BRANCHES * len(self.picked)
            self.children[node] = range(len(nodes), len(nodes) + count)
            nodes += [(node, stand_in(child)) for child in self.children[node]]
        self.tree: Tree = tuple(nodes)
        self.expanded = tuple(sorted(node for node in self.picked if node != END))
        self.ancestors = with_ancestors(nodes, self.expanded)
        self.sources: dict[int, int] = {}  # by grown node: where it is among the picked tokens
        for node, children in self.children.items():
            self.sources.update(zip(children, range(self.picked[node], self.picked[node] + len(children))))


growth_shape = lru_cache(256)(GrowthShape)  # of few shapes, again and again


class LevelRows(NamedTuple):
    """The nodes of a level that a forward computes, as the KV cache numbers them."""

    computed: list[int]
    sources: list[int]  # where the token of each is in the device's buffer; none for the first level
    outputs: list[int]  # where the likeliest tokens after each go


@lru_cache(256)  # as above, for nodes of which none is cached
def level_rows(shape: GrowthShape, tree: TreeRows, first_picked: int, unread: int) -> Sequence[LevelRows]:
    """The rows of each forward, if the nodes of the tree have these numbers in the KV cache."""
    numbers: dict[int, int] = {}
    for node in shape.ancestors:
        parent, token = shape.tree[node]
        numbers[node] = tree.nodes[numbers.get(parent, END), token]
    later = [[node for node, _ in level] for level in shape.levels[1:]]
    places = {numbers.get(node, END): first_picked + place for node, place in shape.picked.items()}
    first = [number for number in tree.computed if number not in {numbers[node] for node in chain(*later)}]
    rows = [LevelRows(first, [], [places.get(number, unread) for number in first])]
    for nodes in later:
        computed = [numbers[node] for node in nodes]
        sources = [first_picked + shape.sources[node] for node in nodes]
        rows.append(LevelRows(computed, sources, [places[number] for number in computed]))
    return rows


@lru_cache(256)
def num_expanded(levels: Sequence[Level]) -> tuple[int, int]:
    """How many nodes these levels expand, and the most children of one."""
    counts = [count for level in levels for _, count in level]
    return len(counts), max(counts, default=0)


def stand_in(node: int) -> int:
    """What stands for the token of a node that is not drafted yet."""
    return -1 - node


class DeviceGrowth:
    """The rows of each forward, and the tokens that came of it."""

    def __init__(self, request: ForwardRequest, levels: Sequence[Level]) -> None:
        at_end = [END] if request.start <= len(request.tokens) else []
        first = tuple(zip([*at_end, *request.asked], request.num_children))
        self.levels: tuple[Level, ...] = (first, *map(tuple, levels))
        self.tokens: dict[int, int] = {}  # by the number that stands for it
        self.shape = shape = growth_shape(request.tree, self.levels)
        self.request = ForwardRequest(
            request.tokens, request.start, request.num_cached, tree=shape.tree, asked=shape.expanded
        )

    def rows(self, pooled: PooledRows, first_picked: int, unread: int) -> Iterator[SlotRows]:
        """The rows of each forward: the first computes what is new of the text, too."""
        rows, picked = pooled.rows, self.shape.picked
        first, *later = level_rows(self.shape, rows.tree, first_picked, unread)
        outputs = [unread] * len(rows.tokens) + first.outputs
        if END in picked:
            outputs[len(rows.tokens) - 1] = first_picked + picked[END]
        tree = rows.tree, rows.node_slots
        yield SlotRows(rows.table, rows.slots, rows.length, rows.tokens, *tree, first.computed, None, (), outputs)
        text, tails = (rows.table, rows.slots, rows.end, ()), rows.node_tails()
        for computed, sources, outputs in later:
            yield SlotRows(*text, *tree, computed, tails, sources, outputs)

    def children(self, number: int, picked: np.ndarray) -> tuple[Tokens, ...]:
        """The tokens that a forward picked, of which there are `BRANCHES` in a row, by the node they are after."""
        level, nodes = list[Tokens](), self.levels[number]
        if not nodes:
            return ()
        first = self.shape.picked[nodes[0][0]] // BRANCHES  # in the order of the nodes
        for (node, count), tokens in zip(nodes, picked[first : first + len(nodes)].tolist()):
            level.append(tuple(tokens[:count]))
            self.tokens.update(zip(map(stand_in, self.shape.children[node]), level[-1]))
        return tuple(level)


class LaunchedTree:
    """A tree that a device drafts, all levels of which were launched: another model on it can take the tokens."""

    def __init__(self, growth: DeviceGrowth, picked: Tensor, stream: Any, end: Any) -> None:
        self._growth, self.picked, self._stream, self._end = growth, picked, stream, end
        self._taken: Any = None

    @property
    def tree(self) -> Tree:
        return self._growth.request.tree

    @property
    def is_fresh(self) -> bool:
        """Whether all of its tokens are still to be drafted."""
        return all(token < 0 for _, token in self.tree)

    def sources(self, first_picked: int) -> list[int]:
        """Where the token of each node of a fresh tree is, if those that were picked begin there."""
        return [first_picked + source for source in self._growth.shape.sources.values()]

    def copy_picked(self, target: Tensor, stream: Any) -> None:
        """Let another stream copy what was picked, once it is there."""
        if stream is not None:
            stream.wait_event(self._end)
        target[: len(self.picked)].copy_(self.picked, non_blocking=True)
        if stream is not None:
            self._taken = event()
            self._taken.record(stream)

    def close(self) -> None:
        """Nothing is to overwrite what was picked before it was copied."""
        if self._taken is not None:
            self._stream.wait_event(self._taken)
