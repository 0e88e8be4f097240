"""Which waiting job goes to which idle server. Pure bookkeeping: fleets do as it says.

The watch on a root goes before any deeper job, and a look aside after all others. Among idle servers, the
one that has read most of the request comes first. A server with nothing else to do catches up with the sure
text of the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from dsi.core.messages import TARGET, Draft, Failed, Job, Prefill, Verify
from dsi.core.sequence import TokenSequence

REMEMBERED = 128  # requests of which it is known how much each server has read
LAG = 8  # tokens a server may be behind before catching up is worth a forward

Assignments = list[tuple[str, Job]]


def role_of(job: Job) -> str:
    return job.model if isinstance(job, Draft) else TARGET


class Scheduler:
    """Tell it of jobs and servers with the other methods; `assign` says what is to begin now."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self.roles: dict[str, str] = {}  # the living servers
        self.working: dict[str, Job] = {}  # what each busy one is doing
        self.away: dict[str, str] = {}  # servers that are on their way, and their roles
        self._idle: dict[str, dict[str, None]] = {}  # servers of each role that wait for a job, in order
        self._queues: dict[str, tuple[OrderedDict[int, Job], ...]] = {}  # urgent, deep, aside
        self._standing: dict[int, Prefill] = {}  # the newest sure text of each request
        self._read: dict[str, dict[TokenSequence, int]] = {}  # tokens of each request a server has seen
        self._stopping: set[str] = set()  # servers whose job was withdrawn
        self.changed = False  # whether there may be something to assign
        self._resting: dict[str, None] = {}  # servers that may be idle and behind the sure text
        self._stranded: list[Failed] = []  # jobs that lost their server, or never had one
        for server, role in roles.items():
            self.add(server, role)

    def expect(self, server: str, role: str) -> None:
        """This one is on its way: what only it could do waits for it."""
        self.away[server] = role
        self._queues.setdefault(role, (OrderedDict(), OrderedDict(), OrderedDict()))

    def give_up(self, server: str) -> None:
        """It will not come."""
        self._strand_all(self.away.pop(server))

    def add(self, server: str, role: str) -> None:
        if server in self.roles:
            raise ValueError(f"server {server!r} is already there")
        self.away.pop(server, None)
        self.roles[server] = role
        self._read[server] = {}
        self._idle.setdefault(role, {})[server] = self._resting[server] = None
        self.changed = True
        self._queues.setdefault(role, (OrderedDict(), OrderedDict(), OrderedDict()))

    def remove(self, server: str, returns: bool = False) -> None:
        """The server is gone: its job is stranded, and so are all jobs that only it could have done, unless
        it `returns`.
        """
        if server not in self.roles:
            raise ValueError(f"there is no server {server!r}")
        role = self.roles.pop(server)
        del self._read[server]
        self._idle[role].pop(server, None)
        if (job := self.working.pop(server, None)) and server not in self._stopping:
            self._stranded.append(Failed(job.id, f"server {server} died"))
        self._stopping.discard(server)
        if returns:
            self.away[server] = role
        self._strand_all(role)

    def _strand_all(self, role: str) -> None:
        """If nobody with this role is there or on the way."""
        if role in self.roles.values() or role in self.away.values():
            return
        for queue in self._queues[role]:
            for job in queue.values():
                self._strand(job)
            queue.clear()

    @property
    def open(self) -> bool:
        """Whether any job is being done or waits."""
        return bool(self.working) or any(queue for queues in self._queues.values() for queue in queues)

    def stranded(self) -> list[Failed]:
        """Word of the jobs that can no longer be answered; each is told once."""
        told, self._stranded = self._stranded, []
        return told

    def _strand(self, job: Job) -> None:
        self._stranded.append(Failed(job.id, f"no {role_of(job)} server is left"))

    def offer(self, job: Job) -> None:
        self.changed = True
        role = role_of(job)
        if isinstance(job, Prefill):
            self._standing[job.id] = job
            self._resting.update(self._idle.get(role, {}))
        elif role not in self.roles.values() and role not in self.away.values():
            self._strand(job)
        else:
            turn = 1 + job.aside if isinstance(job, Verify) and job.lead > 0 else 0
            self._queues[role][turn][job.id] = job

    def promote(self, id: int) -> None:
        """This job has become the watch on a root: if it still waits, it goes before the deeper ones."""
        for urgent, *later in self._queues.values():
            for queue in later:
                if id in queue:
                    urgent[id] = queue.pop(id)

    def withdraw(self, id: int) -> list[str]:
        """Forget a job; returns the servers that are at it, busy until they are released."""
        for queues in self._queues.values():
            for queue in queues:
                queue.pop(id, None)
        self._standing.pop(id, None)
        at_it = [server for server, job in self.working.items() if job.id == id]
        self._stopping.update(at_it)
        return at_it

    def release(self, server: str) -> None:
        """The server has ended its job. What was withdrawn it has not read."""
        if server not in self.roles:
            return
        job = self.working.pop(server)
        if server not in self._stopping:
            self._note(server, job)
        self._stopping.discard(server)
        self._idle[self.roles[server]][server] = self._resting[server] = None
        self.changed = True

    def assign(self) -> Assignments:
        """Give waiting jobs to idle servers, and to the targets that are left what they have not read."""
        begun: Assignments = []
        if not self.changed:
            return begun
        self.changed = False
        for role, queues in self._queues.items():
            idle = self._idle[role]
            for queue in queues:
                while queue and idle:
                    job = queue.popitem(last=False)[1]
                    begun.append((self._best(idle, job), job))
                    self._engage(*begun[-1])
        return begun + self._catch_up()

    def _best(self, idle: dict[str, None], job: Job) -> str:
        if len(idle) == 1:
            return next(iter(idle))
        origin = job.context.origin
        return max(idle, key=lambda server: self._read[server].get(origin, -1))

    def _engage(self, server: str, job: Job) -> None:
        del self._idle[self.roles[server]][server]
        self.working[server] = job

    def _note(self, server: str, job: Job) -> None:
        read = self._read[server]
        read.pop(job.context.origin, None)
        read[job.context.origin] = len(job.context)
        if len(read) > REMEMBERED:
            del read[next(iter(read))]

    def _catch_up(self) -> Assignments:
        begun: Assignments = []
        resting, self._resting = self._resting, {}
        for server in resting:
            if server in self._idle.get(TARGET, ()) and (warm := self._behind(server)):
                self._engage(server, warm)
                begun.append((server, warm))
        return begun

    def _behind(self, server: str) -> Prefill | None:
        """A text to catch up with; none when there are more than a server can remember."""
        if len(self._standing) > REMEMBERED:
            return None
        read = self._read[server]
        for warm in self._standing.values():
            seen = read.get(warm.context.origin)
            if seen is None or len(warm.context) - seen >= LAG:
                return warm
        return None
