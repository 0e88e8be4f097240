"""A fleet in virtual time: a heap of forwards, and a clock that jumps from one end to the next.

The servers are the ones that could run for real. Asked to wait, they are given a meter that writes down
how long instead; the sum is when their event is due. Time may be float or, for exact results, Fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor

from dsi.core.context import Context
from dsi.core.messages import TARGET, WOKEN, Draft, Drafted, Event, Failed, Job
from dsi.fleets.crew import Crew
from dsi.fleets.spans import Span, span
from dsi.fleets.work import Server, work
from dsi.models.wait import Time


class Meter:
    """A flag that never waits: it only adds up for how long it was asked to."""

    def __init__(self) -> None:
        self.seconds: Time = 0

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: Time) -> bool:
        self.seconds = self.seconds + timeout
        return False

    def read(self) -> Time:
        seconds, self.seconds = self.seconds, 0
        return seconds


@dataclass
class Forward:
    """What a server is computing now."""

    job: Job
    events: Iterator[Event]
    context: Context
    meter: Meter = field(default_factory=Meter)
    event: Event | None = None  # how it will end; None once cancelled
    start: Time = 0
    end: Time = 0


class SimulatedFleet(Crew):
    """`pieces`: a cancelled forward frees its server at once (0), or when the current one of so many ends.

    `network` is the delay of a message, each way. `contention` is by what share each other busy target
    slows a target's forward, as it stands when the forward begins. An `eager` server that has answered
    takes the next waiting job at once, as a thread pool does, and not only after its answer has been
    handled, when that job may have gone stale. `fails` is asked at each forward of a
    job whether that one ends in failure.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        pieces: int = 0,
        network: Time = 0,
        contention: float = 0,
        eager: bool = False,
        fails: Callable[[Job], bool] | None = None,
        log: list[Span] | None = None,
    ) -> None:
        if pieces < 0 or network < 0 or contention < 0:
            raise ValueError(
                f"pieces {pieces}, network {network}, contention {contention}: must be at least 0"
            )
        super().__init__(servers)
        self._pieces, self._network, self._contention = pieces, network, contention
        self._eager, self._fails, self._log = eager, fails, log
        self._forwards: dict[str, Forward] = {}
        self._agenda: list[tuple[Time, bool, int, str, Forward]] = []
        self._order = count()
        self._now: Time = 0

    def now(self) -> Time:
        return self._now

    def _stop(self, name: str, id: int) -> None:  # noqa: ARG002
        """The server hears of it after the network's delay, and is free where its forward can end."""
        forward = self._forwards.get(name)
        if forward is None or forward.event is None:
            return  # it has answered, or is already stopping
        heard = self._now + self._network
        forward.event, forward.end = None, self._can_stop(forward, heard)
        self._due(name, forward)

    def _lose(self, name: str) -> None:
        if forward := self._forwards.pop(name, None):
            forward.event = None
            self._record(name, forward, max(self._now, forward.start))

    def wake(self) -> None:
        self._ready.append(WOKEN)

    def next_event(self) -> Event:
        self._begin()
        while not self._ready:
            if not self._agenda:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            when, _, _, name, forward = heappop(self._agenda)
            if self._forwards.get(name) is forward and when == forward.end + self._network:
                self._now = when
                self._finish(name, forward)
        return self._ready.popleft()

    def _set_to(self, name: str, job: Job) -> None:
        meter = Meter()
        forward = self._forwards[name] = Forward(
            job, work(job, self._servers[name], meter), job.context, meter
        )
        self._compute(name, forward, self._now + self._network)

    def _compute(self, name: str, forward: Forward, start: Time) -> bool:
        """Begin the next forward of a job, if it has one."""
        forward.event = next(forward.events, None)
        if forward.event is None:
            return False
        if self._fails is not None and self._fails(forward.job):
            forward.event, forward.events = Failed(forward.job.id, "the forward failed"), iter(())
        forward.start, forward.end = start, start + forward.meter.read() * self._slowdown(name)
        self._due(name, forward)
        return True

    def _due(self, name: str, forward: Forward) -> None:
        """At equal times guesses come first: a verdict finds a guess that is just in time."""
        late = not isinstance(forward.event, Drafted)
        heappush(self._agenda, (forward.end + self._network, late, next(self._order), name, forward))

    def _slowdown(self, name: str) -> Time:
        if not self._contention or self._servers[name].role != TARGET:
            return 1
        others = sum(self._servers[n].role == TARGET for n in self._dispatch.working if n != name)
        return 1 + self._contention * others

    def _finish(self, name: str, forward: Forward) -> None:
        event = forward.event
        self._record(name, forward, forward.end)
        if event is not None:
            self._ready.append(event)
        if isinstance(event, Drafted):
            forward.context = forward.context.then(event.token)
        if event is None or not self._compute(name, forward, forward.end):
            del self._forwards[name]
            self._dispatch.release(name)
            if self._eager or event is None:
                self._begin()

    def _can_stop(self, forward: Forward, heard: Time) -> Time:
        """When a forward ends that is told at `heard` to stop."""
        if heard >= forward.end:  # the answer is on its way; a stream goes on until it hears
            return heard if isinstance(forward.job, Draft) else forward.end
        if not self._pieces:
            return heard
        piece = (forward.end - forward.start) / self._pieces
        done = floor((heard - forward.start) / piece) + 1
        return min(forward.end, forward.start + done * piece)

    def _record(self, name: str, forward: Forward, end: Time) -> None:
        self.busy[name] = self.busy[name] + (end - forward.start)
        if self._log is not None:
            role = self._servers[name].role
            entry = span(name, role, forward.job, forward.context, forward.start, end, forward.event)
            self._log.append(entry)
