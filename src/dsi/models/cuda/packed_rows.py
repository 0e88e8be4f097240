"""The rows of a forward over new tokens and draft trees of several texts: where each is, and which keys it sees.

Keys and values are in slots, in no order. A table for each text says in which slot each of its positions is. A node of
a draft tree stands at a position of a path of its own, so the end of that path has a table, too. Nodes on one path
share the table of the last of them that is in their part, its leaf: what is behind a node is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dsi.core.tree_shape import END
from dsi.models.tree_cache import TreeRows

KEYS = 64  # of a tile: keys are attended to in tiles, which begin at multiples of it
ROWS = 16  # queries of a part: the fewest that tensor cores take
TAIL = 2 * KEYS  # positions that the table of a path has: from the tile on in which the text ends
MAX_DEPTH = TAIL - KEYS  # of a tree
PROGRAMS_PER_SM, MAX_SPLITS = 2, 64
PAIR, LONG_TEXT = 2, 1024  # programs, and tokens from which a second one pays
BRANCHES = 4  # likeliest tokens after a row that are picked on the device
ALIGNMENT = 16  # of int32, which Triton counts in: 16 bytes would do for pointers
NO_SLOT = -1  # of positions behind the end of a path
NO_TREE = TreeRows({}, [], [])


@dataclass(slots=True)  # not frozen: it would take four times as long to make
class SlotRows:
    """The new rows of a text whose keys are in slots: tokens that continue it, then nodes of a tree, parents first."""

    table: int  # of the text
    slots: np.ndarray  # by position, up to the last new token
    length: int  # positions before the first new one
    tokens: Sequence[int]
    tree: TreeRows = NO_TREE
    node_slots: Sequence[int] = ()  # by the number of the node
    computed: Sequence[int] | None = None  # nodes of the rows, by number; None: all that the tree computes
    tails: np.ndarray | None = None  # `node_tails`, where they are known
    sources: Sequence[int] = ()  # where the token of each row is picked, in the device's buffer; empty: in the plan
    outputs: Sequence[int] = ()  # where the likeliest tokens after each row go; empty: nobody asks

    @property
    def end(self) -> int:
        return self.length + len(self.tokens)

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes that are computed, by number."""
        return self.tree.computed if self.computed is None else self.computed

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.nodes)

    @property
    def tail(self) -> int:
        """Where the tile begins in which the text ends."""
        return self.end // KEYS * KEYS

    def text_tail(self) -> np.ndarray:
        """The slots of the positions from `tail` on."""
        own = np.full(TAIL, NO_SLOT, np.int32)
        own[: self.end - self.tail] = self.slots[self.tail : self.end]
        return own

    def node_tails(self) -> np.ndarray:
        """The same of the path of each node."""
        tails = np.empty((len(self.tree.parents), TAIL), np.int32)
        self.fill_tails(tails, all_paths(self.tree.parents))
        return tails

    def fill_tails(self, tails: np.ndarray, paths: Paths) -> None:
        """The same of each of these paths."""
        tails[:] = self.text_tail()
        tails[paths.numbers, self.end - self.tail + paths.depths] = np.array(self.node_slots, np.int32)[paths.nodes]


class Paths(NamedTuple):
    """For each path of a tree and each depth of it: the number of the path, the depth, and the node that is there."""

    numbers: np.ndarray
    depths: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> Paths:
        steps = [(number, depth, node) for number, path in enumerate(paths) for depth, node in enumerate(path)]
        return cls(*np.array(steps, np.int64).reshape(-1, 3).T)


@lru_cache(1024)  # of few shapes, again and again
def all_paths(parents: tuple[int, ...]) -> Paths:
    """The path to each node of a tree. The depth of the first of a path is 0."""
    return Paths.of(node_paths(parents))


def node_paths(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the text to each node, which is the last of them. `parents` are before their children."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent != END else ()), node])
    return paths


class PartPaths(NamedTuple):
    """The paths that the nodes of a part are on, one for each leaf."""

    leaves: list[int]  # by number, those of the longest paths first
    numbers: list[int]  # by query, of a leaf on whose path its node is
    nodes: list[int]


class TreeParts(NamedTuple):
    """Which nodes of a text are in which part, and on which paths: known of a tree before its tokens are."""

    order: np.ndarray  # of the rows of nodes, in parts: those on one path behind one another
    leaves: np.ndarray  # by part and query: the number of the leaf among those of the part
    tables: np.ndarray  # by part and leaf: the number of its table among those of the text
    nodes: np.ndarray  # by table: the leaf
    paths: Paths  # to them
    lengths: tuple[tuple[int, ...], ...]  # by part and leaf: of its path
    seen: tuple[int, ...]  # by part: rows of nodes, from the first, among which are all that it sees


@lru_cache(1024)  # of few shapes, again and again
def tree_parts(parents: tuple[int, ...], nodes: tuple[int, ...], token_queries: int, groups: int) -> TreeParts:
    """The parts of so many queries of tokens, with which the first begins, and of those of nodes, `groups` each.

    A node is behind those above it.
    """
    paths, rows = node_paths(parents), {node: row for row, node in enumerate(nodes)}
    children = sorted_children(parents)
    orders = ([node for node in depth_first(children, first) if node in rows] for first in (True, False))
    cuts = ((order, cut_tree(order, paths, token_queries, groups)) for order in orders)
    order, parts = next(cuts)
    if len(parts) > 1:
        order, parts = min((order, parts), *cuts, key=lambda cut: max(len(part.leaves) for part in cut[1]))
    tables: dict[int, int] = {}
    by_leaf = [[tables.setdefault(leaf, len(tables)) for leaf in part.leaves] for part in parts]
    return TreeParts(
        np.array([rows[node] for node in order], np.int32),
        np.array([part.numbers for part in parts], np.int32),
        np.array([[*own, *[0] * (ROWS - len(own))] for own in by_leaf], np.int32),
        np.array(list(tables)),
        Paths.of([paths[leaf] for leaf in tables]),
        tuple([tuple([len(paths[leaf]) for leaf in part.leaves]) for part in parts]),
        tuple([1 + max(map(rows.__getitem__, part.nodes)) for part in parts]),
    )


def sorted_children(parents: Sequence[int]) -> list[list[int]]:
    """The children of each node of a tree, those with most nodes below them last; behind them the text's."""
    sizes, children = [1] * (len(parents) + 1), [list[int]() for _ in range(len(parents) + 1)]
    for node in reversed(range(len(parents))):
        children[parents[node]].append(node)
        sizes[parents[node]] += sizes[node]
    for siblings in children:
        if len(siblings) > 1:
            siblings.sort(key=sizes.__getitem__)
    return children


def depth_first(children: Sequence[Sequence[int]], largest_first: bool) -> list[int]:
    """The nodes of a tree, those below a node behind it, before its siblings that follow."""
    order, left, step = list[int](), [END], 1 if largest_first else -1
    while left:
        node = left.pop()
        order.append(node)
        left += children[node][::step]
    return order[1:]


def cut_tree(order: Sequence[int], paths: Sequence[Sequence[int]], token_queries: int, groups: int) -> list[PartPaths]:
    """Cut nodes into parts; in their order those below a node are behind it."""
    parts = []
    for begin in range(-token_queries, len(order) * groups, ROWS):
        first = max(0, begin // groups)
        nodes = list(order[first : (begin + ROWS - 1) // groups + 1])
        leaves = [node for node, after in pairwise(nodes) if not is_above(paths[node], paths[after])] + nodes[-1:]
        by_length = sorted(leaves, key=lambda leaf: len(paths[leaf]), reverse=True)
        numbers, behind = [0] * max(0, -begin), 0
        for leaf in leaves:
            end = nodes.index(leaf, behind) + 1
            numbers += [by_length.index(leaf)] * (groups * (end - behind))
            behind = end
        numbers = numbers[max(0, begin - first * groups) :][:ROWS]
        parts.append(PartPaths(by_length, numbers + [0] * (ROWS - len(numbers)), nodes))
    return parts


def is_above(path: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the last node of a path is on the other one."""
    return len(path) <= len(other) and other[len(path) - 1] == path[-1]


class Part(NamedTuple):
    """A tile of queries, as the kernel reads it."""

    begin: int  # the first row of its text
    rows: int  # of its text
    number: int  # of the part among those of its text
    chain: int  # rows of its text that are tokens, before those of nodes
    length: int  # positions of its text before the first row
    table: int  # of its text
    leaves: int = 0  # of paths that its nodes are on; the other fields are 0 where it has no nodes
    long_leaves: int = 0  # the first of them, whose paths go on in the second tile
    seen: int = 0  # rows of its text, from the first, among which are all that it sees


class PlanFields(NamedTuple):
    """Arrays, or tensors on a device, one entry a row but for the last five."""

    ids: Any
    positions: Any
    slots: Any
    places: Any  # in the buffer, of the slots of new tokens; of nodes and padding one that nobody reads
    sources: Any  # in the buffer, of the row's token: among `ids`, or where an earlier forward picked it
    outputs: Any  # in the buffer, of the likeliest tokens after the row
    order: Any  # of the rows of nodes in the parts of their text, from its first row
    parts: Any  # a `Part` each
    leaves: Any  # of the part, by part and query: on whose path the query's node is
    tail_tables: Any  # by part and leaf: the table of its path, from that of the text's first row
    splits: Any  # how many programs share the keys of a part
    moves: Any  # places in the buffer, and the slots to write there: of nodes that became text


BY_ROW, MOVES = len(PlanFields._fields) - 5, 64


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the fields of a forward of so many rows are in one region of a buffer, and behind them tables of tails.

    All begin at multiples of 16 bytes, or kernels would be compiled for each alignment.
    """

    size: int
    groups: int  # queries that read one key

    @property
    def max_parts(self) -> int:
        """Each row may be of another text."""
        return self.size * num_parts(1, self.groups)

    @property
    def _leaves(self) -> int:
        return BY_ROW * aligned(self.size) + aligned(len(Part._fields) * self.max_parts)

    @property
    def _splits(self) -> int:
        return self._leaves + 2 * self.max_parts * ROWS

    @property
    def _moves(self) -> int:
        return aligned(self._splits + 1)

    @property
    def tails(self) -> int:
        return self._moves + 2 * MOVES

    @property
    def length(self) -> int:
        return self.tails + self.size * TAIL

    def fields(self, region: Any) -> PlanFields:
        step = aligned(self.size)
        ids, positions, slots, places, sources, outputs, order = (
            region[i * step : i * step + self.size] for i in range(BY_ROW)
        )
        parts = region[BY_ROW * step :][: len(Part._fields) * self.max_parts]
        parts = parts.reshape(self.max_parts, len(Part._fields))
        leaves, tail_tables = region[self._leaves : self._splits].reshape(2, self.max_parts, ROWS)
        splits = region[self._splits : self._splits + 1]
        moves = region[self._moves : self._moves + 2 * MOVES].reshape(2, MOVES)
        by_row = ids, positions, slots, places, sources, outputs, order
        return PlanFields(*by_row, parts, leaves, tail_tables, splits, moves)


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedRows:
    """What the kernels read: fields of a plan on the device, and the tables of slots."""

    plan: PlanFields
    tables: Any  # the buffer: a table of slots for each text, and of TAIL positions for paths
    table_length: int  # of a text's
    tails: int  # where those of paths begin: a text has as many as it has rows, though it may need fewer
    own_ids: int  # where the plan's `ids` are in the buffer
    unread: int  # a place in it for what nobody reads
    max_splits: int
    max_split_parts: int  # the most parts whose keys several programs share

    @cached_property
    def own_sources(self) -> np.ndarray:
        """Where the token of each row is if the plan says which it is."""
        return np.arange(self.own_ids, self.own_ids + len(self.plan.ids))

    @property
    def max_items(self) -> int:
        """The most tiles of keys that a part attends to: in a tree each query may have tiles of its own."""
        return -(-self.table_length // KEYS) + ROWS * TAIL // KEYS


def num_parts(rows: int, groups: int) -> int:
    """How many tiles of queries so many rows of one text are."""
    return -(-rows * groups // ROWS)


def num_programs(kv_heads: int, sms: int) -> int:
    """How many programs of attention for each head keep so many multiprocessors busy."""
    return PROGRAMS_PER_SM * sms // kv_heads


def num_splits(programs: int, num_parts: int, most: int, longest: int) -> int:
    """How many of so many programs share the keys of a part: not two, if those of the longest text are few.

    What both have found has to be joined.
    """
    splits = max(1, min(most, programs // num_parts))
    return 1 if splits == PAIR and longest < LONG_TEXT else splits


def split_limits(size: int, groups: int, kv_heads: int, table_length: int, sms: int) -> tuple[int, int]:
    """How many programs at most share the keys of a part, and in how many parts they may."""
    programs = num_programs(kv_heads, sms)
    splits = max(1, min(programs // num_parts(size, groups), MAX_SPLITS, -(-table_length // KEYS)))
    return splits, programs // 2 if splits > 1 else 0


def fill_plan(
    plan: PlanFields, tails: np.ndarray, texts: Sequence[SlotRows], layout: PlanLayout, rows: PackedRows, programs: int
) -> None:
    """Lay the rows of all texts one behind another; so many `programs` for each head keep the device busy."""
    begin, parts = 0, list[Part]()
    by_row: tuple[list[int], ...] = ([], [], [], [])
    plan.sources[:] = rows.own_sources
    plan.outputs[:] = rows.unread
    for text in texts:
        fill_rows(by_row, text, rows.table_length, rows.unread)
        num_rows = text.num_rows
        common = len(text.tokens), text.length, text.table
        own = [Part(begin, num_rows, i, *common) for i in range(num_parts(num_rows, layout.groups))]
        if text.nodes:
            fill_tree(plan, tails, text, own, len(parts), layout.groups)
        if text.sources:
            plan.sources[begin : begin + num_rows] = text.sources
        if text.outputs:
            plan.outputs[begin : begin + num_rows] = text.outputs
        parts += own
        begin += num_rows
    for array, values, padding in zip(plan, by_row, (0, 0, 0, rows.unread)):
        array[:begin] = values
        if begin < layout.size:
            array[begin:] = padding
    plan.parts[: len(parts)] = parts
    plan.parts[len(parts) :] = 0
    plan.splits[0] = num_splits(programs, len(parts), rows.max_splits, max(text.end for text in texts))
    plan.moves[0] = rows.unread


def fill_rows(by_row: tuple[list[int], ...], text: SlotRows, table_length: int, unread: int) -> None:
    """Add the rows of a text to the lists of ids, positions, slots and places."""
    ids, positions, slots, places = by_row
    ids += text.tokens
    positions += range(text.length, text.end)
    slots += text.slots[text.length : text.end].tolist()
    places += range(text.table * table_length + text.length, text.table * table_length + text.end)
    if nodes := text.nodes:
        depths = text.tree.depths
        ids += text.tree.tokens_of(nodes)
        positions += [text.end + depths[node] for node in nodes]
        slots += [text.node_slots[node] for node in nodes]
        places += [unread] * len(nodes)


def fill_tree(
    plan: PlanFields, tails: np.ndarray, text: SlotRows, parts: list[Part], num_before: int, groups: int
) -> None:
    """Say of the parts of a text, which are behind so many others, on which paths its nodes are; fill their tables."""
    begin, count = parts[0].begin, len(text.tokens)
    first, token_queries = divmod(count * groups, ROWS)
    tree = tree_parts(text.tree.parents, tuple(text.nodes), token_queries, groups)
    room = text.tail + KEYS - text.end  # for the nodes of a path, in its first tile
    for i, (lengths, seen) in enumerate(zip(tree.lengths, tree.seen), first):
        long_leaves = sum(length > room for length in lengths) if lengths[0] > room else 0
        parts[i] = parts[i]._replace(leaves=len(lengths), long_leaves=long_leaves, seen=count + seen)
    plan.order[begin + count : begin + count + len(tree.order)] = tree.order + count
    plan.leaves[num_before + first : num_before + len(parts)] = tree.leaves
    plan.tail_tables[num_before + first : num_before + len(parts)] = tree.tables
    own = tails[begin : begin + len(tree.nodes)]
    if text.tails is None:
        text.fill_tails(own, tree.paths)
    else:
        own[:] = text.tails[tree.nodes]
