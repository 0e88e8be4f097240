"""A fleet in real time: one thread per server. For models that wait, or that leave the interpreter free."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from queue import SimpleQueue
from threading import Event as Signal
from threading import Thread

from dsi.core.messages import WOKEN, Drafted, Event, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import BaseFleet
from dsi.fleets.spans import Span, span
from dsi.fleets.worker import Server, work
from dsi.models.protocol import Cancelled

JOIN_SECONDS = 5.0


@cache
def timer_lateness() -> tuple[float, float]:
    """How late this machine's timer rings: a constant and a share of the wait, measured once.

    A wait stands for a forward, so the timer's own error is taken off each. What threads cost one
    another stays in: it is what a waited run is for. The least lateness seen counts, so that a busy
    moment does not make every later wait too short.
    """
    short, long = _lateness(0.002), _lateness(0.02)
    share = max(0.0, (long - short) / 0.018)
    return max(0.0, short - share * 0.002), share


def _lateness(seconds: float) -> float:
    signal, waits = Signal(), []
    for _ in range(6):
        began = time.perf_counter()
        signal.wait(seconds)
        waits.append(time.perf_counter() - began - seconds)
    return max(0.0, min(waits))


def on_time(seconds: float) -> float:
    """What to ask of the timer for a wait that ends on time."""
    late, share = timer_lateness()
    return max(0.0, seconds * (1 - share) - late)


class ThreadCancelFlag(Signal):
    """Set when an answer is no longer wanted. A wait in pieces notices only between two of them."""

    def __init__(self, cancel_points: int) -> None:
        super().__init__()
        self._cancel_points = cancel_points

    def wait(self, timeout: float | None = None) -> bool:
        seconds = timeout or 0.0
        if not self._cancel_points:
            return super().wait(on_time(seconds))
        for _ in range(self._cancel_points):
            time.sleep(on_time(seconds / self._cancel_points))
            if self.is_set():
                return True
        return False


class ThreadWorker:
    """A server at work in its own thread."""

    def __init__(self, server: Server, fleet: ThreadFleet) -> None:
        self.server = server
        self.fleet = fleet
        self.inbox: SimpleQueue[tuple[Job, ThreadCancelFlag] | None] = SimpleQueue()
        self.wish = ThreadCancelFlag(0)  # of the job at hand
        self.thread = Thread(target=self.serve, name=server.name, daemon=True)
        self.thread.start()

    def begin(self, job: Job, wish: ThreadCancelFlag) -> None:
        self.wish = wish
        self.inbox.put((job, wish))

    def dismiss(self) -> None:
        self.wish.set()
        self.inbox.put(None)

    def serve(self) -> None:
        while (order := self.inbox.get()) is not None:
            self.answer(*order)

    def answer(self, job: Job, wish: ThreadCancelFlag) -> None:
        """Post each guess as it comes; the last word on the job says that the server is free."""
        last: Event | None = None
        context, began = job.context, self.fleet.now()
        try:
            for event in work(job, self.server, wish):
                ended = self.fleet.now()
                self.record(job, context, began, ended, None if wish.is_set() else event)
                if wish.is_set():
                    break
                if isinstance(event, Drafted):
                    self.fleet.outbox.put((self.server.name, event, False))
                    context, began = context.then(event.token), ended
                else:
                    last = event
        except Cancelled:
            self.record(job, context, began, self.fleet.now(), None)
        self.fleet.outbox.put((self.server.name, last, True))

    def record(self, job: Job, context: TokenSequence, start: float, end: float, event: Event | None) -> None:
        self.fleet.usage[self.server.name].end(start, end, event)
        if self.fleet.log is not None:
            entry = span(self.server.name, self.server.role, job, context, start, end, event)
            self.fleet.log.append(entry)


class ThreadFleet(BaseFleet):
    """`pieces`: a cancelled wait ends at once (0), or when the current one of so many ends.

    An `eager` server that has answered takes the next waiting job at once, as a thread pool does, and
    not only after its answer has been handled, when that job may have gone stale.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        cancel_points: int = 0,
        thread_pool: bool = False,
        log: list[Span] | None = None,
    ) -> None:
        if cancel_points < 0:
            raise ValueError(f"cancel points {cancel_points}: must be at least 0")
        timer_lateness()  # before the clock starts
        self._began = time.perf_counter()
        self.outbox: SimpleQueue[tuple[str, Event | None, bool]] = SimpleQueue()
        self.log = log
        self._cancel_points, self._thread_pool = cancel_points, thread_pool
        super().__init__(servers)
        self._workers = {name: ThreadWorker(server, self) for name, server in self._servers.items()}

    def now(self) -> float:
        return time.perf_counter() - self._began

    def _assign(self, name: str, job: Job) -> None:
        self._workers[name].begin(job, ThreadCancelFlag(self._cancel_points))

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        self._workers[name].wish.set()

    def _on_worker_death(self, name: str) -> None:
        self._workers.pop(name).dismiss()

    def close(self) -> None:
        """Every server is gone: what is still open fails, and no thread is left."""
        seats = list(self._workers.values())
        super().close()
        for seat in seats:
            seat.thread.join(JOIN_SECONDS)

    def wake(self) -> None:
        self.outbox.put(("", WOKEN, False))

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._scheduler.working:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            name, event, free = self.outbox.get()
            if event is WOKEN:
                return WOKEN
            if name not in self._workers:
                continue  # the last word of a dead server
            if event is not None:
                self._events.append(event)
            if free:
                self._scheduler.release(name)
            if self._thread_pool or event is None:
                self._start_jobs()
        return self._events.popleft()
