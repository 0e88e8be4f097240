"""Fleets whose workers answer over sockets, in processes or on other machines: messages, deaths, replacements."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any

from dsi.core.messages import WOKEN, Drafted, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import RealTimeFleet
from dsi.fleets.connection import READ_BYTES, Connection, JobEncoder, decode_event, encode_event
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work
from dsi.fleets.worker_restarts import WorkerRestarts
from dsi.models.protocol import Cancelled

NO_JOB = -1  # an id that no job has
POLL_SECONDS = 0.0005
BATCH_SECONDS = 0.0015  # draft tokens that come faster than this travel together: each message costs the driver

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
    try:
        for event in work(job, server, cancel_flag):
            end = time.perf_counter()
            forwards.append((encode_event(event), start, end))
            start = end
            if cancel_flag.is_set():
                break
            if end - sent > BATCH_SECONDS and isinstance(event, Drafted):
                connection.send((job.id, forwards, False))
                forwards, sent = [], end
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

    def start(self, job: Job) -> None:
        self.job, self.context = job, job.context
        self.connection.send(self.encoder.encode(job))

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Tell the worker that its job is cancelled."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker and close its connection."""


class RemoteFleet(RealTimeFleet):
    """Exchanges messages with workers, and has a subclass replace those that die."""

    def __init__(self, servers: Iterable[Server], restart: bool, log: list[Span] | None) -> None:
        super().__init__(servers, log)
        self._restarts = WorkerRestarts(self._replace_dead_worker, restart)
        self._selector = DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()  # written by other threads
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, EVENT_READ, None)
        self._workers: dict[str, Any] = {}

    @abstractmethod
    def _wait_for_messages(self) -> list[tuple[SelectorKey, int]]:
        """Block until a socket is readable; return those that are."""

    @abstractmethod
    def _replace_dead_worker(self, name: str) -> None:
        """Start another worker for a server whose worker has died."""

    def _add_worker(self, worker: WorkerHandle) -> None:
        self._workers[worker.server.name] = worker
        self._selector.register(worker.connection, EVENT_READ, worker.server.name)

    def _on_worker_death(self, name: str) -> None:
        worker = self._workers.pop(name)
        self._selector.unregister(worker.connection)
        worker.kill()
        self._restarts.on_death(name)

    def _assign(self, name: str, job: Job) -> None:
        try:
            self._workers[name].start(job)
        except OSError:  # it died unnoticed
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
        for key, _ in self._wait_for_messages():
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(READ_BYTES)
                self._events.append(WOKEN)
            elif key.data in self._workers and self._workers[key.data].connection is key.fileobj:
                self._on_messages(key.data)
            else:
                self._on_other_socket(key)

    def _on_other_socket(self, key: SelectorKey) -> None:
        """Handle a readable socket that belongs to no worker."""

    def _on_messages(self, name: str) -> None:
        worker = self._workers[name]
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
        if isinstance(event, Drafted):
            worker.context = worker.context.then(event.token)
