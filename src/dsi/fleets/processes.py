"""A fleet of processes, one per server on its own cores, all sharing one copy of the weights.

The models are loaded before the fleet starts, and the workers are forked, so that they share the memory pages of the
weights. A worker that dies is detected and replaced, and its job fails, to run elsewhere. Workers die with this
process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_bool
from pathlib import Path
from selectors import SelectorKey
from typing import Any

from dsi.core.messages import TARGET, Job, Prefill
from dsi.fleets.connection import Connection, JobDecoder
from dsi.fleets.remote import NO_JOB, SEND_SECONDS, RemoteFleet, SharedCancelFlag, WorkerHandle, run_job
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.models.process_utils import close_other_fds, die_with_parent, set_process_name

FORK = multiprocessing.get_context("fork")
Prepare = Callable[[Server], None]
UseCores = Callable[[Server, bool], None]  # whether every core may be used, or only the server's own
JOIN_SECONDS = 2.0
SPIN_SECONDS = 0.05  # of busy-waiting for an answer; in a longer wait the cost of waking up does not matter


def run_worker(
    server: Server,
    connection: Connection,
    cancelled_id: Any,
    alone: Any,
    cores: Sequence[int],
    prepare: Prepare,
    use_cores: UseCores | None,
) -> None:
    """Run jobs in a worker process until the connection closes."""
    die_with_parent()
    set_process_name(f"dsi {server.name}")
    close_other_fds(connection.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if cores:
        os.sched_setaffinity(0, cores)
    prepare(server)
    decoder, was_alone = JobDecoder(), False
    while True:
        try:
            for message in connection.receive():
                if use_cores and alone.value != was_alone:
                    was_alone = alone.value
                    use_cores(server, was_alone)
                job = decoder.decode(message)
                run_job(job, server, connection, SharedCancelFlag(cancelled_id, job.id))
        except (EOFError, OSError):
            return


class ProcessHandle(WorkerHandle):
    """A worker process."""

    def __init__(
        self, server: Server, cores: Sequence[int], prepare: Prepare, use_cores: UseCores | None = None
    ) -> None:
        ours, theirs = Connection.pair(SEND_SECONDS)
        super().__init__(server, ours)
        self.cancelled_id = FORK.RawValue("q", NO_JOB)
        self.alone = FORK.RawValue(c_bool, False)  # whether its job may use every core
        arguments = (server, theirs, self.cancelled_id, self.alone, cores, prepare, use_cores)
        self.process = FORK.Process(target=run_worker, args=arguments, name=server.name, daemon=True)
        self.process.start()
        theirs.close()

    def cancel(self, id: int) -> None:
        self.cancelled_id.value = id

    def kill(self) -> None:
        self.process.kill()
        self.process.join(JOIN_SECONDS)
        self.connection.close()

    @property
    def ending(self) -> str:
        status = self.process.exitcode
        if status is None:
            return super().ending
        return f"ended with status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


class ProcessFleet(RemoteFleet):
    """`cores` pins servers by name; `prepare` runs first in each process, to set its number of threads, say.

    `use_cores` runs before a job that may use every core because nothing else computes, and before the next that
    may not; only the servers in `every_core` may.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        cores: Mapping[str, Sequence[int]] | None = None,
        prepare: Prepare = lambda _: None,
        use_cores: UseCores | None = None,
        restart: bool = True,
        hang_seconds: float | None = None,
        log: list[Span] | None = None,
    ) -> None:
        super().__init__(servers, restart, hang_seconds, log)
        self._cores, self._prepare, self._use_cores = cores or {}, prepare, use_cores
        self.every_core = frozenset(self._servers if use_cores else ())
        self._targets = [name for name, server in self._servers.items() if server.role == TARGET]
        for name in self._servers:
            self._start_worker(name)

    def _start_worker(self, name: str) -> None:
        cores = self._cores.get(name, ())
        self._add_worker(ProcessHandle(self._servers[name], cores, self._prepare, self._use_cores))

    def _assign(self, name: str, job: Job) -> None:
        self._workers[name].alone.value = name in self.every_core and self._is_alone(job)
        super()._assign(name, job)

    def _is_alone(self, job: Job) -> bool:
        return not isinstance(job, Prefill) and job.alone and len(self._scheduler.running) == 1

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values()]

    def seconds_without_core(self) -> float:
        """How long the workers have been ready to compute while every core of theirs did something else."""
        paths = [f"/proc/{pid}/schedstat" for pid in self.worker_pids]
        return sum(int(Path(path).read_text().split()[1]) for path in paths) / 1e9

    def _replace_dead_worker(self, name: str) -> None:
        self._start_worker(name)
        self._scheduler.add(name, self._servers[name].role)

    def _wait_for_messages(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        """Busy-wait while some core is idle: waking up takes longer than handling an answer."""
        affinity = os.sched_getaffinity(0)
        if idle := self._idle_cores(affinity):
            os.sched_setaffinity(0, idle)
            try:
                end = time.perf_counter() + min(SPIN_SECONDS, timeout)
                while time.perf_counter() < end:
                    if readable := self._selector.select(0):
                        return readable
            finally:
                os.sched_setaffinity(0, affinity)
        return self._selector.select(timeout)

    def _idle_cores(self, cores: set[int]) -> set[int]:
        """Return the cores of no working server and of no target: a target should find its own core idle."""
        if any(self._workers[name].alone.value for name in self._scheduler.running):
            return set()
        taken = (*self._scheduler.running, *self._targets)
        return cores.difference(*(self._cores.get(name, cores) for name in taken))
