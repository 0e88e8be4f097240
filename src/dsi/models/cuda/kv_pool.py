"""The slots of a KV cache that texts and draft trees share: given out token by token, and taken back.

A rollback gives slots back. Texts that begin with the same tokens use the same slots for them: a new token never goes
to a slot in use. A node of a draft tree that becomes text keeps its slot. Where no slots are free, texts that the call
does not use lose theirs from the end, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from dsi.models.cuda.packed_rows import MAX_DEPTH, NO_TREE, SlotRows
from dsi.models.kv_sequence import common_prefix_length
from dsi.models.protocol import ForwardRequest
from dsi.models.tree_cache import CachedNodes, TreeRows, cached_path, nodes_below, tree_depth

MAX_OVERWRITE = 32  # cached tokens that a text may overwrite: recomputing so few costs little
EVICTED = 64  # slots at least that are taken from a text at once: to look for one takes time


class SlotPool:
    """Counts how many texts use each slot."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._others = np.zeros(size, np.int32)  # texts that use it beside one: taking a slot leaves that as it is

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def used_once(self, slots: np.ndarray) -> np.ndarray:
        """Those that no other text uses, by index."""
        return np.flatnonzero(self._others[slots] == 0)

    def share(self, slots: np.ndarray) -> None:
        self._others[slots] += 1

    def give_back(self, slots: np.ndarray) -> None:
        is_shared = self._others[slots] > 0
        self._others[slots[is_shared]] -= 1
        self._free += slots[~is_shared].tolist()

    def free(self, slots: Sequence[int]) -> None:
        """Give back slots that no two texts use, as those of nodes are."""
        self._free += slots


@dataclass(eq=False)
class PooledText:
    """What is cached of one text, and of a tree after it."""

    table: int  # where the device keeps its slots by position
    slots: np.ndarray  # by position
    tokens: list[int] = field(default_factory=list)
    nodes: CachedNodes = field(default_factory=dict)
    node_slots: list[int] = field(default_factory=list)
    in_table: int = 0  # positions whose slots the device knows
    owner: Sequence[int] | None = None  # the list of tokens that used it last, kept so that no other has its identity


@dataclass(slots=True)
class PooledRows:
    """What a forward computes of a text."""

    text: PooledText
    rows: SlotRows
    num_positions: int  # of its last tokens, whose logits are wanted

    @property
    def wanted(self) -> Sequence[int]:
        """The rows whose logits are wanted, from the text's first one."""
        count, asked = len(self.rows.tokens), self.rows.tree.asked
        positions = range(count - self.num_positions, count)
        return [*positions, *(count + row for row in asked)] if asked else positions


class NoRoom(ValueError):
    """The slots or tables that are not in use do not suffice."""


class PoolCall:
    """The requests of one call: those that a forward computes, and those that have to wait for another one."""

    def __init__(
        self,
        find: Callable[[ForwardRequest], PooledText | None],
        requests: Sequence[ForwardRequest],
        max_rows: float,
    ) -> None:
        self._find, self._requests, self.rows_left = find, requests, max_rows
        self.begun: list[PooledRows] = []
        self.used: set[PooledText] = set()

    def add(self, pooled: PooledRows) -> None:
        self.begun.append(pooled)
        self.used.add(pooled.text)
        self.rows_left -= pooled.rows.num_rows

    @cached_property
    def last_use(self) -> dict[PooledText, int]:
        """The last request that begins like each text; only looked up where something is evicted."""
        found = map(self._find, self._requests)
        return {text: number for number, text in enumerate(found) if text is not None}

    def uses(self, text: PooledText) -> bool:
        """Whether a request uses this text or is going to."""
        return text in self.used or self.last_use.get(text, -1) >= len(self.begun)


class TextPool:
    """Finds what is cached of texts, and gives each forward the slots that it fills.

    It holds one text more than a forward may have, as the last of them may begin as a copy of another text.
    """

    def __init__(self, num_slots: int, max_texts: int, max_length: int) -> None:
        self.slots, self.max_texts, self.max_length = SlotPool(num_slots), max_texts, max_length
        self.num_slots, self.num_tables = num_slots, max_texts + 1
        self._free_tables = list(range(max_texts, -1, -1))
        self._texts: dict[PooledText, None] = {}  # the least recently used first
        self._in_flight: set[PooledText] = set()  # of forwards that run
        self.num_ended = 0  # forwards, after each of which there may be more room
        self._text_of: dict[int, PooledText] = {}  # by the identity of its owner

    def clear(self) -> None:
        for text in list(self._texts):
            self._drop(text)

    def check(self, request: ForwardRequest) -> None:
        """Refuse what cannot be computed."""
        depth = len(request.tree) if request.asked else 0
        if depth > min(MAX_DEPTH, self.max_length - len(request.tokens)):  # as no path is longer than that
            depth = tree_depth(request.tree)
        if request.start < 1:
            raise ValueError("an empty text: a transformers model needs at least one token to begin with")
        if len(request.tokens) + depth > self.max_length:
            raise ValueError(f"a text of {len(request.tokens) + depth} tokens: there is room for {self.max_length}")
        if depth > MAX_DEPTH:
            raise ValueError(f"a tree of {depth} levels: there may be {MAX_DEPTH}")

    def num_new(self, request: ForwardRequest) -> int:
        """How many tokens of a text its forward has to compute."""
        return len(request.tokens) - min(self.num_cached(request.tokens), request.start - 1)

    def num_cached(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text are cached, of this one or of another."""
        return self._find(tokens)[0]

    def begin(self, requests: Sequence[ForwardRequest], max_rows: float = inf) -> list[PooledRows]:
        """Give slots to the new rows of each request, whose text no other of them has: of the first ones that fit.

        The first alone may have more than `max_rows`. What is cached of the others is kept, unless the first one
        needs its slots; and so is what forwards that run have begun, until `finish` or `cancel`.
        """
        call = PoolCall(lambda request: self._find(request.tokens)[1], requests, max_rows)
        try:
            for request in requests[: self.max_texts]:
                if call.begun and request.num_positions > call.rows_left:
                    break
                call.add(self._begin(request, call))
        except BaseException as error:
            if not (isinstance(error, NoRoom) and call.begun):
                self.cancel(call.begun)
                raise
        self._in_flight |= call.used
        return call.begun

    @property
    def has_in_flight(self) -> bool:
        """Whether there will be room that there is not now."""
        return bool(self._in_flight)

    def finish(self, begun: Sequence[PooledRows]) -> None:
        """Record that a forward has computed these rows."""
        self.release(begun)
        for pooled in begun:
            text, rows = pooled.text, pooled.rows
            text.tokens += rows.tokens
            text.in_table = rows.end

    def release(self, begun: Sequence[PooledRows]) -> None:
        """No forward that runs uses these texts, or none had to run: others may have their slots."""
        self._in_flight.difference_update(pooled.text for pooled in begun)
        self.num_ended += 1

    def named_nodes(self, pooled: PooledRows, tokens: Mapping[int, int]) -> CachedNodes:
        """The nodes of a tree that is computed, by the tokens that they turned out to be."""
        return {(parent, tokens.get(token, token)): slot for (parent, token), slot in pooled.text.nodes.items()}

    def name_nodes(self, pooled: PooledRows, named: CachedNodes) -> None:
        """Say what the nodes are once their forward has ended."""
        text = pooled.text
        if len(named) < len(text.nodes):  # one was cached before, too
            self._drop_nodes(text)
        else:
            text.nodes = named

    def cancel(self, begun: Sequence[PooledRows]) -> None:
        """Take back the slots of a forward that did not run."""
        self.release(begun)
        for pooled in begun:
            length = pooled.rows.length
            self.slots.give_back(pooled.text.slots[length : pooled.rows.end])
            self._drop_nodes(pooled.text)
            if not length:
                self._drop(pooled.text)

    def _begin(self, request: ForwardRequest, call: PoolCall) -> PooledRows:
        self.check(request)
        tokens = request.tokens
        shared, text = self._text_for(tokens, call)
        self._set_owner(text, tokens)
        num_cached = min(shared, request.start - 1)
        if not request.asked or not shared == len(text.tokens) == len(tokens):  # nodes are after another text
            self._drop_nodes(text)
        self._truncate(text, num_cached)
        tree = TreeRows.of(text.nodes, request.tree, request.asked) if request.asked else NO_TREE
        if call.begun and len(tokens) - num_cached + len(tree.computed) > call.rows_left:
            raise NoRoom
        num_kept = len(text.nodes) if tree.nodes.items() >= text.nodes.items() else 0
        if not num_kept:
            self._drop_nodes(text)
        new = self._take(len(tokens) - num_cached + len(tree.nodes) - num_kept, text, call)
        text.slots[num_cached : len(tokens)] = new[: len(tokens) - num_cached]
        text.node_slots += new[len(tokens) - num_cached :]
        text.nodes = tree.nodes
        rows = SlotRows(text.table, text.slots, num_cached, list(tokens[num_cached:]), tree, text.node_slots)
        return PooledRows(text, rows, max(0, len(tokens) + 1 - request.start))

    def _text_for(self, tokens: Sequence[int], call: PoolCall) -> tuple[int, PooledText]:
        """The text that has most of these tokens, and how many.

        It is a fork of the one found where that is in use, or would lose much, or anything of another text.
        """
        shared, text = self._find(tokens)
        if text is not None and text not in call.used and text not in self._in_flight:
            if shared == len(text.tokens):
                self._accept(text, tokens)
                shared = len(text.tokens)
            if len(text.tokens) - shared <= (MAX_OVERWRITE if text.owner is tokens else 0):
                del self._texts[text]
                self._texts[text] = None
                return shared, text
        return shared, self._fork(text, shared, call)

    def _find(self, tokens: Sequence[int]) -> tuple[int, PooledText | None]:
        """The text with the longest common prefix: the one that this list of tokens had, if it has most of them."""
        if (text := self._text_of.get(id(tokens))) is not None:
            shared = common_prefix_length(text.tokens, tokens)
            if shared and max(len(text.tokens), len(tokens)) - shared <= MAX_OVERWRITE:
                return shared, text
        longest, best = 0, None
        for text in reversed(self._texts):
            if longest and (len(text.tokens) < longest or text.tokens[longest - 1] != tokens[longest - 1]):
                continue  # which takes no time: it has less in common
            shared = common_prefix_length(text.tokens, tokens)
            if shared > longest or (shared and shared == longest and best and len(text.tokens) < len(best.tokens)):
                longest, best = shared, text
        return longest, best

    def continue_with(self, tokens: Sequence[int], begun: Sequence[int]) -> None:
        """What is cached of this list of tokens is what was cached of that one, with which it begins."""
        if (text := self._text_of.get(id(begun))) is not None:
            self._set_owner(text, tokens)

    def _set_owner(self, text: PooledText, tokens: Sequence[int]) -> None:
        self._text_of.pop(id(text.owner), None)
        text.owner, self._text_of[id(tokens)] = tokens, text

    def _fork(self, text: PooledText | None, shared: int, call: PoolCall) -> PooledText:
        """A new text that uses the same slots for the tokens it has in common with another."""
        if not self._free_tables:
            if (old := next(self._evictable(text, call), None)) is None:
                raise NoRoom
            self._drop(old)
        forked = PooledText(self._free_tables.pop(), np.zeros(self.max_length, np.int32))
        if text is not None:
            forked.tokens, forked.slots[:shared] = text.tokens[:shared], text.slots[:shared]
            self.slots.share(text.slots[:shared])
        self._texts[forked] = None
        return forked

    def _take(self, count: int, text: PooledText, call: PoolCall) -> list[int]:
        """Take so many slots, from other texts if too few are free."""
        if self.slots.num_free < count:
            for old in self._evictable(text, call):
                self._evict(old, max(EVICTED, count - self.slots.num_free))
                if self.slots.num_free >= count:
                    break
            else:
                free = self.slots.num_free
                raise NoRoom(f"{count} new tokens: of {self.num_slots} in the KV cache, {free} are free")
        return self.slots.take(count)

    def _evictable(self, kept: PooledText | None, call: PoolCall) -> Iterator[PooledText]:
        """Texts that the call does not use, the least recently used first.

        Then, for the first request of a forward, those that are used last in the call, whose requests compute again
        what they lose.
        """
        texts = [text for text in self._texts if text is not kept and text not in self._in_flight]
        yield from (text for text in texts if not call.uses(text))
        if not call.begun:
            yield from sorted(filter(call.uses, texts), key=call.last_use.__getitem__, reverse=True)

    def _evict(self, text: PooledText, count: int) -> None:
        """Free so many slots of a text, its last ones, or all that no other uses: what it begins with stays cached."""
        self._drop_nodes(text)
        own = self.slots.used_once(text.slots[: len(text.tokens)])
        if len(own) > count:
            self._truncate(text, int(own[-count]))
        else:
            self._drop(text)

    def _drop(self, text: PooledText) -> None:
        self._drop_nodes(text)
        self._truncate(text, 0)
        del self._texts[text]
        self._free_tables.append(text.table)
        self._text_of.pop(id(text.owner), None)

    def _truncate(self, text: PooledText, length: int) -> None:
        if length < len(text.tokens):
            self.slots.give_back(text.slots[length : len(text.tokens)])
            del text.tokens[length:]
            text.in_table = min(text.in_table, length)

    def _drop_nodes(self, text: PooledText) -> None:
        if text.node_slots:
            self.slots.free(text.node_slots)
            text.nodes, text.node_slots = {}, []

    def _accept(self, text: PooledText, tokens: Sequence[int]) -> None:
        """Make cached nodes that this text goes on with text; keep those below its end, and no others."""
        length = len(text.tokens)
        path = cached_path(text.nodes, tokens[length:])
        if not path:
            return
        is_cached = length + len(path) == len(tokens)
        below, nodes = nodes_below(text.nodes, path[-1]) if is_cached else ([], {})
        slots = text.node_slots
        text.slots[length : length + len(path)] = [slots[node] for node in path]
        text.tokens += tokens[length : length + len(path)]
        kept = {*path, *below}
        self.slots.free([slot for node, slot in enumerate(slots) if node not in kept])
        text.nodes, text.node_slots = nodes, [slots[node] for node in below]
