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
        self.accounts = {name: ServerUsage(server.role) for name, server in self._servers.items()}
        self.deaths: dict[str, int] = {}  # of each server, so far
        self._dispatch = Scheduler({name: server.role for name, server in self._servers.items()})
        self._ready: deque[Event] = deque()

    @abstractmethod
    def now(self) -> Time:
        """By the fleet's clock."""

    @abstractmethod
    def _set_to(self, name: str, job: Job) -> None:
        """The server begins this job."""

    @abstractmethod
    def _stop(self, name: str, id: int) -> None:
        """The job that the server is at is not wanted any longer."""

    @abstractmethod
    def _lose(self, name: str) -> None:
        """The server is gone, whatever it was doing."""

    def _returns(self, name: str) -> bool:  # noqa: ARG002
        """Whether another takes its place later, for which jobs wait that only it could do."""
        return False

    @property
    def busy(self) -> dict[str, Time]:
        """For how long each server has computed, up to the last forward that it ended."""
        return {name: toll.busy for name, toll in self.accounts.items()}

    def tolls(self) -> dict[str, ServerUsage]:
        """What each server has done up to now."""
        now = self.now()
        return {name: toll.until(now if self._computes(name) else toll.since) for name, toll in self.accounts.items()}

    def _computes(self, name: str) -> bool:
        return name in self._dispatch.working

    def members(self) -> list[tuple[str, str, bool]]:
        """Every server there ever was: its name, its role, and whether it lives."""
        return [(name, each.role, name in self._dispatch.roles) for name, each in self._servers.items()]

    def start(self, job: Job) -> None:
        self._dispatch.offer(job)
        self._begin()

    def promote(self, id: int) -> None:
        self._dispatch.promote(id)

    def cancel(self, id: int) -> None:
        for name in self._dispatch.withdraw(id):
            self._stop(name, id)

    def kill(self, name: str) -> None:
        """The server dies now, whatever it was doing."""
        self._dispatch.remove(name, returns=self._returns(name))
        self.deaths[name] = self.deaths.get(name, 0) + 1
        self._lose(name)
        self._ready.extend(self._dispatch.stranded())

    def close(self) -> None:
        """Every server is gone: what is still open fails."""
        for name in list(self._dispatch.roles):
            self.kill(name)

    def _begin(self) -> None:
        """Start what can be started: servers that have answered take part once the answer is handled."""
        for name, job in self._dispatch.assign():
            self.accounts[name].since = self.now()
            self._set_to(name, job)
        self._ready.extend(self._dispatch.stranded())
