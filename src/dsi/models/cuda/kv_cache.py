"""One text in one cache, which several servers of a device fill together.

What one of them is reading, the next need not read again: a forward goes through the pieces of the model's
layers behind the one that began before it, and finds the keys and values of all earlier tokens there. Each
piece sees the forwards in the order in which they began, so it is as if they ran one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsi.models.protocol import CancelFlag, Cancelled

AHEAD = 2  # pieces of a forward on their way at once: the processor never waits for the interpreter


class Mark(Protocol):
    """The end of a piece."""

    def query(self) -> bool: ...


class CudaForward(Protocol):
    @property
    def segments(self) -> int: ...

    def launch(self, piece: int, after: Any, cancelled: CancelFlag) -> Mark:
        """Begin a piece, behind the mark `after` if there is one; returns the mark of its end."""
        ...


class Gone:
    """The flag of a forward whose server is gone."""

    def is_set(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:  # noqa: ARG002
        return True


@dataclass(eq=False, slots=True)
class InflightForward:
    """A forward on its way."""

    forward: CudaForward
    begin: int  # where in the text it begins to read: what comes before, others have read or are reading
    cancelled: CancelFlag
    ends: list[Mark] = field(default_factory=list)  # of the pieces that have begun
    told: bool = True  # whether what it reads is still part of the shelf's text

    @property
    def launched(self) -> bool:
        return len(self.ends) == self.forward.segments


class SharedKVCache:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._flying: list[InflightForward] = []  # in the order in which they began
        self._orphans: list[InflightForward] = []  # those whose server is gone, and which others need
        self._last: dict[int, Mark] = {}  # the end of the last forward through each piece
        self.reader: object = None  # who is in the middle of a long text: nobody else begins

    @property
    def tokens(self) -> list[int]:
        """The text that the cache holds as soon as the forwards on their way have ended."""
        self._sweep()
        return self._tokens

    def hold(self, begin: int, fresh: Sequence[int]) -> None:
        """Somebody who has the shelf to himself has read these tokens there; the rest is forgotten."""
        self._tokens[begin:] = fresh

    def begin(self, forward: CudaForward, begin: int, fresh: Sequence[int], cancelled: CancelFlag) -> InflightForward:
        """A forward over these tokens, after the first `begin` of the text; the rest of it is forgotten."""
        for other in self._flying:
            other.told = other.told and other.begin < begin
        self._tokens[begin:] = fresh
        flight = InflightForward(forward, begin, cancelled)
        self._flying.append(flight)
        try:
            self._launch(flight)
        except BaseException:
            self._drop(flight)
            raise
        return flight

    def going_on(self, flight: InflightForward) -> Iterator[None]:
        """Look again after each None; it ends with the forward, or when a cancelled one has halted."""
        try:
            while not flight.launched:
                if flight.cancelled.is_set() and not self._needed(flight):
                    self._drop(flight)
                    while not flight.ends[-1].query():  # its inputs may be written over only then
                        yield None
                    raise Cancelled
                self._push(flight)
                yield None
            while not flight.ends[-1].query():
                yield None
            self._flying.remove(flight)
        except GeneratorExit:
            self._orphan(flight)
            raise

    def _push(self, flight: InflightForward) -> None:
        """Begin its next piece, if it is time and the forward before it has been there."""
        for orphan in self._orphans:
            if not orphan.launched:
                self._push_alone(orphan)
        self._push_alone(flight)

    def _push_alone(self, flight: InflightForward) -> None:
        piece = len(flight.ends)
        if piece >= AHEAD and not flight.ends[piece - AHEAD].query():
            return
        before = self._before(flight)
        if before is None or len(before.ends) > piece:
            self._launch(flight)

    def _before(self, flight: InflightForward) -> InflightForward | None:
        place = self._flying.index(flight)
        return self._flying[place - 1] if place else None

    def _launch(self, flight: InflightForward) -> None:
        piece = len(flight.ends)
        end = flight.forward.launch(piece, self._last.get(piece), flight.cancelled)
        flight.ends.append(end)
        self._last[piece] = end

    def _needed(self, flight: InflightForward) -> bool:
        """Whether a forward that is wanted builds on what this one reads."""
        later = self._flying[self._flying.index(flight) + 1 :]
        return any(other.begin > flight.begin and not other.cancelled.is_set() for other in later)

    def _drop(self, flight: InflightForward) -> None:
        """It goes no further: what it was reading is not there."""
        self._flying.remove(flight)
        if flight.told:
            del self._tokens[flight.begin :]

    def _orphan(self, flight: InflightForward) -> None:
        if flight in self._flying:
            flight.cancelled = Gone()
            self._orphans.append(flight)

    def _sweep(self) -> None:
        """Forget the forwards without a server that are through, or that nobody needs."""
        for orphan in reversed(self._orphans[:]):
            if orphan.launched:
                self._flying.remove(orphan)
            elif not self._needed(orphan):
                self._drop(orphan)
            else:
                continue
            self._orphans.remove(orphan)
