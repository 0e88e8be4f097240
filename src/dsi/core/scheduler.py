"""Which waiting job runs on which idle server. Pure bookkeeping: fleets carry it out.

The verification of a root goes before any deeper one. Among idle servers, the one that has most of the request
in its KV cache comes first. A target with nothing else to do prefills the verified text of the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from dsi.core.messages import TARGET, Draft, Failed, Job, Prefill, Verify
from dsi.core.sequence import TokenSequence

MAX_TRACKED_REQUESTS = 128  # of which it is known how much each server has in its cache
MIN_PREFILL = 8  # tokens a server may be behind before a prefill is worth a forward

Assignments = list[tuple[str, Job]]
Queue = OrderedDict[int, Job]  # by id


def role_of(job: Job) -> str:
    return job.model if isinstance(job, Draft) else TARGET


def promoted(job: Job) -> Job:
    """A verification of what was speculation, once it verifies a root."""
    return replace(job, lead=0) if isinstance(job, Verify) else job


class Scheduler:
    """Report jobs and servers with the other methods; `assign` returns what is to start now."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self.roles: dict[str, str] = {}  # of the servers that are up
        self.running: dict[str, Job] = {}  # the job of each busy server
        self.starting: dict[str, str] = {}  # roles of servers that are not up yet
        self.changed = False  # whether there may be something to assign
        self._idle: dict[str, dict[str, None]] = {}  # idle servers of each role, in order
        self._queues: dict[str, tuple[Queue, Queue]] = {}  # urgent, deeper
        self._prefills: dict[int, Prefill] = {}  # the latest of each request
        self._num_cached: dict[str, dict[TokenSequence, int]] = {}  # tokens of each request in a server's cache
        self._cancelling: set[str] = set()  # servers whose job was cancelled
        self._may_prefill: dict[str, None] = {}  # servers that may be idle and behind the verified text
        self._orphaned: list[Failed] = []  # jobs that lost their server, or never had one
        self.causes: dict[str, str] = {}  # why the last server of a role was lost, where it is known
        for server, role in roles.items():
            self.add(server, role)

    def expect(self, server: str, role: str) -> None:
        """This server is starting: jobs that only it can run wait for it."""
        self.starting[server] = role
        self._add_role(role)

    def give_up(self, server: str) -> None:
        """This server will not start."""
        self._orphan_queued(self.starting.pop(server))

    def add(self, server: str, role: str) -> None:
        if server in self.roles:
            raise ValueError(f"server {server!r} is already there")
        self.starting.pop(server, None)
        self.roles[server] = role
        self._num_cached[server] = {}
        self._add_role(role)
        self._set_idle(server)

    def _add_role(self, role: str) -> None:
        self._idle.setdefault(role, {})
        self._queues.setdefault(role, (OrderedDict(), OrderedDict()))

    def _set_idle(self, server: str) -> None:
        self._idle[self.roles[server]][server] = self._may_prefill[server] = None
        self.changed = True

    def remove(self, server: str, restarts: bool = False) -> None:
        """The server is gone: its job is orphaned, and so are all that only it could run, unless it `restarts`."""
        if server not in self.roles:
            raise ValueError(f"there is no server {server!r}")
        role = self.roles.pop(server)
        del self._num_cached[server]
        self._idle[role].pop(server, None)
        if (job := self.running.pop(server, None)) and server not in self._cancelling:
            self._orphaned.append(Failed(job.id, f"server {server} died"))
        self._cancelling.discard(server)
        if restarts:
            self.starting[server] = role
        self._orphan_queued(role)

    def _has_server(self, role: str) -> bool:
        return role in self.roles.values() or role in self.starting.values()

    def _orphan_queued(self, role: str) -> None:
        """Orphan the waiting jobs of a role if no server of that role is up or starting."""
        if self._has_server(role):
            return
        for queue in self._queues[role]:
            for job in queue.values():
                self._orphan(job)
            queue.clear()

    def _orphan(self, job: Job) -> None:
        role = role_of(job)
        cause = f" ({self.causes[role]})" if role in self.causes else ""
        self._orphaned.append(Failed(job.id, f"no {role} server is left{cause}"))

    def orphaned(self) -> list[Failed]:
        """Return the failures of jobs that can no longer be answered, each once."""
        failures, self._orphaned = self._orphaned, []
        return failures

    @property
    def has_jobs(self) -> bool:
        """Whether any job runs or waits."""
        return bool(self.running) or any(queue for queues in self._queues.values() for queue in queues)

    def waits(self, id: int) -> bool:
        """Whether a job waits for a server."""
        return any(id in queue for queues in self._queues.values() for queue in queues)

    def enqueue(self, job: Job) -> None:
        self.changed = True
        role = role_of(job)
        if isinstance(job, Prefill):
            self._prefills[job.id] = job
            self._may_prefill.update(self._idle.get(role, {}))
        elif not self._has_server(role):
            self._orphan(job)
        else:
            urgent, deeper = self._queues[role]
            (deeper if isinstance(job, Verify) and job.lead > 0 else urgent)[job.id] = job

    def promote(self, id: int) -> None:
        """This job now verifies a root: if it still waits, it goes before the deeper ones."""
        for urgent, deeper in self._queues.values():
            if id in deeper:
                urgent[id] = promoted(deeper.pop(id))

    def cancel(self, id: int) -> list[str]:
        """Drop a job; return the servers that run it, which stay busy until they are released."""
        for queues in self._queues.values():
            for queue in queues:
                queue.pop(id, None)
        self._prefills.pop(id, None)
        servers = [server for server, job in self.running.items() if job.id == id]
        self._cancelling.update(servers)
        return servers

    def num_new(self, server: str, job: Job) -> int:
        """How many tokens of a job's text the server has not computed yet, at least one."""
        return max(1, len(job.context) - self._num_cached[server].get(job.context.origin, 0))

    def release(self, server: str, computed: bool = True) -> None:
        """The server has ended its job; the text of one that was cancelled, or ran elsewhere, is not in its cache."""
        if server not in self.roles:
            return
        job = self.running.pop(server)
        if computed and server not in self._cancelling:
            self._record_cached(server, job.context)
        self._cancelling.discard(server)
        self._set_idle(server)

    def take(self, role: str, accepts: Callable[[Job], bool]) -> list[Job]:
        """Remove the waiting jobs of a role that `accepts`, urgent ones first: they join others on a server."""
        taken = [job for queue in self._queues.get(role, ()) for job in queue.values() if accepts(job)]
        for job in taken:
            for queue in self._queues[role]:
                queue.pop(job.id, None)
        return taken

    def assign(self) -> Assignments:
        """Give waiting jobs to idle servers, and prefills to the targets that are left."""
        assigned: Assignments = []
        if not self.changed:
            return assigned
        self.changed = False
        for role, queues in self._queues.items():
            idle = self._idle[role]
            for queue in queues:
                while queue and idle:
                    job = queue.popitem(last=False)[1]
                    server = self._best(idle, job)
                    self._run(server, job)
                    assigned.append((server, job))
        return assigned + self._assign_prefills()

    def _best(self, idle: dict[str, None], job: Job) -> str:
        """The server with the longest cached prefix of the job's request."""
        if len(idle) == 1:
            return next(iter(idle))
        origin = job.context.origin
        return max(idle, key=lambda server: self._num_cached[server].get(origin, -1))

    def _run(self, server: str, job: Job) -> None:
        del self._idle[self.roles[server]][server]
        self.running[server] = job

    def _record_cached(self, server: str, context: TokenSequence) -> None:
        cached = self._num_cached[server]
        cached.pop(context.origin, None)
        cached[context.origin] = len(context)
        if len(cached) > MAX_TRACKED_REQUESTS:
            del cached[next(iter(cached))]

    def _assign_prefills(self) -> Assignments:
        assigned: Assignments = []
        servers, self._may_prefill = self._may_prefill, {}
        for server in servers:
            if server in self._idle.get(TARGET, ()) and (job := self._prefill_for(server)):
                self._run(server, job)
                assigned.append((server, job))
        return assigned

    def _prefill_for(self, server: str) -> Prefill | None:
        """A request that this server is behind; none when there are more than can be tracked."""
        if len(self._prefills) > MAX_TRACKED_REQUESTS:
            return None
        num_cached = self._num_cached[server]
        for job in self._prefills.values():
            cached = num_cached.get(job.context.origin)
            if cached is None or len(job.context) - cached >= MIN_PREFILL:
                return job
        return None
