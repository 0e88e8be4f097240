"""A fleet of processes: one per server, on its own cores, all sharing one copy of the weights.

The servers' models are loaded before the fleet starts; the processes are forked from this one, so that
the weights are the same pages of memory in all of them. A process that dies is noticed, its job goes
elsewhere, and it is started again. When this process goes, they go.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any

from dsi.core.context import Context
from dsi.core.dispatch import Dispatch
from dsi.core.messages import TARGET, WOKEN, Drafted, Event, Job
from dsi.fleets.spans import Span, span
from dsi.fleets.wire import READ, Receiver, Sender, Wire, pack_event, unpack_event
from dsi.fleets.work import Server, by_name, work
from dsi.kin import die_with_parent, keep_only
from dsi.models.backend import Cancelled

FORK = multiprocessing.get_context("fork")
NOTHING = -1  # the id of no job
RESTARTS = 5  # of one server without an answer between them, after which it stays dead
POLL_SECONDS = 0.0005
JOIN_SECONDS = 2.0
AWAKE_SECONDS = 0.05  # that the driver may spin for an answer; in a longer wait, waking up is nothing

GATHER_SECONDS = 0.0015  # guesses that come faster than this travel together: each message costs the driver

Forward = tuple[tuple[Any, ...] | None, float, float]  # how it ended, when it began and when it ended


class SharedFlag:
    """Whether the job at hand is still wanted: a number in memory that both processes see."""

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


def serve(
    server: Server, wire: Wire, unwanted: Any, cores: Sequence[int], prepare: Callable[[Server], None]
) -> None:
    """The life of a server process."""
    die_with_parent()
    keep_only(wire.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    if cores:
        os.sched_setaffinity(0, cores)
    prepare(server)
    receiver = Receiver()
    while True:
        try:
            for message in wire.receive():
                job = receiver.unpack(message)
                _answer(job, server, wire, SharedFlag(unwanted, job.id))
        except (EOFError, OSError):
            return


def _answer(job: Job, server: Server, wire: Wire, flag: SharedFlag) -> None:
    """Send guesses as they come; the last word on the job says that the server is free."""
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
                wire.send((gathered, False))
                gathered, sent = [], ended
    except Cancelled:
        gathered.append((None, began, time.perf_counter()))
    wire.send((gathered, True))


class Seat:
    """A server in its process, and this end of its wire."""

    def __init__(self, server: Server, cores: Sequence[int], prepare: Callable[[Server], None]) -> None:
        self.server = server
        self.wire, theirs = Wire.pair()
        self.unwanted = FORK.RawValue("q", NOTHING)
        self.sender = Sender()
        self.job: Job | None = None
        self.context: Context | None = None  # what its current forward is about
        arguments = (server, theirs, self.unwanted, cores, prepare)
        self.process = FORK.Process(target=serve, args=arguments, name=server.name, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        self.job, self.context = job, job.context
        self.wire.send(self.sender.pack(job))

    def dismiss(self) -> None:
        self.process.kill()
        self.process.join(JOIN_SECONDS)
        self.wire.close()


class ProcessFleet:
    """`cores` pins servers by name; `prepare` runs first in each process (threads, say)."""

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        cores: Mapping[str, Sequence[int]] | None = None,
        prepare: Callable[[Server], None] = lambda _: None,
        restart: bool = True,
        log: list[Span] | None = None,
    ) -> None:
        self._began = time.perf_counter()
        self.log = log
        self.deaths: dict[str, int] = {}  # of each server, so far
        self._fruitless: dict[str, int] = {}  # since its last answer
        self._cores, self._prepare, self._restart = cores or {}, prepare, restart
        self._servers = by_name(servers)
        self._targets = [name for name, server in self._servers.items() if server.role == TARGET]
        self.busy = dict.fromkeys(self._servers, 0.0)
        self._dispatch = Dispatch({name: server.role for name, server in self._servers.items()})
        self._ready: deque[Event] = deque()
        self._selector = DefaultSelector()
        self._bell, self._ringer = socket.socketpair()  # which other threads wake this one by
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, EVENT_READ, None)
        self._seats: dict[str, Seat] = {}
        for name in self._servers:
            self._seat(name)

    def _seat(self, name: str) -> None:
        seat = self._seats[name] = Seat(self._servers[name], self._cores.get(name, ()), self._prepare)
        self._selector.register(seat.wire, EVENT_READ, name)

    def members(self) -> list[tuple[str, str, bool]]:
        """Every server there ever was: its name, its role, and whether it lives."""
        return [(name, each.role, name in self._seats) for name, each in self._servers.items()]

    def now(self) -> float:
        return time.perf_counter() - self._began

    def start(self, job: Job) -> None:
        self._dispatch.offer(job)
        self._begin()

    def promote(self, id: int) -> None:
        self._dispatch.promote(id)

    def cancel(self, id: int) -> None:
        for name in self._dispatch.withdraw(id):
            self._seats[name].unwanted.value = id

    def kill(self, name: str) -> None:
        """The server dies now, whatever it was doing."""
        self._bury(name)

    def close(self) -> None:
        """Every server is gone: what is still open fails, and no process is left."""
        self._restart = False
        for name in list(self._seats):
            self._bury(name)
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            self._ringer.send(b".")

    def next_event(self) -> Event:
        self._begin()
        while not self._ready:
            if not self._dispatch.working:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            for key, _ in self._listen():
                if key.fileobj is self._bell:
                    self._bell.recv(READ)
                    self._ready.append(WOKEN)
                elif key.data in self._seats and self._seats[key.data].wire is key.fileobj:
                    self._hear(key.data)
        return self._ready.popleft()

    def _listen(self) -> list[tuple[SelectorKey, int]]:
        """Awake while some core has nothing to do: waking up takes longer than handling an answer."""
        mine = os.sched_getaffinity(0)
        if free := self._free_among(mine):
            os.sched_setaffinity(0, free)
            try:
                end = time.perf_counter() + AWAKE_SECONDS
                while time.perf_counter() < end:
                    if heard := self._selector.select(0):
                        return heard
            finally:
                os.sched_setaffinity(0, mine)
        return self._selector.select()

    def _free_among(self, cores: set[int]) -> set[int]:
        """Nobody's at this moment, and no target's: a target should find its own core empty."""
        taken = (*self._dispatch.working, *self._targets)
        return cores.difference(*(self._cores.get(name, cores) for name in taken))

    def _hear(self, name: str) -> None:
        seat = self._seats[name]
        try:
            messages = seat.wire.receive()
        except (EOFError, OSError):
            self._bury(name)
            return
        for forwards, free in messages:
            self._fruitless.pop(name, None)
            for forward in forwards:
                self._take(seat, *forward)
            if free:
                self._dispatch.release(name)
        if not self._ready:
            self._begin()

    def _take(self, seat: Seat, packed: tuple[Any, ...] | None, start: float, end: float) -> None:
        job = seat.job
        if job is None:
            return
        event = None if packed is None else unpack_event(packed, job.id)
        self._record(seat, event, start - self._began, end - self._began)
        if event is not None:
            self._ready.append(event)
        if isinstance(event, Drafted) and seat.context is not None:
            seat.context = seat.context.then(event.token)

    def _begin(self) -> None:
        """Start what can be started: servers that have answered take part once the answer is handled."""
        for name, job in self._dispatch.assign():
            try:
                self._seats[name].begin(job)
            except OSError:  # it died and has not been noticed yet
                self._bury(name)
        self._ready.extend(self._dispatch.stranded())

    def _bury(self, name: str) -> None:
        """A dead server's job fails; a new process takes its place, unless it keeps dying."""
        self._dispatch.remove(name)
        seat = self._seats.pop(name)
        self._selector.unregister(seat.wire)
        seat.dismiss()
        self._ready.extend(self._dispatch.stranded())
        self.deaths[name] = self.deaths.get(name, 0) + 1
        self._fruitless[name] = self._fruitless.get(name, 0) + 1
        if self._restart and self._fruitless[name] <= RESTARTS:
            self._seat(name)
            self._dispatch.add(name, self._servers[name].role)

    def _record(self, seat: Seat, event: Event | None, start: float, end: float) -> None:
        server, job = seat.server, seat.job
        self.busy[server.name] += end - start
        if self.log is not None and job is not None and seat.context is not None:
            self.log.append(span(server.name, server.role, job, seat.context, start, end, event))
