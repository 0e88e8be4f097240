"""One KV cache of one text that several servers on a device fill together.

A forward need not recompute tokens that another one is computing: it runs through the segments of the model's
layers behind the forward that began before it, and finds the keys and values of all earlier tokens in the
cache. Every segment sees the forwards in the order in which they began, as if they ran one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsi.models.protocol import CancelFlag, Cancelled, Never

MAX_QUEUED = 2  # segments of one forward enqueued at a time: the GPU never waits for Python


class GpuEvent(Protocol):
    """The end of a segment. `torch.cuda.Event` is one."""

    def query(self) -> bool: ...


class CudaForward(Protocol):
    @property
    def segments(self) -> int: ...

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> GpuEvent:
        """Enqueue a segment, behind the event `after` if there is one; return the event of its end."""
        ...


class Always(Never):
    """The flag of a forward whose server is gone."""

    value = True


@dataclass(eq=False, slots=True)
class InflightForward:
    """A forward that has begun and not ended."""

    forward: CudaForward
    begin: int  # the position of its first token: earlier ones are computed by others
    cancelled: CancelFlag
    ends: list[GpuEvent] = field(default_factory=list)  # of the segments launched so far
    current: bool = True  # whether its tokens are still part of the cached text

    @property
    def launched(self) -> bool:
        return len(self.ends) == self.forward.segments


class SharedKVCache:
    """Tracks which tokens the cache holds, and which forwards are writing which positions."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._inflight: list[InflightForward] = []  # in the order in which they began
        self._orphans: list[InflightForward] = []  # those whose server is gone, and which others depend on
        self._last_end: dict[int, GpuEvent] = {}  # by segment: the end of the last forward through it
        self.prefilling: object = None  # the model in the middle of a long prefill: no other forward begins

    @property
    def tokens(self) -> list[int]:
        """The text that the cache holds once the forwards in flight have ended."""
        self._sweep()
        return self._tokens

    def set_tokens(self, begin: int, new_tokens: Sequence[int]) -> None:
        """Record tokens written by the only user of this cache; later positions become invalid."""
        self._tokens[begin:] = new_tokens

    def begin(
        self, forward: CudaForward, begin: int, new_tokens: Sequence[int], cancelled: CancelFlag
    ) -> InflightForward:
        """Start a forward over tokens from position `begin`; later positions become invalid."""
        for other in self._inflight:
            other.current = other.current and other.begin < begin
        self._tokens[begin:] = new_tokens
        inflight = InflightForward(forward, begin, cancelled)
        self._inflight.append(inflight)
        try:
            self._launch(inflight)
        except BaseException:
            self._drop(inflight)
            raise
        return inflight

    def run(self, inflight: InflightForward) -> Iterator[None]:
        """Yield until the forward has ended; raise `Cancelled` when a cancelled one has halted."""
        try:
            while not inflight.launched:
                if inflight.cancelled.is_set() and not self._is_needed(inflight):
                    self._drop(inflight)
                    while not inflight.ends[-1].query():  # its input buffers may be overwritten only then
                        yield None
                    raise Cancelled
                self._advance(inflight)
                yield None
            while not inflight.ends[-1].query():
                yield None
            self._inflight.remove(inflight)
        except GeneratorExit:
            self._orphan(inflight)
            raise

    def _advance(self, inflight: InflightForward) -> None:
        """Launch the next segment of this forward and of the orphans, where possible."""
        for orphan in self._orphans:
            if not orphan.launched:
                self._launch_if_ready(orphan)
        self._launch_if_ready(inflight)

    def _launch_if_ready(self, inflight: InflightForward) -> None:
        """Launch the next segment if the queue is short and the previous forward has launched it."""
        segment = len(inflight.ends)
        if segment >= MAX_QUEUED and not inflight.ends[segment - MAX_QUEUED].query():
            return
        previous = self._previous(inflight)
        if previous is None or len(previous.ends) > segment:
            self._launch(inflight)

    def _previous(self, inflight: InflightForward) -> InflightForward | None:
        index = self._inflight.index(inflight)
        return self._inflight[index - 1] if index else None

    def _launch(self, inflight: InflightForward) -> None:
        segment = len(inflight.ends)
        end = inflight.forward.launch(segment, self._last_end.get(segment), inflight.cancelled)
        inflight.ends.append(end)
        self._last_end[segment] = end

    def _is_needed(self, inflight: InflightForward) -> bool:
        """Whether a later forward that is not cancelled depends on this one's keys and values."""
        later = self._inflight[self._inflight.index(inflight) + 1 :]
        return any(other.begin > inflight.begin and not other.cancelled.is_set() for other in later)

    def _drop(self, inflight: InflightForward) -> None:
        """Stop a forward: its tokens are not in the cache."""
        self._inflight.remove(inflight)
        if inflight.current:
            del self._tokens[inflight.begin :]

    def _orphan(self, inflight: InflightForward) -> None:
        if inflight in self._inflight:
            inflight.cancelled = Always()
            self._orphans.append(inflight)

    def _sweep(self) -> None:
        """Remove the orphans that are completely launched, or that no other forward needs."""
        for orphan in reversed(self._orphans[:]):
            if orphan.launched:
                self._inflight.remove(orphan)
            elif not self._is_needed(orphan):
                self._drop(orphan)
            else:
                continue
            self._orphans.remove(orphan)
