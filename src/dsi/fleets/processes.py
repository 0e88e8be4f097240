"""A fleet of processes, one per server on its own cores, all sharing one copy of the weights.

The models are loaded before the fleet starts, and the workers are forked, so that they share the memory pages of the
weights. A worker that dies is detected and replaced, and its job fails, to run elsewhere. Workers die with this
process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ctypes import c_bool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from selectors import SelectorKey
from typing import Any

from dsi.core.messages import TARGET, Drafted, Job, Prefill, goes_on
from dsi.core.scheduler import promoted
from dsi.fleets.connection import Connection, JobDecoder
from dsi.fleets.packed import MAX_STEPS, PackedForward, PackedServer
from dsi.fleets.remote import NO_JOB, SEND_SECONDS, RemoteFleet, SharedCancelFlag, WorkerHandle, run_job
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work
from dsi.models.process_utils import close_other_fds, die_with_parent, set_process_name

FORK = multiprocessing.get_context("fork")
Prepare = Callable[[Server], None]
UseCores = Callable[[Server, bool], None]  # whether every core may be used, or only the server's own
JOIN_SECONDS = 2.0
MAX_INLINE_TOKENS = 256  # that a job in this process may have to compute; a longer prompt is read by a worker
MAX_AT_ONCE = 2  # shared forwards
MIN_SPLIT = 24  # texts from which a forward is split into two that run at once: with fewer that was slower
SPIN_SECONDS = 0.05  # of busy-waiting for an answer; in a longer wait the cost of waking up does not matter


def run_in_thread(work: Callable[[], object]) -> None:
    """Run a function in a new thread, where several threads can compute even if they did before the fork.

    OpenMP's pool belongs to the thread that began it: of a forked process only the first thread has one, and its
    threads are not there.
    """
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def waits_of_threads(pid: int) -> Iterator[tuple[str, float]]:
    """The threads of a process, and how many seconds each has been ready to compute without a core."""
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has just ended
            yield path.parent.name, int(path.read_text().split()[1]) / 1e9


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
    run_in_thread(lambda: run_jobs(server, connection, cancelled_id, alone, prepare, use_cores))


def run_jobs(
    server: Server,
    connection: Connection,
    cancelled_id: Any,
    alone: Any,
    prepare: Prepare,
    use_cores: UseCores | None,
) -> None:
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


@dataclass(eq=False, slots=True)
class InflightForward:
    """A forward that requests share, in a thread of its own."""

    role: str
    forward: PackedForward
    start: float
    end: float = 0.0


class ProcessFleet(RemoteFleet):
    """`cores` pins servers by name; `prepare` runs first in each process, to set its number of threads, say.

    `use_cores` runs before a job that may use every core because nothing else computes, and before the next that
    may not; only the servers in `every_core` may. Such a job runs in this process, without messages, on the server
    that `inline` has for its role, and shares its forwards with those of other requests if its model can. Many texts
    are divided into two forwards at once, if their model can, each on half of the cores: the answers of one are handled
    while the other still computes, and neither waits for a thread whose core does so.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        cores: Mapping[str, Sequence[int]] | None = None,
        prepare: Prepare = lambda _: None,
        use_cores: UseCores | None = None,
        inline: Mapping[str, Server] | None = None,
        restart: bool = True,
        hang_seconds: float | None = None,
        log: list[Span] | None = None,
    ) -> None:
        super().__init__(servers, restart, hang_seconds, log)
        self._cores, self._prepare, self._use_cores = cores or {}, prepare, use_cores
        self._inline = dict(inline or {})
        self._inline_alone = True  # whether a request that is alone runs here
        self._inline_jobs: dict[str, Job] = {}  # that run here, by server
        packed = {role: PackedServer.of(server) for role, server in self._inline.items()}
        self._packed = {role: server for role, server in packed.items() if server is not None}
        self._inflight: dict[Future[None], InflightForward] = {}
        self._ended: deque[Future[None]] = deque()
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "forward")
        self._running: PackedForward | None = None  # in the thread that calls
        self._unshared_is_next = False  # whether a job that shares no forward runs before the next shared one
        self.every_core = frozenset(self._servers if use_cores else ())
        self._targets = [name for name, server in self._servers.items() if server.role == TARGET]
        for name in self._servers:
            self._start_worker(name)

    def _start_worker(self, name: str) -> None:
        cores = self._cores.get(name, ())
        self._add_worker(ProcessHandle(self._servers[name], cores, self._prepare, self._use_cores))

    @property
    def inline_servers(self) -> list[Server]:
        """Those that run in this process."""
        return list(self._inline.values())

    @property
    def packs(self) -> bool:
        """Whether targets compute several requests in one forward, in this process."""
        return TARGET in self._packed

    @property
    def runs_inline(self) -> bool:
        """Whether a request that is alone runs in this process."""
        return bool(self._inline) and self._inline_alone

    def limit_inline(self, alone: bool, max_tokens: int, steps_for: Callable[[int], int] = lambda _: 1) -> None:
        """Say whether a request that is alone runs in this process, and how many new tokens of all share a forward.

        And how many forwards of the target, by their rows, follow one another before their tokens are handled.
        """
        self._inline_alone = alone
        for role, packed in self._packed.items():
            packed.max_tokens = max_tokens
            packed.steps_for = steps_for if role == TARGET else lambda _: MAX_STEPS

    def wake(self) -> None:
        if (running := self._running) is not None:
            running.stop.set()
        super().wake()

    def _assign(self, name: str, job: Job) -> None:
        role, may_use_all = self._servers[name].role, self._is_alone(name, job)
        packed = self._packed_for(role, job)
        shares = packed is not None and self._is_shared(job)
        if packed and shares and goes_on(job):  # others are not to wait until it has all its tokens
            packed.add(job)
            self._scheduler.release(name, computed=False)
            return
        if shares or (may_use_all and self._runs_inline(name, job)):
            self._inline_jobs[name] = job
            if packed and (shares or self._num_missing(role, job) > MAX_INLINE_TOKENS):  # which it reads in chunks
                packed.add(job)
            return
        self._workers[name].alone.value = may_use_all and name in self.every_core and len(self._scheduler.running) == 1
        super()._assign(name, job)

    def _runs_inline(self, name: str, job: Job) -> bool:
        """Whether a job beside which no other runs does so in this process, which can do nothing else meanwhile."""
        role = self._servers[name].role
        if role not in self._inline or not self._inline_alone or name not in self.every_core:
            return False
        return bool(self._packed_for(role, job)) or self._num_missing(role, job) <= MAX_INLINE_TOKENS

    def _num_missing(self, role: str, job: Job) -> int:
        """How many tokens of a job's text are not cached in this process."""
        prefix = self._inline[role].prefixes.entries.get(job.context.origin)
        return len(job.context) - ((prefix and prefix.num_cached) or 0)

    def _is_shared(self, job: Job) -> bool:
        """Whether a job shares forwards with other requests, even while a worker still ends what it had begun."""
        return not isinstance(job, Prefill) and job.alone and (self.num_requests > 1 or goes_on(job))

    def _packed_for(self, role: str, job: Job) -> PackedServer | None:
        packed = self._packed.get(role)
        return packed if packed and packed.accepts(job) else None

    def promote(self, id: int) -> None:
        super().promote(id)
        for packed in self._packed.values():
            packed.promote(id)
        for name, job in self._inline_jobs.items():  # some of which have not joined yet
            if job.id == id:
                self._inline_jobs[name] = promoted(job)

    def cancel(self, id: int) -> None:
        for packed in self._packed.values():
            packed.discard(id)
        super().cancel(id)

    def _cancel_job(self, name: str, id: int) -> None:
        if self._inline_jobs.pop(name, None) is None:
            super()._cancel_job(name, id)
        else:
            self._scheduler.release(name, computed=False)

    def _on_worker_death(self, name: str) -> None:
        if job := self._inline_jobs.pop(name, None):
            for packed in self._packed.values():
                packed.discard(job.id)
        super()._on_worker_death(name)

    def _names_at_work(self) -> list[str]:
        return [name for name in super()._names_at_work() if name not in self._inline_jobs]

    @property
    def _has_work(self) -> bool:
        return super()._has_work or any(packed.jobs for packed in self._packed.values())

    def close(self) -> None:
        self._threads.shutdown()
        super().close()

    def _wait_for_events(self) -> None:
        if not (self._finish_forwards() or self._run_inline()):
            super()._wait_for_events()
            return
        self._handle(self._selector.select(0))
        self._drop_and_replace()

    def _run_inline(self) -> bool:
        """Run a forward in this process, if there is one to run: draft tokens first, so that targets verify more.

        Nothing else runs; what may cancel it meanwhile waits until it has ended.
        """
        if self.num_requests > 1 or self._inline_jobs:
            self._take_waiting()
        shared = [(role, packed) for role, packed in self._packed.items() if packed.has_ready_jobs]
        unshared = self._unshared_job() if self._unshared_is_next or not shared else None
        if shared and unshared is None and (self._inflight or self._can_split(shared)):
            return self._begin_forward(shared)
        if self._inflight:
            return False
        if unshared is not None:
            self._run_job_inline(unshared, self._inline_jobs.pop(unshared))
            return True
        if shared:
            self._step_packed(*min(shared, key=lambda item: item[0] == TARGET))
        return bool(shared)

    def _take_waiting(self) -> None:
        """Let waiting jobs join those that share forwards."""
        for name, job in self._inline_jobs.items():  # whose text another job had
            packed = self._packed_for(self._servers[name].role, job)
            if packed and job.id not in packed.jobs and self._is_shared(job):
                packed.add(job)
        for role, packed in self._packed.items():
            packed.take_waiting(self._scheduler, role, self._is_shared)

    def _end_for_others(self) -> None:
        """Let the forward that began first end soon, where there are jobs that do not only go on with their texts."""
        first = next(iter(self._inflight.values()))
        if self._packed[first.role].has_urgent_jobs:
            first.forward.stop.set()

    @staticmethod
    def _can_split(shared: Sequence[tuple[str, PackedServer]]) -> bool:
        """Whether only targets are to compute, and so many texts that two forwards take no longer than one."""
        [(role, packed), *others] = shared
        return role == TARGET and not others and packed.forwards_at_once > 1 and len(packed.jobs) >= MIN_SPLIT

    def _begin_forward(self, shared: Sequence[tuple[str, PackedServer]]) -> bool:
        """Begin another forward beside the one that runs, if it is large enough, or run one of a drafter."""
        role, packed = min(shared, key=lambda item: item[0] == TARGET)
        if role != TARGET:
            self._step_packed(role, packed, MAX_AT_ONCE)
            return True
        if len(self._inflight) == MAX_AT_ONCE or not self._can_split([(role, packed)]):
            self._end_for_others()
            return False
        half = (packed.num_new + MAX_AT_ONCE - 1) // MAX_AT_ONCE
        forward = packed.begin(min(half, packed.max_tokens // MAX_AT_ONCE))
        inflight = InflightForward(role, forward, self.now())
        future = self._threads.submit(self._run_inflight, packed, inflight)
        self._inflight[future] = inflight
        future.add_done_callback(self._on_ended)
        return True

    def _unshared_job(self) -> str | None:
        """The server of a job that cannot share forwards and runs in this process, in turn with those that can.

        Not while a shared forward is to compute the same text: they have one cached prefix.
        """
        for name, job in self._inline_jobs.items():
            packed = self._packed.get(self._servers[name].role)
            if packed is None or not (job.id in packed.jobs or packed.computes_text_of(job)):
                return name
        return None

    def _run_inflight(self, packed: PackedServer, inflight: InflightForward) -> None:
        packed.run(inflight.forward, MAX_AT_ONCE)
        inflight.end = self.now()

    def _on_ended(self, future: Future[None]) -> None:
        self._ended.append(future)
        self.wake()

    def _finish_forwards(self) -> bool:
        """Take the answers of forwards that have ended; return whether there were any."""
        ended = bool(self._ended)
        while self._ended:
            future = self._ended.popleft()
            inflight = self._inflight.pop(future)
            future.result()
            self._finish_forward(inflight.role, inflight.forward, inflight.start, inflight.end, MAX_AT_ONCE)
        return ended

    def _step_packed(self, role: str, packed: PackedServer, at_once: int = 1) -> None:
        """Run one forward for all jobs that share it."""
        forward, start = packed.begin(packed.max_tokens), self.now()
        self._running = forward
        packed.run(forward, at_once)
        self._running = None
        self._finish_forward(role, forward, start, self.now(), at_once)

    def _finish_forward(self, role: str, forward: PackedForward, start: float, end: float, at_once: int) -> None:
        """Record the answers of a shared forward, which had its share of the cores."""
        self._unshared_is_next, packed = True, self._packed[role]
        events = packed.finish(forward)
        share, num_texts = at_once * len(events), len(forward.parts)
        names = {job.id: name for name, job in self._inline_jobs.items()}
        default = next(name for name, server in self._servers.items() if server.role == role)
        for job, context, event in events:
            name = names.get(job.id, default)
            self._record_shared(name, job, context, start, end, event, share, num_texts)
            self._events.append(event)
            if job.id in names and job.id not in packed.jobs:
                del self._inline_jobs[name]
                self._scheduler.release(name, computed=False)

    def _run_job_inline(self, name: str, job: Job) -> None:
        """Run a whole job; nobody can use one of its answers before the last."""
        self._unshared_is_next = False
        server, context, start = self._inline[self._servers[name].role], job.context, self.now()
        try:
            events = list(work(job, server))
        except BaseException:  # Ctrl-C
            server.prefixes.entries.clear()
            raise
        finally:
            self._scheduler.release(name, computed=False)
        each = (self.now() - start) / max(1, len(events))  # tokens that one call drafts come at once
        for i, event in enumerate(events):
            self._record(name, job, context, start + i * each, start + (i + 1) * each, event)
            self._events.append(event)
            if isinstance(event, Drafted):
                context = context.then(event.token)

    def _is_alone(self, name: str, job: Job) -> bool:
        """Whether no worker computes beside this job."""
        others = self._scheduler.running.keys() - self._inline_jobs.keys() - {name}
        if isinstance(job, Prefill) or not job.alone or others:
            return False
        return bool(self._packed) or len(self._scheduler.running) == 1

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values()]

    def seconds_without_core(self) -> dict[str, float]:
        """How long each thread of the workers and of this process was ready to compute while its cores were busy.

        Forwards run in threads that are not a process's first.
        """
        return dict(chain.from_iterable(map(waits_of_threads, (os.getpid(), *self.worker_pids))))

    def _replace_dead_worker(self, name: str) -> None:
        wait(self._inflight)  # a fork amid a forward would copy what it has half done
        self._start_worker(name)
        self._scheduler.add(name, self._servers[name].role)

    def _wait_for_messages(self, timeout: float) -> list[tuple[SelectorKey, int]]:
        """Busy-wait while some core is idle: waking up takes longer than handling an answer."""
        if self._inflight:
            return self._selector.select(timeout)
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
