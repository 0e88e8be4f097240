"""A fleet of servers that compute elsewhere, on GPUs, and one thread that looks at each of them in turn.

No thread has to be woken and no lock to be waited for: what a GPU has finished is seen at the next look, and
it has its next work before anybody hears of the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from dsi.core.messages import WOKEN, Draft, Drafted, Event, Failed, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import BaseFleet
from dsi.fleets.spans import Span, span
from dsi.fleets.worker import Server, steps
from dsi.models.protocol import Cancelled


class CudaCancelFlag:
    """Set when an answer is no longer wanted."""

    __slots__ = ("gone",)

    def __init__(self) -> None:
        self.gone = False

    def is_set(self) -> bool:
        return self.gone

    def wait(self, timeout: float) -> bool:
        """For models that wait instead of computing."""
        time.sleep(timeout)
        return self.gone


class CudaWorker:
    """A server at a job."""

    __slots__ = ("began", "context", "job", "left", "server", "steps", "wish")

    def __init__(self, server: Server, job: Job, now: float) -> None:
        self.server, self.job, self.wish = server, job, CudaCancelFlag()
        self.steps: Iterator[Event | None] = steps(job, server, self.wish)
        self.context: TokenSequence = job.context
        self.began = now
        self.left = job.count if isinstance(job, Draft) else 1  # events to come

    def look(self) -> tuple[Event | None, bool]:
        """What has come of it since the last look, and whether the server is free."""
        try:
            event = next(self.steps)
        except Cancelled:
            return None, True
        except StopIteration:  # before its last word only if an interrupt has ended it
            return (Failed(self.job.id, "interrupted") if self.left else None), True
        if event is None:
            return None, False
        last = not isinstance(event, Drafted)
        self.left = 0 if last else self.left - 1
        if last:
            next(self.steps, None)  # it has nothing more to say
        return event, last


class CudaFleet(BaseFleet):
    """For models that can be polled; any other computes while it is looked at, and the rest waits."""

    def __init__(self, servers: Iterable[Server], *, log: list[Span] | None = None) -> None:
        self._began = time.perf_counter()
        self.log = log
        super().__init__(servers)
        self._workers: dict[str, CudaWorker] = {}

    def now(self) -> float:
        return time.perf_counter() - self._began

    def _assign(self, name: str, job: Job) -> None:
        seat = self._workers[name] = CudaWorker(self._servers[name], job, self.now())
        self._look(name, seat)  # which sets it to work

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        seat = self._workers[name]
        seat.wish.gone = True
        self._look(name, seat)  # if it can stop at once, it is free for what is asked of it next

    def _on_worker_death(self, name: str) -> None:
        self._workers.pop(name, None)

    def wake(self) -> None:
        self._events.append(WOKEN)

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._scheduler.working:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            for name, seat in list(self._workers.items()):
                self._look(name, seat)
            if not self._events and self._scheduler.changed:
                self._start_jobs()
        return self._events.popleft()

    def _look(self, name: str, seat: CudaWorker) -> None:
        event, free = seat.look()
        wanted = not seat.wish.gone
        if event is not None and wanted:
            self._events.append(event)
        if event is not None or not wanted:
            self._record(seat, event if wanted else None, free)
        if free:
            del self._workers[name]
            self._scheduler.release(name)

    def _record(self, seat: CudaWorker, event: Event | None, free: bool) -> None:
        if event is None and not free:
            return  # it has not come to a halt
        now = self.now()
        self.usage[seat.server.name].end(seat.began, now, event)
        if self.log is not None:
            self._write(self.log, seat, event, now)
        seat.began = now

    def _write(self, log: list[Span], seat: CudaWorker, event: Event | None, now: float) -> None:
        server = seat.server
        if now > seat.began:
            log.append(span(server.name, server.role, seat.job, seat.context, seat.began, now, event))
        if isinstance(event, Drafted):
            seat.context = seat.context.then(event.token)
