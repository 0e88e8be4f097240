"""A fleet of threads, one per server: for models that wait instead of computing, or that release the GIL."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from queue import SimpleQueue
from threading import Event as Signal, Thread
from typing import Protocol

from dsi.core.messages import WOKEN, Drafted, DraftedLevel, Event, Job
from dsi.fleets.base import RealTimeFleet
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work
from dsi.models.protocol import Cancelled

JOIN_SECONDS = 5.0


@cache
def timer_lateness() -> tuple[float, float]:
    """Measure once how late this machine's timer fires: a constant, and a share of the wait.

    A wait stands for a forward, so the timer's own error is subtracted from each. What threads cost one another
    stays in: a waited run is there to show it. The smallest lateness counts, so that a busy moment does not make
    every later wait too short.
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
    """Return the timeout with which a wait of `seconds` ends on time."""
    late, share = timer_lateness()
    return max(0.0, seconds * (1 - share) - late)


class ThreadCancelFlag(Signal):
    """A cancel flag; a wait with `cancel_points` checks it only after each of so many equal parts."""

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
    """A server's thread, with its queue of jobs."""

    def __init__(self, server: Server, fleet: ThreadFleet) -> None:
        self.server = server
        self.fleet = fleet
        self.jobs: SimpleQueue[tuple[Job, ThreadCancelFlag] | None] = SimpleQueue()
        self.cancel_flag = ThreadCancelFlag(0)  # of the current job
        self.thread = Thread(target=self.run, name=server.name, daemon=True)
        self.thread.start()

    def start(self, job: Job, cancel_flag: ThreadCancelFlag) -> None:
        self.cancel_flag = cancel_flag
        self.jobs.put((job, cancel_flag))

    def cancel(self) -> None:
        self.cancel_flag.set()

    def stop(self) -> None:
        self.cancel_flag.set()
        self.jobs.put(None)

    def join(self) -> None:
        self.thread.join(JOIN_SECONDS)

    def run(self) -> None:
        while (item := self.jobs.get()) is not None:
            self.run_job(*item)

    def run_job(self, job: Job, cancel_flag: ThreadCancelFlag) -> None:
        """Post each draft token as it comes; the last message on a job says that the server is idle."""
        name, fleet = self.server.name, self.fleet
        last: Event | None = None
        context, start = job.context, fleet.now()
        try:
            for event in work(job, self.server, cancel_flag):
                end = fleet.now()
                cancelled = cancel_flag.is_set()
                fleet._record(name, job, context, start, end, None if cancelled else event)
                if cancelled:
                    break
                if isinstance(event, Drafted | DraftedLevel):
                    fleet.messages.put((self, event, False))
                    start = end
                    if isinstance(event, Drafted):
                        context = context.then(event.token)
                else:
                    last = event
        except Cancelled:
            fleet._record(name, job, context, start, fleet.now(), None)
        fleet.messages.put((self, last, True))


class Worker(Protocol):
    """What runs the jobs of one server."""

    @property
    def server(self) -> Server: ...
    def start(self, job: Job, cancel_flag: ThreadCancelFlag) -> None: ...
    def cancel(self) -> None: ...
    def stop(self) -> None: ...
    def join(self) -> None: ...


Message = tuple[Worker | None, Event | None, bool]  # what a worker returns, and whether it is idle; None: to wake


class ThreadFleet(RealTimeFleet):
    """With `cancel_points`, a cancelled wait ends at the next of so many; with 0, at once.

    With `thread_pool`, a server that has answered takes the next queued job at once, as a thread pool does;
    without, only after its answer was handled, which may have cancelled that job.
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
        super().__init__(servers, log)
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self._cancel_points, self._thread_pool = cancel_points, thread_pool
        self._workers: dict[str, Worker] = {}
        for name, server in self._servers.items():
            self._workers[name] = self._make_worker(server)

    def _make_worker(self, server: Server) -> Worker:
        return ThreadWorker(server, self)

    def _assign(self, name: str, job: Job) -> None:
        self._workers[name].start(job, ThreadCancelFlag(self._cancel_points))

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        self._workers[name].cancel()

    def _on_worker_death(self, name: str) -> None:
        self._workers.pop(name).stop()

    def close(self) -> None:
        """Kill every server and join the threads; all open jobs fail."""
        workers = list(self._workers.values())
        super().close()
        for worker in workers:
            worker.join()

    def wake(self) -> None:
        self.messages.put((None, WOKEN, False))

    def _wait_for_events(self) -> None:
        self._handle(*self.messages.get())

    def _handle(self, worker: Worker | None, event: Event | None, idle: bool) -> None:
        if worker is None:
            self._events.append(WOKEN)
        elif self._workers.get(worker.server.name) is worker:  # else it is the last message of a dead server
            if event is not None:
                self._events.append(event)
            if idle:
                self._scheduler.release(worker.server.name)
            if self._thread_pool or event is None:
                self._start_jobs()
