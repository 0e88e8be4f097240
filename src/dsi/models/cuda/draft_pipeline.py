"""One forward after another on one processor, without a gap: each is sent before the last one has ended.

Not long before: what is on its way cannot be called back, and the next text would have to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from dsi.models.cuda.kv_cache import CudaForward, Mark
from dsi.models.protocol import CancelFlag, Cancelled

LEAD = 0.00015  # seconds before the end of a piece at which the next is sent after it


class DraftPipeline:
    """A forward in a chain of them on one stream: the next piece is sent shortly before the last one ends.

    What nobody wants is left to itself: what comes next on the stream writes over all that it writes, even
    where it reads what was meant for that.
    """

    def __init__(self, forward: CudaForward, cancelled: CancelFlag, seconds: dict[int, float]) -> None:
        self._forward, self._cancelled = forward, cancelled
        self._seconds = seconds  # what each piece took lately, for all chains of a model
        self._piece = 0
        self._end: Mark = forward.launch(0, None, cancelled)
        self._began = perf_counter()

    def ended(self, follower: CudaForward | None) -> Iterator[None]:
        """Look again after each None; when it has ended, the first piece of its follower is on its way."""
        while self._piece + 1 < self._forward.segments:
            yield from self._piece_ended(self._forward, self._piece + 1)
        yield from self._piece_ended(follower, 0)

    def _piece_ended(self, forward: CudaForward | None, piece: int) -> Iterator[None]:
        """Wait for it, and send this one after it."""
        after: Mark | None = None
        late = self._began + self._seconds.get(self._piece, 0.0) - LEAD
        while not self._end.query():
            if self._cancelled.is_set():
                raise Cancelled
            if after is None and forward is not None and perf_counter() > late:
                after = forward.launch(piece, None, self._cancelled)
            yield None
        if self._cancelled.is_set():
            raise Cancelled
        self._time()
        if forward is not None:
            self._end = after or forward.launch(piece, None, self._cancelled)
            self._forward, self._piece = forward, piece

    def _time(self) -> None:
        now = perf_counter()
        took = self._seconds.setdefault(self._piece, now - self._began)
        self._seconds[self._piece] += (now - self._began - took) / 8
        self._began = now
