"""Servers at the other end of a wire, in processes or on other machines: what such fleets do alike."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any

from dsi.core.messages import WOKEN, Drafted, Event, Job
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import BaseFleet
from dsi.fleets.connection import READ, Connection, Sender, pack_event, unpack_event
from dsi.fleets.spans import Span, span
from dsi.fleets.worker import Server, work
from dsi.models.protocol import Cancelled

NOTHING = -1  # the id of no job
RESTARTS = 5  # of one server without an answer between them, after which it stays dead
POLL_SECONDS = 0.0005
GATHER_SECONDS = 0.0015  # guesses that come faster than this travel together: each message costs the driver

Forward = tuple[tuple[Any, ...] | None, float, float]  # how it ended, when it began and when it ended


class SharedCancelFlag:
    """Whether the job at hand is still wanted: `unwanted` is a number that somebody else writes."""

    def __init__(self, unwanted: Any, job: int) -> None:
        self._unwanted, self._job = unwanted, job

    def is_set(self) -> bool:
        return bool(self._unwanted.value == self._job)

    def wait(self, timeout: float) -> bool:
        """For models that wait instead of computing."""
        end = time.perf_counter() + timeout
        while (left := end - time.perf_counter()) > 0:
            if self.is_set():
                return True
            time.sleep(min(left, POLL_SECONDS))
        return self.is_set()


def answer(job: Job, server: Server, wire: Connection, flag: SharedCancelFlag) -> None:
    """Send guesses as they come; the last word on the job says that the server is free.

    Each message says which job it is about: one that comes late, or twice, is known by it.
    """
    gathered: list[Forward] = []
    began = sent = time.perf_counter()
    try:
        for event in work(job, server, flag):
            ended = time.perf_counter()
            gathered.append((pack_event(event), began, ended))
            began = ended
            if flag.is_set():
                break
            if ended - sent > GATHER_SECONDS and isinstance(event, Drafted):
                wire.send((job.id, gathered, False))
                gathered, sent = [], ended
    except Cancelled:
        gathered.append((None, began, time.perf_counter()))
    wire.send((job.id, gathered, True))


class WorkerHandle:
    """A server as its fleet knows it: this end of its wire, and what it is at."""

    def __init__(self, server: Server, wire: Connection) -> None:
        self.server, self.wire = server, wire
        self.sender = Sender()
        self.job: Job | None = None
        self.context: TokenSequence | None = None  # what its current forward is about
        self.ahead = 0.0  # of its clock is ours

    def begin(self, job: Job) -> None:
        self.job, self.context = job, job.context
        self.wire.send(self.sender.pack(job))

    @abstractmethod
    def stop(self, id: int) -> None:
        """Its job is not wanted any longer."""

    @abstractmethod
    def dismiss(self) -> None:
        """It is gone, whatever it was doing."""


class RemoteFleet(BaseFleet):
    def __init__(self, servers: Iterable[Server], restart: bool, log: list[Span] | None) -> None:
        super().__init__(servers)
        self._restart = restart
        self._began = time.perf_counter()
        self.log = log
        self._fruitless: dict[str, int] = {}  # deaths of each server since its last answer
        self._selector = DefaultSelector()
        self._bell, self._ringer = socket.socketpair()  # which other threads wake this one by
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, EVENT_READ, None)
        self._workers: dict[str, Any] = {}

    @abstractmethod
    def _listen(self) -> list[tuple[SelectorKey, int]]:
        """What there is to hear; waits for it."""

    def _greet(self, seat: WorkerHandle) -> None:
        self._workers[seat.server.name] = seat
        self._selector.register(seat.wire, EVENT_READ, seat.server.name)

    def _comes_again(self, name: str) -> bool:
        """Another takes its place, unless it keeps dying."""
        return self._restart and self._fruitless.get(name, 0) < RESTARTS

    def _part(self, name: str) -> None:
        seat = self._workers.pop(name)
        self._selector.unregister(seat.wire)
        seat.dismiss()
        self._fruitless[name] = self._fruitless.get(name, 0) + 1

    def now(self) -> float:
        return time.perf_counter() - self._began

    def _assign(self, name: str, job: Job) -> None:
        try:
            self._workers[name].begin(job)
        except OSError:  # it died and has not been noticed yet
            self.kill(name)

    def _cancel_job(self, name: str, id: int) -> None:
        self._workers[name].stop(id)

    def close(self) -> None:
        """Every server is gone: what is still open fails."""
        self._restart = False
        super().close()
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            self._ringer.send(b".")

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._scheduler.working and not self._scheduler.away:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            for key, _ in self._listen():
                if key.fileobj is self._bell:
                    self._bell.recv(READ)
                    self._events.append(WOKEN)
                elif key.data in self._workers and self._workers[key.data].wire is key.fileobj:
                    self._hear(key.data)
                else:
                    self._hear_other(key)
        return self._events.popleft()

    def _hear_other(self, key: SelectorKey) -> None:
        """Somebody who has no seat, or has it no longer."""

    def _hear(self, name: str) -> None:
        seat = self._workers[name]
        try:
            messages = seat.wire.take()
        except (EOFError, OSError):
            self.kill(name)
            return
        for id, forwards, free in messages:
            self._fruitless.pop(name, None)
            if seat.job is None or seat.job.id != id:
                continue  # it has said so before
            for forward in forwards:
                self._take(seat, *forward)
            if free:
                seat.job = None
                self._scheduler.release(name)
        if not self._events:
            self._start_jobs()

    def _take(self, seat: WorkerHandle, packed: tuple[Any, ...] | None, start: float, end: float) -> None:
        job = seat.job
        if job is None:
            return
        event = None if packed is None else unpack_event(packed, job.id)
        since = seat.ahead - self._began
        self._record(seat, event, start + since, end + since)
        if event is not None:
            self._events.append(event)
        if isinstance(event, Drafted) and seat.context is not None:
            seat.context = seat.context.then(event.token)

    def _record(self, seat: WorkerHandle, event: Event | None, start: float, end: float) -> None:
        server, job = seat.server, seat.job
        self.usage[server.name].end(start, end, event)
        if self.log is not None and job is not None and seat.context is not None:
            self.log.append(span(server.name, server.role, job, seat.context, start, end, event))
