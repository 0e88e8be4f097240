"""Generating tokens of several texts on the device: forwards that follow one another, each a token further.

Which slots and positions they have is known before their tokens are. So several forwards are launched before the first
has ended, and each reads its tokens where the one before it wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dsi.models.cuda.kv_pool import PooledRows
from dsi.models.cuda.packed_rows import (
    BRANCHES,
    PackedRows,
    Part,
    PlanFields,
    PlanLayout,
    SlotRows,
    num_parts,
    num_splits,
)
from dsi.models.protocol import ForwardRequest

MAX_STEPS = 8  # forwards that are launched before the first has ended
STAND_IN = -(2**30)  # for a token that is not known yet: no kernel reads it

Teacher = Callable[[ForwardRequest], Sequence[int]]  # gives the tokens in place of those that were picked


@contextmanager
def with_stand_ins(requests: Sequence[ForwardRequest], counts: Sequence[int]) -> Iterator[list[ForwardRequest]]:
    """The same requests with room for all tokens but the last, each in the list of tokens that it has."""
    lists = [request.tokens if isinstance(request.tokens, list) else list(request.tokens) for request in requests]
    lengths = list(map(len, lists))
    for tokens, count in zip(lists, counts):
        tokens += [STAND_IN] * (count - 1)
    try:
        yield [replace(request, tokens=tokens) for request, tokens in zip(requests, lists)]
    finally:
        for tokens, length in zip(lists, lengths):
            del tokens[length:]


class TokenSteps:
    """The rows of each forward, and the tokens that came of it. A text is computed until it has all of its tokens."""

    def __init__(
        self,
        begun: Sequence[PooledRows],
        requests: Sequence[ForwardRequest],
        counts: Sequence[int],
        teacher: Teacher | None = None,
    ) -> None:
        lengths = [len(request.tokens) for request in requests]
        self._teacher, self._taught = teacher, list[ForwardRequest]()
        if teacher is not None:
            self._taught = [replace(request, tokens=list(request.tokens)) for request in requests]
        self._begun, self._lengths, self._counts = begun, np.array(lengths), np.array(counts)
        self.tokens: list[list[int]] = [[] for _ in begun]
        self._tables = np.array([pooled.text.table for pooled in begun])
        self._slots = np.zeros((len(begun), max(counts)), np.int32)  # of generated tokens
        for own, pooled, length, count in zip(self._slots, begun, lengths, counts):
            own[: count - 1] = pooled.text.slots[length : length + count - 1]
        self._picked = np.zeros(len(begun), np.int64)  # where in the buffer the last token of each text is

    def __len__(self) -> int:
        """How many forwards there are."""
        return int(self._counts.max())

    def going_on(self, step: int) -> np.ndarray:
        """The texts of which a forward computes a token, by number."""
        return np.flatnonzero(self._counts > step)

    def first_rows(self, first_picked: int, unread: int) -> list[SlotRows]:
        """Those of the first forward, which computes what is new of each text, too."""
        rows = []
        for number, (pooled, length) in enumerate(zip(self._begun, self._lengths)):
            own = pooled.rows
            tokens, place = own.tokens[: length - own.length], first_picked + BRANCHES * number
            outputs = [*[unread] * (len(tokens) - 1), place]
            rows.append(SlotRows(own.table, own.slots, own.length, tokens, outputs=outputs))
            self._picked[number] = place
        return rows

    def fill(
        self, step: int, plan: PlanFields, rows: PackedRows, layout: PlanLayout, programs: int, first_picked: int
    ) -> None:
        """Describe a later forward: a token of each text that goes on, read where it was picked."""
        texts = self.going_on(step)
        count, parts = len(texts), num_parts(1, layout.groups)
        positions = self._lengths[texts] + step - 1
        places = self._tables[texts] * rows.table_length + positions
        picked = first_picked + BRANCHES * np.arange(count)
        plan.sources[:], plan.outputs[:] = rows.own_sources, rows.unread
        by_row = np.zeros(count), positions, self._slots[texts, step - 1], places, self._picked[texts], picked
        for array, values, padding in zip(plan, by_row, (0, 0, 0, rows.unread, None, None)):
            array[:count] = values
            if padding is not None:
                array[count:] = padding
        own = np.zeros((count, parts, len(Part._fields)), np.int32)
        first = Part(np.arange(count), 1, 0, 1, positions, self._tables[texts])  # type: ignore[arg-type]
        for field, values in enumerate(first):
            own[:, :, field] = np.asarray(values).reshape(-1, 1)
        own[:, :, Part._fields.index("number")] = np.arange(parts)
        plan.parts[: count * parts] = own.reshape(count * parts, -1)
        plan.parts[count * parts :] = 0
        plan.splits[0] = num_splits(programs, count * parts, rows.max_splits, int(positions.max()) + 1)
        plan.moves[0] = rows.unread
        self._picked[texts] = picked

    def teach(self, step: int) -> None:
        """Ask the teacher for the tokens of a forward, while the device computes it."""
        for number in self.going_on(step).tolist() if self._teacher is not None else ():
            request = self._taught[number]
            request.start = len(request.tokens)
            request.tokens += self._teacher(request)  # type: ignore[misc]

    def add(self, step: int, picked: np.ndarray) -> None:
        """Record what a forward picked, `BRANCHES` tokens a row."""
        for number, token in zip(self.going_on(step).tolist(), picked[:, 0].tolist()):
            if self._taught:
                token = self._taught[number].tokens[self._lengths[number] + step]
            self.tokens[number].append(token)

    def end(self, give_back: Callable[[Any], None]) -> None:
        """Say which tokens were computed, and give back the slots of those that were not."""
        for pooled, length, tokens in zip(self._begun, self._lengths, self.tokens):
            rows, end = pooled.rows, length + len(tokens) - 1
            give_back(rows.slots[end : rows.end])
            rows.tokens = [*rows.tokens[: length - rows.length], *tokens[:-1]]
