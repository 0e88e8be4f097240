"""Fleets whose workers answer over sockets, in processes or on other machines: messages, deaths, replacements.

A worker that is silent at work for too long counts as dead, and a dead one is replaced.
"""

from __future__ import annotations

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any

from dsi.core.messages import TARGET, WOKEN, Draft, Drafted, Failed, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import DIED, HUNG, NOT_STARTED, RealTimeFleet
from dsi.fleets.connection import READ_BYTES, Connection, JobEncoder, decode_event, encode_event
from dsi.fleets.hang_limits import HangLimits
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work
from dsi.fleets.worker_restarts import WorkerRestarts
from dsi.models.protocol import Cancelled

log = logging.getLogger("dsi.fleets")

NO_JOB = -1  # an id that no job has
POLL_SECONDS = 0.0005
CHECK_SECONDS = 0.25  # between two checks for workers that are silent
SEND_SECONDS = 5.0  # for a worker to take a job
BATCH_SECONDS = 0.0015  # draft tokens of a block that come faster than this travel together: messages cost the driver

Forward = tuple[tuple[Any, ...] | None, float, float]  # its encoded event, None if cancelled; its start and end


class SharedCancelFlag:
    """A cancel flag for one job: set when `cancelled_id`, a shared number, holds the job's id."""

    def __init__(self, cancelled_id: Any, job: int) -> None:
        self._cancelled_id, self._job = cancelled_id, job

    def is_set(self) -> bool:
        return bool(self._cancelled_id.value == self._job)

    def wait(self, timeout: float) -> bool:
        """Poll the flag, for models that wait instead of computing."""
        end = time.perf_counter() + timeout
        while (left := end - time.perf_counter()) > 0:
            if self.is_set():
                return True
            time.sleep(min(left, POLL_SECONDS))
        return self.is_set()


def run_job(job: Job, server: Server, connection: Connection, cancel_flag: SharedCancelFlag) -> None:
    """Run a job on a worker and send its forwards; the last message says that the server is idle.

    Each message names its job, so that a late or repeated one is recognised.
    """
    forwards: list[Forward] = []
    start = sent = time.perf_counter()
    batch = job.first_block if isinstance(job, Draft) else 1
    try:
        for event in work(job, server, cancel_flag):
            end = time.perf_counter()
            forwards.append((encode_event(event), start, end))
            start = end
            if cancel_flag.is_set():
                break
            if isinstance(job, Draft) and (end - sent > BATCH_SECONDS or len(forwards) >= batch):
                connection.send((job.id, forwards, False))
                forwards, sent, batch = [], end, job.block_size
    except Cancelled:
        forwards.append((None, start, time.perf_counter()))
    connection.send((job.id, forwards, True))


class WorkerHandle(ABC):
    """The fleet's side of a worker: its connection and its current job."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self.server, self.connection = server, connection
        self.encoder = JobEncoder()
        self.job: Job | None = None
        self.context = TokenSequence.of(())  # of its current forward
        self.clock_offset = 0.0  # this machine's clock less the worker's
        self.num_new = 0  # tokens that its current forward computes
        self.silence = 0.0  # seconds at work without a message

    def start(self, job: Job, num_new: int) -> None:
        self.job, self.context, self.num_new, self.silence = job, job.context, num_new, 0.0
        self.connection.send(self.encoder.encode(job))

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Tell the worker that its job is cancelled."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker and close its connection."""

    @property
    def ending(self) -> str:
        """How a worker that was not told to has ended."""
        return "its connection was closed"


class RemoteFleet(RealTimeFleet):
    """Exchanges messages with workers, and has a subclass replace those that die.

    A worker counts as dead after `hang_seconds` of silence at work; without it, after a multiple of the slowest
    forward seen.
    """

    def __init__(
        self, servers: Iterable[Server], restart: bool, hang_seconds: float | None, log: list[Span] | None
    ) -> None:
        super().__init__(servers, log)
        self._restarts = WorkerRestarts(restart)
        self._hang_limits = HangLimits(hang_seconds)
        self._checked_at = time.perf_counter()
        self._selector = DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()  # written by other threads
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, EVENT_READ, None)
        self._workers: dict[str, Any] = {}

    def expect_forward(self, role: str, seconds: float) -> None:
        """Forwards of this role take about so long: a worker that hangs in the first one is noticed sooner."""
        self._hang_limits.expect(role, seconds)

    def _wait_for_messages(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        """Wait until a socket is readable; return those that are."""
        return self._selector.select(timeout)

    @abstractmethod
    def _replace_dead_worker(self, name: str) -> None:
        """Start another worker for a server whose worker has died, or raise OSError."""

    def _add_worker(self, worker: WorkerHandle) -> None:
        self._workers[worker.server.name] = worker
        self._selector.register(worker.connection, EVENT_READ, worker.server.name)

    def _will_restart(self, name: str) -> bool:
        """Jobs wait for a target's replacement, but not for a drafter's: texts go on without it."""
        return self._restarts.enabled and self._servers[name].role == TARGET

    def _on_worker_death(self, name: str) -> None:
        worker = self._workers.pop(name)
        self._selector.unregister(worker.connection)
        worker.kill()
        self._restarts.on_death(name, time.perf_counter())

    def kill(self, name: str, cause: str = DIED) -> None:
        worker: WorkerHandle = self._workers.get(name)  # type: ignore[assignment]
        super().kill(name, cause)
        self._report(name, cause, worker.ending if cause == DIED else f"silent at work for {worker.silence:.1f} s")
        self._replace_due()

    def _report(self, name: str, cause: str, detail: str) -> None:
        log.warning("server %s: %s", name, detail, extra={"server": name, "cause": cause})

    def _replace_due(self) -> None:
        """Replace the dead workers whose pause is over."""
        for name in self._restarts.take_due(time.perf_counter()):
            try:
                self._replace_dead_worker(name)
            except OSError as error:  # no memory, or no file descriptors
                self._restarts.on_death(name, time.perf_counter())
                self._count_death(name, NOT_STARTED)
                self._report(name, NOT_STARTED, f"cannot be started ({error.strerror})")
            else:
                self.restarts[name] += 1

    def check_workers(self) -> None:
        self._handle(self._selector.select(0))
        self._drop_and_replace()

    def _drop_and_replace(self) -> None:
        """Drop overdue workers every so often, replace those whose pause is over, and start what waited for them."""
        now = time.perf_counter()
        if now - self._checked_at >= CHECK_SECONDS:
            # If this process itself was stopped or suspended, that is nobody's silence.
            elapsed, self._checked_at = min(now - self._checked_at, 2 * CHECK_SECONDS), now
            self._drop_overdue(elapsed)
        if now >= self._restarts.next_due:
            self._replace_due()
        if not self._events:
            self._start_jobs()

    def _drop_overdue(self, elapsed: float) -> None:
        """Kill the workers that have been silent at work for too long."""
        for name in self._names_at_work():
            worker = self._workers[name]
            worker.silence += elapsed
            if worker.silence > self._hang_limits.seconds(worker.server.role, worker.num_new):
                self.kill(name, HUNG)

    def _names_at_work(self) -> list[str]:
        """The servers whose workers have a job."""
        return list(self._scheduler.running)

    def _assign(self, name: str, job: Job) -> None:
        try:
            self._workers[name].start(job, self._scheduler.num_new(name, job))
        except OSError:  # it died unnoticed, or takes no message
            self.kill(name)

    def _cancel_job(self, name: str, id: int) -> None:
        self._workers[name].cancel(id)

    def close(self) -> None:
        """Kill every worker; all open jobs fail."""
        self._restarts.enabled = False
        super().close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # a wake-up is pending already
            self._wake_sender.send(b".")

    def _wait_for_events(self) -> None:
        timeout = min(CHECK_SECONDS, max(0.0, self._restarts.next_due - time.perf_counter()))
        self._handle(self._wait_for_messages(timeout))
        self._drop_and_replace()

    def _handle(self, readable: list[tuple[SelectorKey, int]]) -> None:
        for key, _ in readable:
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(READ_BYTES)
                if not self._events or self._events[-1] is not WOKEN:  # nobody takes events while no job runs
                    self._events.append(WOKEN)
            elif key.data in self._workers and self._workers[key.data].connection is key.fileobj:
                self._on_messages(key.data)
            else:
                self._on_other_socket(key)

    def _on_other_socket(self, key: SelectorKey) -> None:
        """Handle a readable socket that belongs to no worker."""

    def _on_messages(self, name: str) -> None:
        worker = self._workers[name]
        worker.silence = 0.0
        try:
            messages = worker.connection.read_once()
        except (EOFError, OSError):
            self.kill(name)
            return
        for id, forwards, idle in messages:
            self._restarts.on_answer(name)
            if worker.job is None or worker.job.id != id:
                continue  # repeated
            for forward in forwards:
                self._on_forward(worker, worker.job, *forward)
            if idle:
                worker.job = None
                self._scheduler.release(name)
        if not self._events:
            self._start_jobs()

    def _on_forward(
        self, worker: WorkerHandle, job: Job, encoded: tuple[Any, ...] | None, start: float, end: float
    ) -> None:
        event = None if encoded is None else decode_event(encoded, job.id)
        offset = worker.clock_offset - self._clock_start
        self._record(worker.server.name, job, worker.context, start + offset, end + offset, event)
        if event is not None:
            self._events.append(event)
            if not isinstance(event, Failed):
                self._hang_limits.observe(worker.server.role, worker.num_new, end - start)
        if isinstance(event, Drafted):
            worker.context, worker.num_new = worker.context.then(event.token), 1
