"""What the servers did for the last requests, to be drawn afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsi.core.request import Completion
from dsi.experiments.records import Record, recorded
from dsi.fleets.spans import Span
from dsi.plot.trace import trace
from dsi.server.engine_thread import ServerJob


class Traces:
    """The last few, by the id of the answer; most are never asked for, so they are made when they are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[str, Sequence[str], list[ServerJob]]] = OrderedDict()

    def keep(self, id: str, algorithm: str, servers: Sequence[str], tickets: Sequence[ServerJob]) -> None:
        if not self._most:
            return
        self._kept[id] = algorithm, servers, [ticket for ticket in tickets if ticket.run]
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def json(self, id: str) -> dict[str, Any] | None:
        if id not in self._kept:
            return None
        algorithm, servers, tickets = self._kept[id]
        return trace([record(algorithm, servers, ticket) for ticket in tickets])


def record(algorithm: str, servers: Sequence[str], ticket: ServerJob) -> Record:
    run, log = ticket.run, [_since(span, ticket.began) for span in ticket.spans]
    if run is None:
        raise ValueError("a ticket that was never taken up")
    done = Completion(
        tuple(run.tokens),
        "",
        tuple(run.times),
        ticket.tally,
        decisions=ticket.decisions,
        overlap=run.overlap,
    )
    return recorded(algorithm, "measured", tuple(servers), log, done, 1000)


def _since(span: Span, began: float) -> Span:
    return replace(span, start=span.start - began, end=span.end - began)
