"""A fleet in virtual time: a heap of forwards, and a clock that jumps from one end to the next.

The servers are the ones that could run for real. Asked to wait, they are given a meter that writes down
how long instead; the sum is when their event is due. Time may be float or, for exact results, Fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor
from random import Random

from dsi.core.messages import TARGET, WOKEN, Draft, Drafted, Event, Failed, Job, Time
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import BaseFleet
from dsi.fleets.spans import Span, span
from dsi.fleets.worker import Server, work


class WaitRecorder:
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
class SimulatedForward:
    """What a server is computing now."""

    job: Job
    events: Iterator[Event]
    context: TokenSequence
    meter: WaitRecorder = field(default_factory=WaitRecorder)
    event: Event | None = None  # how it will end; None once cancelled
    start: Time = 0
    end: Time = 0
    due: Time = 0  # when word of its end arrives
    pace: Time = 1  # how many times as long it takes now as by itself


@dataclass(frozen=True)
class Outage:
    """A server falls silent at `down`; that is noticed `notice` later, and at `back` it is there again."""

    down: Time
    back: Time
    notice: Time = 0

    def __post_init__(self) -> None:
        if self.notice < 0 or self.back < self.down + self.notice:
            raise ValueError(f"down at {self.down}, noticed {self.notice} later, back at {self.back}: must be in order")


Outages = Mapping[str, Iterable[Outage]]  # by server, each in order of time, and without end if you like
Change = Callable[[str], None]  # what happens to a server that falls or comes back


class SimulatedFleet(BaseFleet):
    """`pieces`: a cancelled forward frees its server at once (0), or when the current one of so many ends;
    `drafter_pieces`, the same for drafters, where those differ.

    `network` is the delay of a message, each way: of all servers, or of each by its name, where those not
    named have none. It varies evenly by the share `network_jitter` to either side, but messages of a
    server stay in order. `contention` is by what share each other busy target slows a target's forward, for
    as long as both compute. An `eager` server that has answered takes the next waiting job at
    once, as a thread pool does, and not only after its answer has been handled, when that job may have gone
    stale. `fails` is asked at each forward of a job whether that one ends in failure. `outages` are when
    servers fail and come back, having forgotten all they read: a draft fails at once while there is no
    drafter, and a verification waits for a target.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        cancel_points: int = 0,
        drafter_cancel_points: int | None = None,
        network: Time | Mapping[str, Time] = 0,
        network_jitter: float = 0,
        contention: float = 0,
        thread_pool: bool = False,
        fails: Callable[[Job], bool] | None = None,
        outages: Outages | None = None,
        log: list[Span] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(servers)
        delays = network if isinstance(network, Mapping) else dict.fromkeys(self._servers, network)
        if cancel_points < 0 or min(delays.values(), default=0) < 0 or contention < 0:
            raise ValueError(
                f"cancel points {cancel_points}, network {network}, contention {contention}: must be at least 0"
            )
        if strangers := {*delays, *(outages or {})} - self._servers.keys():
            raise ValueError(f"there is no server {min(strangers)!r}")
        if not 0 <= network_jitter < 1:
            raise ValueError(f"network jitter {network_jitter}: must be at least 0 and below 1")
        self.outages = 0  # that have begun
        self._delays, self._contention = delays, contention
        self._cancel_points = cancel_points, cancel_points if drafter_cancel_points is None else drafter_cancel_points
        self._network_jitter, self._dice = network_jitter, Random(seed)
        self._thread_pool, self._fails, self._log = thread_pool, fails, log
        self._forwards: dict[str, SimulatedForward] = {}
        self._agenda: list[tuple[Time, int, int, str, SimulatedForward | Change]] = []
        self._order = count()
        self._now: Time = 0
        self._silent: set[str] = set()  # servers that are down, which nobody has noticed
        self._outages = {name: iter(each) for name, each in (outages or {}).items()}
        for name in self._outages:
            self._foresee(name)

    def now(self) -> Time:
        return self._now

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        """The server hears of it after the network's delay, and is free where its forward can end."""
        forward = self._forwards.get(name)
        if forward is None or forward.event is None:
            return  # it has answered, or is already stopping
        heard = self._now + self._delay(name)
        forward.event, forward.end = None, self._can_stop(forward, heard)
        self._due(name, forward)
        self._crowd()

    def kill(self, name: str) -> None:
        self._outages.pop(name, None)  # it will not come back
        super().kill(name)

    def _on_worker_death(self, name: str) -> None:
        if forward := self._forwards.pop(name, None):
            forward.event = None
            self._record(name, forward, max(self._now, forward.start))
            self._crowd()

    def _computes(self, name: str) -> bool:
        return name in self._forwards

    def wake(self) -> None:
        self._events.append(WOKEN)

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._agenda or not self._scheduler.open:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            when, _, _, name, what = heappop(self._agenda)
            if not isinstance(what, SimulatedForward):
                if name in self._outages:  # else it has been killed for good
                    self._now = when
                    what(name)
            elif self._forwards.get(name) is what and when == what.due:
                self._now = when
                self._finish(name, what)
        return self._events.popleft()

    def _assign(self, name: str, job: Job) -> None:
        if name in self._silent:
            return  # it will never be answered, and is asked for again when that is noticed
        meter = WaitRecorder()
        forward = self._forwards[name] = SimulatedForward(
            job, work(job, self._servers[name], meter), job.context, meter
        )
        start = self.usage[name].since = self._now + self._delay(name)
        self._compute(name, forward, start)

    def _compute(self, name: str, forward: SimulatedForward, start: Time) -> bool:
        """Begin the next forward of a job, if it has one."""
        forward.event = next(forward.events, None)
        if forward.event is None:
            return False
        if self._fails is not None and self._fails(forward.job):
            forward.event, forward.events = Failed(forward.job.id, "the forward failed"), iter(())
        forward.start, forward.end, forward.pace = start, start + forward.meter.read(), 1
        self._due(name, forward)
        self._crowd()
        return True

    def _due(self, name: str, forward: SimulatedForward) -> None:
        """At equal times guesses come first: a verdict finds a guess that is just in time."""
        late = not isinstance(forward.event, Drafted)
        forward.due = max(forward.end + self._delay(name), self._now)
        heappush(self._agenda, (forward.due, late, next(self._order), name, forward))

    def _delay(self, name: str) -> Time:
        """Of the next message to or from this server."""
        delay = self._delays.get(name, 0)
        if delay and self._network_jitter:
            return delay * (1 + self._network_jitter * self._dice.uniform(-1, 1))
        return delay

    def _crowd(self) -> None:
        """Targets that compute at this time slow one another down; one that is stopped just now does not."""
        if not self._contention:
            return
        busy = [
            (name, forward)
            for name, forward in self._forwards.items()
            if self._servers[name].role == TARGET and forward.end > self._now
        ]
        pace = 1 + self._contention * (len(busy) - 1)
        for name, forward in busy:
            if forward.event is not None and forward.pace != pace:  # one that is to stop does so as foreseen
                at = max(self._now, forward.start)
                forward.end, forward.pace = at + (forward.end - at) / forward.pace * pace, pace
                self._due(name, forward)

    def _finish(self, name: str, forward: SimulatedForward) -> None:
        event = forward.event
        self._record(name, forward, forward.end)
        if event is not None:
            self._events.append(event)
        if isinstance(event, Drafted):
            forward.context = forward.context.then(event.token)
        if event is None or not self._compute(name, forward, forward.end):
            del self._forwards[name]
            self._crowd()
            self._scheduler.release(name)
            if self._thread_pool or event is None:
                self._start_jobs()

    def _can_stop(self, forward: SimulatedForward, heard: Time) -> Time:
        """When a forward ends that is told at `heard` to stop."""
        if heard >= forward.end:  # the answer is on its way; a stream goes on until it hears
            return heard if isinstance(forward.job, Draft) else forward.end
        cancel_points = self._cancel_points[isinstance(forward.job, Draft)]
        if not cancel_points:
            return heard
        piece = (forward.end - forward.start) / cancel_points
        done = floor((heard - forward.start) / piece) + 1
        return min(forward.end, forward.start + done * piece)

    def _foresee(self, name: str) -> None:
        """The server's next outage; what ends at the very time at which it begins is still told."""
        outage = next(self._outages[name], None)
        if outage is not None:
            for when, change in (
                (outage.down, self._fall),
                (outage.down + outage.notice, self._miss),
                (outage.back, self._return),
            ):
                heappush(self._agenda, (max(when, self._now), 2, next(self._order), name, change))

    def _fall(self, name: str) -> None:
        """The server dies, and nobody knows."""
        self.outages += 1
        self._silent.add(name)
        self._on_worker_death(name)
        if not self._servers[name].prefixes.shared_kv:
            self._servers[name].prefixes.pages.clear()

    def _miss(self, name: str) -> None:
        """Now they know. Without drafters a text goes on; without targets it can only wait for one."""
        self._silent.discard(name)
        self._scheduler.remove(name, returns=self._servers[name].role == TARGET)
        self._events.extend(self._scheduler.stranded())

    def _return(self, name: str) -> None:
        self._scheduler.add(name, self._servers[name].role)
        self._foresee(name)
        self._start_jobs()

    def _record(self, name: str, forward: SimulatedForward, end: Time) -> None:
        self.usage[name].end(forward.start, end, forward.event)
        if self._log is not None:
            role = self._servers[name].role
            entry = span(name, role, forward.job, forward.context, forward.start, end, forward.event)
            self._log.append(entry)
