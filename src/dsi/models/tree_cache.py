"""Trees of draft tokens in a KV cache: which nodes are cached, which a forward computes, and what each one sees.

The keys and values of a node are in a slot behind the text's. A parent's slot is before its children's: along a path,
slots ascend. Keys are rotated by position, which stays what it is when a path becomes text: its slots are only moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from dsi.core.tree_shape import END, Tree, with_ancestors

MAX_NODES = 512  # cached behind one text: where branches that were given up would make more, all are dropped

CachedNodes = dict[tuple[int, int], int]  # by parent and token, the slot of each behind the text: 0, 1, 2...


@dataclass(frozen=True, eq=False)
class TreeRows:
    """The nodes that one forward computes, and those that are asked about."""

    nodes: CachedNodes  # that are cached when it has run
    computed: list[int]  # their slots behind the text, ascending
    asked: list[int]  # as indices into `computed`

    @classmethod
    def of(cls, cached: CachedNodes, tree: Tree, asked: Sequence[int]) -> TreeRows:
        """Compute what is asked about, and ancestors that are not cached."""
        return _fresh_rows(tree, tuple(asked)) if not cached else cls._beside(cached, tree, asked)

    @classmethod
    def _beside(cls, cached: CachedNodes, tree: Tree, asked: Sequence[int]) -> TreeRows:
        nodes = dict(cached) if len(cached) + len(tree) <= MAX_NODES else {}
        num_cached, slots = len(nodes), dict[int, int]()
        for node in with_ancestors(tree, asked):
            parent, token = tree[node]
            slots[node] = nodes.setdefault((slots.get(parent, END), token), len(nodes))
        computed = sorted({slots[node] for node in asked} | set(range(num_cached, len(nodes))))
        rows = {slot: row for row, slot in enumerate(computed)}
        return cls(nodes, computed, [rows[slots[node]] for node in asked])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The slot of each node's parent."""
        return tuple([parent for parent, _ in self.nodes])

    @property
    def tokens(self) -> list[int]:
        """Those to compute."""
        return self.tokens_of(self.computed)

    def tokens_of(self, slots: Sequence[int]) -> list[int]:
        """The tokens of these nodes."""
        tokens = [token for _, token in self.nodes]
        return [tokens[slot] for slot in slots]

    @cached_property
    def depths(self) -> list[int]:
        """How far behind the end of the text each node is, 0 being the token after it."""
        return depths_of(self.parents)

    def ancestors(self) -> Tensor:
        """For each node that is computed, whether each node is an ancestor of it or itself."""
        seen = torch.eye(len(self.nodes), dtype=torch.bool)
        for slot, parent in enumerate(self.parents):
            if parent != END:
                seen[slot] |= seen[parent]
        return seen[self.computed]


@lru_cache(1024)  # of few shapes, again and again
def depths_of(parents: tuple[int, ...]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == END else depths[parent] + 1)
    return depths


@lru_cache(64)  # a tree that is not drafted yet has the same nodes again and again
def _fresh_rows(tree: Tree, asked: tuple[int, ...]) -> TreeRows:
    """The rows of a tree of which nothing is cached."""
    nodes = {node: slot for slot, node in enumerate(tree)}
    if len(set(asked)) == len(asked) == len(tree) == len(nodes):  # faster
        return TreeRows(nodes, list(nodes.values()), list(asked))
    return TreeRows._beside({}, tree, asked)


def tree_depth(tree: Tree) -> int:
    """How many tokens the longest path has."""
    return 1 + max(depths_of(tuple([parent for parent, _ in tree])), default=-1)


def cached_path(nodes: CachedNodes, tokens: Sequence[int]) -> list[int]:
    """The slots of the nodes that a text goes on with, as far as they are cached."""
    path: list[int] = []
    for token in tokens:
        slot = nodes.get((path[-1] if path else END, token))
        if slot is None:
            break
        path.append(slot)
    return path


def nodes_below(nodes: CachedNodes, root: int) -> tuple[list[int], CachedNodes]:
    """The slots of the nodes below one, and these nodes in slots without gaps, that one being the end of the text."""
    slots: list[int] = []
    renumbered = {root: END}
    below: CachedNodes = {}
    for (parent, token), slot in nodes.items():
        if parent in renumbered and slot != root:
            below[renumbered[parent], token] = renumbered[slot] = len(slots)
            slots.append(slot)
    return slots, below
