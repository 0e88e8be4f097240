"""A fleet of processes: one per server, on its own cores, all sharing one copy of the weights.

The servers' models are loaded before the fleet starts; the processes are forked from this one, so that
the weights are the same pages of memory in all of them. A process that dies is noticed, its job goes
elsewhere, and it is started again. When this process goes, they go.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from selectors import SelectorKey
from typing import Any

from dsi.core.messages import TARGET
from dsi.fleets.connection import Connection, Receiver
from dsi.fleets.remote import NOTHING, RemoteFleet, SharedCancelFlag, WorkerHandle, answer
from dsi.fleets.spans import Span
from dsi.fleets.worker import Server
from dsi.models.child_process import close_other_fds, die_with_parent

FORK = multiprocessing.get_context("fork")
JOIN_SECONDS = 2.0
AWAKE_SECONDS = 0.05  # that the driver may spin for an answer; in a longer wait, waking up is nothing


def serve(
    server: Server, wire: Connection, unwanted: Any, cores: Sequence[int], prepare: Callable[[Server], None]
) -> None:
    """The life of a server process."""
    die_with_parent()
    close_other_fds(wire.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    if cores:
        os.sched_setaffinity(0, cores)
    prepare(server)
    receiver = Receiver()
    while True:
        try:
            for message in wire.receive():
                job = receiver.unpack(message)
                answer(job, server, wire, SharedCancelFlag(unwanted, job.id))
        except (EOFError, OSError):
            return


class Process(WorkerHandle):
    """A server in its process."""

    def __init__(self, server: Server, cores: Sequence[int], prepare: Callable[[Server], None]) -> None:
        ours, theirs = Connection.pair()
        super().__init__(server, ours)
        self.unwanted = FORK.RawValue("q", NOTHING)
        arguments = (server, theirs, self.unwanted, cores, prepare)
        self.process = FORK.Process(target=serve, args=arguments, name=server.name, daemon=True)
        self.process.start()
        theirs.close()

    def stop(self, id: int) -> None:
        self.unwanted.value = id

    def dismiss(self) -> None:
        self.process.kill()
        self.process.join(JOIN_SECONDS)
        self.wire.close()


class ProcessFleet(RemoteFleet):
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
        super().__init__(servers, restart, log)
        self._cores, self._prepare = cores or {}, prepare
        self._targets = [name for name, server in self._servers.items() if server.role == TARGET]
        for name in self._servers:
            self._seat(name)

    def _seat(self, name: str) -> None:
        self._greet(Process(self._servers[name], self._cores.get(name, ()), self._prepare))

    def _on_worker_death(self, name: str) -> None:
        again = self._comes_again(name)
        self._part(name)
        if again:
            self._seat(name)
            self._scheduler.add(name, self._servers[name].role)

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
        taken = (*self._scheduler.working, *self._targets)
        return cores.difference(*(self._cores.get(name, cores) for name in taken))
