"""A fleet on GPUs: one thread polls the forwards in flight on all of them.

No thread has to be woken and no lock is contended: the next poll sees what a GPU has finished, and the GPU gets
its next forward before the last answer is handled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from dsi.core.messages import WOKEN, Draft, Drafted, Event, Failed, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import RealTimeFleet
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import poll_work
from dsi.models.protocol import Cancelled


class CudaCancelFlag:
    """A cancel flag that the polling thread itself sets."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def is_set(self) -> bool:
        return self.cancelled

    def wait(self, timeout: float) -> bool:
        """Sleep, for models that wait instead of computing."""
        time.sleep(timeout)
        return self.cancelled


class CudaWorker:
    """A server's current job, and the generator that computes it."""

    __slots__ = ("cancel_flag", "context", "events", "forward_start", "job", "remaining")

    def __init__(self, server: Server, job: Job, now: float) -> None:
        self.job, self.cancel_flag = job, CudaCancelFlag()
        self.events: Iterator[Event | None] = poll_work(job, server, self.cancel_flag)
        self.context: TokenSequence = job.context
        self.forward_start = now
        self.remaining = job.count if isinstance(job, Draft) else 1  # events to come

    def poll(self) -> tuple[Event | None, bool]:
        """Return the event that has come since the last poll, if any, and whether the server is idle."""
        try:
            event = next(self.events)
        except Cancelled:
            return None, True
        except StopIteration:  # with events to come only if an interrupt has ended the generator
            return (Failed(self.job.id, "interrupted") if self.remaining else None), True
        if event is None:
            return None, False
        last = not isinstance(event, Drafted)
        self.remaining = 0 if last else self.remaining - 1
        if last:
            next(self.events, None)  # runs what follows the last event
        return event, last


class CudaFleet(RealTimeFleet):
    """Polls models that compute on GPUs; any other model computes during its poll, and blocks the rest."""

    def __init__(self, servers: Iterable[Server], *, log: list[Span] | None = None) -> None:
        super().__init__(servers, log)
        self._workers: dict[str, CudaWorker] = {}

    def _assign(self, name: str, job: Job) -> None:
        self._workers[name] = CudaWorker(self._servers[name], job, self.now())
        self._poll(name)  # which launches the first forward

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        self._workers[name].cancel_flag.cancelled = True
        self._poll(name)  # a server that stops at once is idle for the next job

    def _on_worker_death(self, name: str) -> None:
        self._workers.pop(name, None)

    def wake(self) -> None:
        self._events.append(WOKEN)

    def _wait_for_events(self) -> None:
        for name in list(self._workers):
            self._poll(name)
        if not self._events and self._scheduler.changed:
            self._start_jobs()

    def _poll(self, name: str) -> None:
        worker = self._workers[name]
        event, idle = worker.poll()
        if worker.cancel_flag.cancelled:
            event = None
        if event is not None:
            self._events.append(event)
        if event is not None or (worker.cancel_flag.cancelled and idle):
            self._end_forward(name, worker, event)
        if idle:
            del self._workers[name]
            self._scheduler.release(name)

    def _end_forward(self, name: str, worker: CudaWorker, event: Event | None) -> None:
        now = self.now()
        self._record(name, worker.job, worker.context, worker.forward_start, now, event)
        if self.log is not None and isinstance(event, Drafted):
            worker.context = worker.context.then(event.token)
        worker.forward_start = now
