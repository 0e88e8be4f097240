"""Traces of the last requests: what each server computed, for Perfetto and `dsi timeline`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from dsi.experiments.records import recorded
from dsi.plot.trace import trace
from dsi.server.engine_thread import JobStats


class Traces:
    """The last few by client and response id; most are never requested, so JSON is made on demand."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stats: OrderedDict[tuple[int, str], tuple[str, Sequence[JobStats]]] = OrderedDict()

    def keep(self, client: int, id: str, algorithm: str, stats: Sequence[JobStats]) -> None:
        self._stats[client, id] = algorithm, stats
        while len(self._stats) > self._capacity:
            self._stats.popitem(last=False)

    def json(self, client: int, id: str) -> dict[str, Any] | None:
        """None: there is none, or it is another client's."""
        kept = self._stats.get((client, id))
        if kept is None:
            return None
        algorithm, stats = kept
        runs = [(tuple(job.servers), job.spans, job.completion) for job in stats]
        return trace([recorded(algorithm, "measured", *run, 1000) for run in runs])
