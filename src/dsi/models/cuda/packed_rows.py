"""The rows of a forward over new tokens and draft trees of several texts: where each is, and which keys it sees.

Keys and values are in slots, in no order. A table for each text says in which slot each of its positions is. A node of
a draft tree stands at a position of a path of its own, so its row has a table of its own for the end of that path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dsi.core.tree_shape import END
from dsi.models.tree_cache import TreeRows

KEYS = 64  # of a tile: keys are attended to in tiles, which begin at multiples of it
ROWS = 16  # queries of a part: the fewest that tensor cores take
TAIL = 2 * KEYS  # positions of a path that a row's own table has: from the tile on in which the text ends
MAX_DEPTH = TAIL - KEYS  # of a tree
PROGRAMS_PER_SM, MAX_SPLITS = 2, 64
NO_TREE = TreeRows({}, [], [])


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The new rows of a text whose keys are in slots: tokens that continue it, then nodes of a tree, parents first."""

    table: int  # of the text
    slots: np.ndarray  # by position, up to the last new token
    length: int  # positions before the first new one
    tokens: Sequence[int]
    tree: TreeRows = NO_TREE
    node_slots: Sequence[int] = ()  # by the number of the node

    @property
    def end(self) -> int:
        return self.length + len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.tree.computed)

    @property
    def tail(self) -> int:
        """Where the tile begins in which the text ends."""
        return self.end // KEYS * KEYS

    def node_tails(self) -> Iterator[np.ndarray]:
        """The end of each node's path: the slots of its positions from `tail` on."""
        known: list[np.ndarray] = []
        for (parent, _), depth, slot in zip(self.tree.nodes, self.tree.depths, self.node_slots):
            own = self.text_tail() if parent == END else known[parent].copy()
            own[self.end - self.tail + depth] = slot
            known.append(own)
            yield own

    def text_tail(self) -> np.ndarray:
        own = np.zeros(TAIL, np.int32)
        own[: self.end - self.tail] = self.slots[self.tail : self.end]
        return own


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
    """Arrays, or tensors on a device, one entry a row but for the last two."""

    ids: Any
    positions: Any
    slots: Any
    places: Any  # in the tables, of the slots of new tokens; of nodes and padding the last, which nobody reads
    parts: Any  # a `Part` each
    splits: Any  # how many programs share the keys of a part


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the fields of a forward of so many rows are in one buffer, in host memory and on the device."""

    size: int
    groups: int  # queries that read one key

    @property
    def max_parts(self) -> int:
        """Each row may be of another text."""
        return self.size * num_parts(1, self.groups)

    @property
    def length(self) -> int:
        return 4 * self.size + len(Part._fields) * self.max_parts + 1

    def fields(self, buffer: Any) -> PlanFields:
        ids, positions, slots, places = (buffer[i * self.size : (i + 1) * self.size] for i in range(4))
        parts = buffer[4 * self.size : self.length - 1].reshape(self.max_parts, len(Part._fields))
        return PlanFields(ids, positions, slots, places, parts, buffer[self.length - 1 : self.length])


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What the kernels read: fields of a plan on the device, and the tables of slots."""

    plan: PlanFields
    tables: Any  # flat: one of each text, then one of TAIL positions for each row
    table_length: int  # of a text's
    tails: int  # where those of rows begin
    max_splits: int
    max_split_parts: int  # the most parts whose keys several programs share

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
    for array in plan:
        array[...] = 0
    plan.places[:] = len(rows.tables) - 1
    begin, parts = 0, list[Part]()
    for text in texts:
        fill_rows(plan, begin, text, rows.table_length)
        fill_tails(tails[begin : begin + text.num_rows], text, layout.groups)
        end = text.end + max((text.tree.depths[node] + 1 for node in text.tree.computed), default=0)
        common = len(text.tokens), text.length, text.table, end
        parts += [Part(begin, text.num_rows, i, *common) for i in range(num_parts(text.num_rows, layout.groups))]
        begin += text.num_rows
    plan.parts[: len(parts)] = parts
    plan.splits[0] = max(1, min(rows.max_splits, programs // len(parts)))


def fill_rows(plan: PlanFields, begin: int, text: SlotRows, table_length: int) -> None:
    tree, end = text.tree, begin + text.num_rows
    depths = tree.depths if tree.computed else []
    positions = np.arange(text.length, text.end)
    plan.ids[begin:end] = [*text.tokens, *tree.tokens]
    plan.positions[begin:end] = [*positions, *(text.end + depths[node] for node in tree.computed)]
    plan.slots[begin:end] = [*text.slots[text.length : text.end], *(text.node_slots[node] for node in tree.computed)]
    plan.places[begin : begin + len(positions)] = text.table * table_length + positions


def fill_tails(tails: np.ndarray, text: SlotRows, groups: int) -> None:
    """The tables of nodes, and of tokens that share a part with them."""
    if not text.tree.computed:
        return
    count = len(text.tokens)
    tails[count * groups // ROWS * ROWS // groups : count] = text.text_tail()
    by_node = list(text.node_tails())
    for row, node in enumerate(text.tree.computed, count):
        tails[row] = by_node[node]
