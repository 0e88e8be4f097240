"""What all fleets do alike: who is there, which job goes to whom, and what is ready to be told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from dsi.core.messages import Event, Job, Time
from dsi.core.scheduler import Scheduler
from dsi.core.stats import ServerUsage
from dsi.fleets.worker import Server, by_name


class BaseFleet(ABC):
    """A fleet says how a server begins a job, hears that it is unwanted, and is gone."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = by_name(servers)
        self.usage = {name: ServerUsage(server.role) for name, server in self._servers.items()}
        self.deaths: dict[str, int] = {}  # of each server, so far
        self._scheduler = Scheduler({name: server.role for name, server in self._servers.items()})
        self._events: deque[Event] = deque()

    @abstractmethod
    def now(self) -> Time:
        """By the fleet's clock."""

    @abstractmethod
    def _assign(self, name: str, job: Job) -> None:
        """The server begins this job."""

    @abstractmethod
    def _cancel_job(self, name: str, id: int) -> None:
        """The job that the server is at is not wanted any longer."""

    @abstractmethod
    def _on_worker_death(self, name: str) -> None:
        """The server is gone, whatever it was doing."""

    def _will_restart(self, name: str) -> bool:  # noqa: ARG002
        """Whether another takes its place later, for which jobs wait that only it could do."""
        return False

    @property
    def busy(self) -> dict[str, Time]:
        """For how long each server has computed, up to the last forward that it ended."""
        return {name: toll.busy for name, toll in self.usage.items()}

    def tolls(self) -> dict[str, ServerUsage]:
        """What each server has done up to now."""
        now = self.now()
        return {name: toll.until(now if self._computes(name) else toll.since) for name, toll in self.usage.items()}

    def _computes(self, name: str) -> bool:
        return name in self._scheduler.working

    def servers(self) -> list[tuple[str, str, bool]]:
        """Every server there ever was: its name, its role, and whether it lives."""
        return [(name, each.role, name in self._scheduler.roles) for name, each in self._servers.items()]

    def start(self, job: Job) -> None:
        self._scheduler.offer(job)
        self._start_jobs()

    def promote(self, id: int) -> None:
        self._scheduler.promote(id)

    def cancel(self, id: int) -> None:
        for name in self._scheduler.withdraw(id):
            self._cancel_job(name, id)

    def kill(self, name: str) -> None:
        """The server dies now, whatever it was doing."""
        self._scheduler.remove(name, returns=self._will_restart(name))
        self.deaths[name] = self.deaths.get(name, 0) + 1
        self._on_worker_death(name)
        self._events.extend(self._scheduler.stranded())

    def close(self) -> None:
        """Every server is gone: what is still open fails."""
        for name in list(self._scheduler.roles):
            self.kill(name)

    def _start_jobs(self) -> None:
        """Start what can be started: servers that have answered take part once the answer is handled."""
        for name, job in self._scheduler.assign():
            self.usage[name].since = self.now()
            self._assign(name, job)
        self._events.extend(self._scheduler.stranded())
