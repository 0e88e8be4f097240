"""Forwards that requests share, in virtual time: one target and its drafters, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from dsi.core.messages import TARGET, WOKEN, Event, Job, Prefill, Time
from dsi.core.scheduler import promoted, role_of
from dsi.fleets.base import BaseFleet
from dsi.fleets.packed import PackedServer
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span, span
from dsi.models.protocol import Answer, ForwardRequest, Model, tree_answer

ForwardTime = Callable[[int], Time]  # of a forward, by its new tokens of all texts


@dataclass(frozen=True)
class PackedModel:
    """Any model as one that computes several texts, and trees after them, in one forward."""

    model: Model
    can_pack: bool = True
    computes_trees: bool = True
    forwards_at_once: int = 1

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        return self.model.answer(request)

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:  # noqa: ARG002
        return [tree_answer(self.model, request) for request in requests]


class SharedSimulatedFleet(BaseFleet):
    """One server of each role. All jobs that are ready share a forward, which takes `times[role]` by its new tokens."""

    def __init__(
        self, models: Mapping[str, Model], times: Mapping[str, ForwardTime], log: list[Span] | None = None
    ) -> None:
        servers = [Server(_name(role), role, PackedModel(model)) for role, model in models.items()]
        super().__init__(servers, log)
        # There is no other server that a wide job could run on.
        self._packed = {server.role: PackedServer(server, server.model, inf) for server in servers}  # type: ignore[arg-type]
        self._times = times
        self._waiting: dict[int, Job] = {}  # whose request has another job that shares a forward
        self._now: Time = 0

    def now(self) -> Time:
        return self._now

    def start(self, job: Job) -> None:
        if not isinstance(job, Prefill):  # the next verification prefills
            self._waiting[job.id] = job

    def promote(self, id: int) -> None:
        if id in self._waiting:
            self._waiting[id] = promoted(self._waiting[id])
        for packed in self._packed.values():
            packed.promote(id)

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        for packed in self._packed.values():
            packed.discard(id)

    def wake(self) -> None:
        self._events.append(WOKEN)

    def next_event(self) -> Event:
        while not self._events:
            self._join()
            ready = [role for role, packed in self._packed.items() if packed.jobs]
            if not ready:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            self._step(min(ready, key=lambda role: role == TARGET))
        return self._events.popleft()

    def _join(self) -> None:
        for job in list(self._waiting.values()):
            packed = self._packed[role_of(job)]
            if packed.accepts(job):
                packed.add(self._waiting.pop(job.id))

    def _step(self, role: str) -> None:
        """Run one forward for all that have joined."""
        name, packed, start = _name(role), self._packed[role], self._now
        forward = packed.begin(packed.max_tokens)
        packed.run(forward)
        events = packed.finish(forward)
        self._now = start + self._times[role](forward.num_rows)
        self.usage[name].since = start
        for number, (job, context, event) in enumerate(events):
            self.usage[name].end(self._now if number else start, self._now, event)
            self._events.append(event)
            if self.log is not None:
                self.log.append(span(name, role, job, context, start, self._now, event))

    def _is_computing(self, name: str) -> bool:  # noqa: ARG002
        return False  # time passes in a forward alone

    def _assign(self, name: str, job: Job) -> None:
        raise RuntimeError(f"job {job.id} on {name}: jobs share forwards instead")

    def _cancel_job(self, name: str, id: int) -> None:
        raise RuntimeError(f"job {id} on {name}: jobs share forwards instead")

    def _on_worker_death(self, name: str) -> None:
        """Servers of virtual time are only closed."""


def _name(role: str) -> str:
    return f"{TARGET}-1" if role == TARGET else role
