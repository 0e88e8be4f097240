"""The rows of a forward over new tokens and draft trees of several texts: where each is, and which keys it sees.

Keys and values are in slots, in no order. A table for each text says in which slot each of its positions is. A node of
a draft tree stands at a position of a path of its own, so its row has a table of its own for the end of that path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from dsi.core.tree_shape import END
from dsi.models.tree_cache import TreeRows

KEYS = 64  # of a tile: keys are attended to in tiles, which begin at multiples of it
ROWS = 16  # queries of a part: the fewest that tensor cores take
TAIL = 2 * KEYS  # positions of a path that a row's own table has: from the tile on in which the text ends
MAX_DEPTH = TAIL - KEYS  # of a tree
PROGRAMS_PER_SM, MAX_SPLITS = 2, 64
BRANCHES = 4  # likeliest tokens after a row that are picked on the device
ALIGNMENT = 16  # of int32, which Triton counts in: 16 bytes would do for pointers
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
        own = np.zeros(TAIL, np.int32)
        own[: self.end - self.tail] = self.slots[self.tail : self.end]
        return own

    def node_tails(self) -> np.ndarray:
        """The same of the path of each node."""
        nodes, depths, above = paths(self.tree.parents)
        tails = np.empty((len(self.tree.parents), TAIL), np.int32)
        tails[:] = self.text_tail()
        tails[nodes, self.end - self.tail + depths] = np.array(self.node_slots, np.int32)[above]
        return tails


@lru_cache(1024)  # of few shapes, again and again
def paths(parents: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each node of a tree and each depth of its path: the node, the depth, and the node of the path that is there.

    `parents` are before their children; the depth of the first of a path is 0.
    """
    by_node: list[list[int]] = []
    for node, parent in enumerate(parents):
        by_node.append([*(by_node[parent] if parent != END else ()), node])
    above = [(node, depth, step) for node, path in enumerate(by_node) for depth, step in enumerate(path)]
    nodes, depths, steps = np.array(above, np.int64).reshape(-1, 3).T
    return nodes, depths, steps


class Part(NamedTuple):
    """A tile of queries, as the kernel reads it."""

    begin: int  # the first row of its text
    rows: int  # of its text
    number: int  # of the part among those of its text
    chain: int  # rows of its text that are tokens, before those of nodes
    length: int  # positions of its text before the first row
    table: int  # of its text
    end: int  # of the longest path


class PlanFields(NamedTuple):
    """Arrays, or tensors on a device, one entry a row but for the last three."""

    ids: Any
    positions: Any
    slots: Any
    places: Any  # in the buffer, of the slots of new tokens; of nodes and padding one that nobody reads
    sources: Any  # in the buffer, of the row's token: among `ids`, or where an earlier forward picked it
    outputs: Any  # in the buffer, of the likeliest tokens after the row
    parts: Any  # a `Part` each
    splits: Any  # how many programs share the keys of a part
    moves: Any  # places in the buffer, and the slots to write there: of nodes that became text


BY_ROW, MOVES = len(PlanFields._fields) - 3, 64


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
    def _splits(self) -> int:
        return BY_ROW * aligned(self.size) + aligned(len(Part._fields) * self.max_parts)

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
        ids, positions, slots, places, sources, outputs = (
            region[i * step : i * step + self.size] for i in range(BY_ROW)
        )
        parts = region[BY_ROW * step :][: len(Part._fields) * self.max_parts]
        parts = parts.reshape(self.max_parts, len(Part._fields))
        splits = region[self._splits : self._splits + 1]
        moves = region[self._moves : self._moves + 2 * MOVES].reshape(2, MOVES)
        return PlanFields(ids, positions, slots, places, sources, outputs, parts, splits, moves)


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedRows:
    """What the kernels read: fields of a plan on the device, and the tables of slots."""

    plan: PlanFields
    tables: Any  # the buffer: a table of slots for each text, and one of TAIL positions for each row
    table_length: int  # of a text's
    tails: int  # where those of rows begin
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
        """The most tiles of keys that a part attends to: in a tree each query has tiles of its own."""
        return -(-self.table_length // KEYS) + ROWS * TAIL // KEYS


def num_parts(rows: int, groups: int) -> int:
    """How many tiles of queries so many rows of one text are."""
    return -(-rows * groups // ROWS)


def split_limits(size: int, groups: int, kv_heads: int, table_length: int, sms: int) -> tuple[int, int]:
    """How many programs at most share the keys of a part, and in how many parts they may."""
    programs = PROGRAMS_PER_SM * sms // kv_heads
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
        end, num_rows = text.end, text.num_rows
        if nodes := text.nodes:
            fill_tails(tails[begin : begin + num_rows], text, layout.groups)
            end += max(map(text.tree.depths.__getitem__, nodes)) + 1
        if text.sources:
            plan.sources[begin : begin + num_rows] = text.sources
        if text.outputs:
            plan.outputs[begin : begin + num_rows] = text.outputs
        common = len(text.tokens), text.length, text.table, end
        parts += [Part(begin, num_rows, i, *common) for i in range(num_parts(num_rows, layout.groups))]
        begin += num_rows
    for array, values, padding in zip(plan, by_row, (0, 0, 0, rows.unread)):
        array[:begin] = values
        if begin < layout.size:
            array[begin:] = padding
    plan.parts[: len(parts)] = parts
    plan.parts[len(parts) :] = 0
    plan.splits[0] = max(1, min(rows.max_splits, programs // len(parts)))
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


def fill_tails(tails: np.ndarray, text: SlotRows, groups: int) -> None:
    """The tables of nodes, and of tokens that share a part with them."""
    count = len(text.tokens)
    tails[count * groups // ROWS * ROWS // groups : count] = text.text_tail()
    tails[count:] = (text.node_tails() if text.tails is None else text.tails)[list(text.nodes)]
