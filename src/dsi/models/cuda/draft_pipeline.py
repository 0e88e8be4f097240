"""Back-to-back forwards on one stream: each is launched shortly before the previous one ends.

Not earlier: what is enqueued cannot be cancelled, and the next text would have to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from dsi.models.cuda.kv_cache import CudaForward, GpuEvent
from dsi.models.protocol import CancelFlag, Cancelled

LEAD = 0.00015  # seconds before the expected end of a segment at which the next is launched


class DraftPipeline:
    """Autoregressive draft forwards on one stream, without gaps between them.

    A cancelled forward is left to finish: whatever runs next on the stream overwrites all that it writes.
    """

    def __init__(self, forward: CudaForward, cancelled: CancelFlag, seconds: dict[int, float]) -> None:
        self._forward, self._cancelled = forward, cancelled
        self._seconds = seconds  # moving averages by segment, shared by all pipelines of a model
        self._segment = 0
        self._end: GpuEvent = forward.launch(0, None, cancelled)
        self._began = perf_counter()

    def finish(self, follower: CudaForward | None) -> Iterator[None]:
        """Yield until the forward has ended; by then the follower's first segment is launched."""
        while self._segment + 1 < self._forward.segments:
            yield from self._finish_segment(self._forward, self._segment + 1)
        yield from self._finish_segment(follower, 0)

    def _finish_segment(self, forward: CudaForward | None, segment: int) -> Iterator[None]:
        """Yield until the current segment has ended, and launch the given one after it."""
        launched: GpuEvent | None = None
        launch_time = self._began + self._seconds.get(self._segment, 0.0) - LEAD
        while not self._end.query():
            if self._cancelled.is_set():
                raise Cancelled
            if launched is None and forward is not None and perf_counter() > launch_time:
                launched = forward.launch(segment, None, self._cancelled)
            yield None
        if self._cancelled.is_set():
            raise Cancelled
        self._update_average()
        if forward is not None:
            self._end = launched or forward.launch(segment, None, self._cancelled)
            self._forward, self._segment = forward, segment

    def _update_average(self) -> None:
        now = perf_counter()
        average = self._seconds.setdefault(self._segment, now - self._began)
        self._seconds[self._segment] += (now - self._began - average) / 8
        self._began = now
