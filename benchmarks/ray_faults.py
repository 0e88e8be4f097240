"""Faults in Ray workers: an actor whose messages are now and then lost, repeated, late, or its last."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from dsi.core.messages import Job
from dsi.fleets.connection import Connection
from dsi.fleets.ray_actors import CANCEL, ActorWorker, ray
from dsi.fleets.servers import Server


class FaultInjector:
    """Injects a fault at every `every`-th message of one kind, and appends a line to the log file for each.

    Kinds are draft, verify and prefill (jobs), cancel, and answer; faults are die, hang, late, lose (of a cancel)
    and twice (of an answer).
    """

    def __init__(self, kind: str, fault: str, every: int, log: Path) -> None:
        self.kind, self.fault, self.every, self.log, self._count = kind, fault, every, log, 0

    def inject(self, kind: str) -> str | None:
        """Count a message; when its turn has come, let the fault happen, and return its name."""
        self._count += kind == self.kind
        if kind != self.kind or self._count % self.every:
            return None
        with self.log.open("a") as log:
            log.write(f"{self.kind} {self.fault}\n")
        if self.fault == "die":
            os._exit(1)
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "late":
            time.sleep(0.3)
        return self.fault


def faulty_worker(kind: str, fault: str, every: int, log: Path) -> type[ActorWorker]:
    """Return a worker class for `RayFleet` with this fault."""
    ray().cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers cannot import

    class FaultyConnection(Connection):
        def __init__(self, connection: Connection, injector: FaultInjector) -> None:
            super().__init__(connection._socket)
            self._injector = injector

        def send(self, message: Any) -> None:
            repeated = self._injector.inject("answer") == "twice"
            super().send(message)
            if repeated:
                super().send(message)

    class FaultyWorker(ActorWorker):
        def __init__(self, server: Server) -> None:
            super().__init__(server)
            self._injector = FaultInjector(kind, fault, every, log)

        def _run_job(self, job: Job, connection: Connection) -> None:
            self._injector.inject(type(job).__name__.lower())
            super()._run_job(job, FaultyConnection(connection, self._injector))

        def _cancel(self, id: int) -> None:
            if self._injector.inject(CANCEL) != "lose":
                super()._cancel(id)

    return FaultyWorker
