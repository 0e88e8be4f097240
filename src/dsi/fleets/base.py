"""What all fleets share: the servers, the scheduler that assigns jobs to them, and the queue of events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from dsi.core.messages import TARGET, Event, Job, Time, goes_on
from dsi.core.scheduler import Scheduler
from dsi.core.sequence import TokenSequence
from dsi.core.stats import ANSWERS, ServerUsage, num_forwards
from dsi.fleets.servers import Server, by_name
from dsi.fleets.spans import Span, span

DIED, HUNG, NOT_STARTED = DEATH_CAUSES = ("died", "hung", "not started")  # why a server had to be replaced

Observer = Callable[[Job, Time, int], None]  # a job, the time of its forward, and how many targets were busy


def begins_stream(job: Job, context: TokenSequence) -> bool:
    """Whether a target has yet to stream its first token, which takes as long as a verification."""
    return goes_on(job) and context is job.context


class BaseFleet(ABC):
    """Schedules jobs; a subclass starts and cancels a job on a server, and removes a dead server."""

    most_verified_unseen = 0

    def __init__(self, servers: Iterable[Server], log: list[Span] | None = None) -> None:
        self.log = log
        self.job_ids: Iterator[int] = count()
        self._servers = by_name(servers)
        self.usage = {name: ServerUsage(server.role) for name, server in self._servers.items()}
        self.death_causes: dict[str, Counter[str]] = {}  # how often each server died of what
        self.restarts: Counter[str] = Counter()  # how often each server was replaced
        self.observe: Observer | None = None  # is told of every forward that was answered
        self.num_requests = 0  # that are running, as the loop says
        self._scheduler = Scheduler({name: server.role for name, server in self._servers.items()})
        self._events: deque[Event] = deque()

    @abstractmethod
    def now(self) -> Time:
        """Return the time by the fleet's clock."""

    @abstractmethod
    def _assign(self, name: str, job: Job) -> None:
        """Start the job on an idle server."""

    @abstractmethod
    def _cancel_job(self, name: str, id: int) -> None:
        """Cancel the job that the server is running."""

    @abstractmethod
    def _on_worker_death(self, name: str) -> None:
        """Remove a dead server's worker, and replace it where the fleet restarts workers."""

    def _will_restart(self, name: str) -> bool:  # noqa: ARG002
        """Whether a replacement comes, so that jobs only this server could run wait for it."""
        return False

    def check_workers(self) -> None:  # noqa: B027
        """Notice dead workers and replace them, while no job runs and `next_event` is not called."""

    @property
    def deaths(self) -> dict[str, int]:
        """How often each server has died; those that never did are left out."""
        return {name: causes.total() for name, causes in self.death_causes.items()}

    @property
    def busy(self) -> dict[str, Time]:
        """Return how long each server has computed, up to its last finished forward."""
        return {name: usage.busy for name, usage in self.usage.items()}

    def server_usage(self) -> dict[str, ServerUsage]:
        """Return the usage of each server, the forward in progress included."""
        now = self.now()
        return {
            name: usage.until(now if self._is_computing(name) else usage.since) for name, usage in self.usage.items()
        }

    def _is_computing(self, name: str) -> bool:
        return name in self._scheduler.running

    def servers(self) -> list[tuple[str, str, bool]]:
        """List every server, dead ones included: its name, its role, and whether it is alive."""
        return [(name, server.role, name in self._scheduler.roles) for name, server in self._servers.items()]

    def start(self, job: Job) -> None:
        self._scheduler.enqueue(job)
        self._start_jobs()

    def promote(self, id: int) -> None:
        self._scheduler.promote(id)

    def cancel(self, id: int) -> None:
        for name in self._scheduler.cancel(id):
            self._cancel_job(name, id)

    def kill(self, name: str, cause: str = DIED) -> None:
        """Remove a server that died or has to: its job fails."""
        self._remove(name)
        self._count_death(name, cause)

    def _count_death(self, name: str, cause: str) -> None:
        self.death_causes.setdefault(name, Counter())[cause] += 1

    def _remove(self, name: str) -> None:
        self._scheduler.remove(name, restarts=self._will_restart(name))
        self._on_worker_death(name)
        self._events.extend(self._scheduler.orphaned())

    def close(self) -> None:
        """Kill every server; all open jobs fail."""
        for name in list(self._scheduler.roles):
            self._remove(name)

    def _start_jobs(self) -> None:
        """Start queued jobs on idle servers; a server is idle only once its last answer was handled."""
        for name, job in self._scheduler.assign():
            self.usage[name].since = self.now()
            self._assign(name, job)
        self._events.extend(self._scheduler.orphaned())

    def _record(self, name: str, job: Job, context: TokenSequence, start: Time, end: Time, event: Event | None) -> None:
        """Count a forward that ended in `event`, or was cancelled, and log its span."""
        self.usage[name].end(start, end, event)
        if self.observe is not None and event.__class__ in ANSWERS and not begins_stream(job, context):
            self.observe(job, (end - start) / num_forwards(event), self._num_busy_targets())
        if self.log is not None:
            self.log.append(span(name, self._servers[name].role, job, context, start, end, event))

    def _record_shared(
        self,
        name: str,
        job: Job,
        context: TokenSequence,
        start: Time,
        end: Time,
        event: Event,
        share: int,
        num_texts: int,
        began_when_said: bool = True,
    ) -> None:
        """Count a job's share of a forward over several texts; what it takes is not what it would take alone."""
        if share == 1 and began_when_said:
            self._record(name, job, context, start, end, event)
            return
        self.usage[name].end(end - (end - start) / share, end, event)
        if self.log is not None:
            self.log.append(span(name, self._servers[name].role, job, context, start, end, event, num_texts))

    def _num_busy_targets(self) -> int:
        return sum(self._servers[name].role == TARGET for name in self._scheduler.running)


class RealTimeFleet(BaseFleet):
    """A fleet whose clock is this machine's, from 0 at its start; a subclass waits for what its workers return."""

    def __init__(self, servers: Iterable[Server], log: list[Span] | None = None) -> None:
        super().__init__(servers, log)
        self._clock_start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._clock_start

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._has_work:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            self._wait_for_events()
        return self._events.popleft()

    @property
    def _has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.starting)

    @abstractmethod
    def _wait_for_events(self) -> None:
        """Wait for something to happen, and append its events, if any."""
