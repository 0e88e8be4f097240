"""A fleet in virtual time: a heap of forwards, and a clock that jumps from one event to the next.

The servers are the ones that could run for real. A model that waits instead of computing is given a recorder,
which adds up the waits; the sum is the duration of its forward. Time may be float or, for exact results, Fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor
from random import Random

from dsi.core.messages import TARGET, WOKEN, Draft, Drafted, DraftedLevel, Event, Failed, Job, Time
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import DIED, BaseFleet
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work


class WaitRecorder:
    """A cancel flag that never waits: it adds up how long it was asked to."""

    def __init__(self) -> None:
        self.seconds: Time = 0

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: Time) -> bool:
        self.seconds = self.seconds + timeout
        return False

    def read(self) -> Time:
        """Return the sum, and start again from 0."""
        seconds, self.seconds = self.seconds, 0
        return seconds


@dataclass
class SimulatedForward:
    """The forward that a server is computing, and the job that it belongs to."""

    job: Job
    events: Iterator[Event]
    context: TokenSequence
    waits: WaitRecorder = field(default_factory=WaitRecorder)
    event: Event | None = None  # in which it will end; None once cancelled
    start: Time = 0
    end: Time = 0
    arrival: Time = 0  # when the message about its end arrives
    slowdown: Time = 1  # by contention


@dataclass(frozen=True)
class Outage:
    """A server fails at `down`, which is detected `notice` later, and is available again at `back`."""

    down: Time
    back: Time
    notice: Time = 0

    def __post_init__(self) -> None:
        if self.notice < 0 or self.back < self.down + self.notice:
            raise ValueError(f"down at {self.down}, noticed {self.notice} later, back at {self.back}: must be in order")


Outages = Mapping[str, Iterable[Outage]]  # by server, each in order of time, possibly endless
Transition = Callable[[str], None]  # a server fails, is detected to have failed, or recovers


class SimulatedFleet(BaseFleet):
    """Simulates servers, their network, contention and outages.

    With `cancel_points`, a cancelled forward frees its server at the next of so many; with 0, at once.
    `drafter_cancel_points` are those of drafters, where they differ.

    `network` is the latency of a message, each way: of all servers, or by server, 0 for those not named. It varies
    uniformly by the share `network_jitter` to either side, but the messages of one server stay in order.
    `contention` is by what share each other busy target slows a target's forward, for as long as both compute. With
    `thread_pool`, a server that has answered takes the next queued job at once, as a thread pool does; without, only
    after its answer was handled, which may have cancelled that job. `fails` decides for each forward of a job
    whether it fails. A server that recovers from one of its `outages` has an empty KV cache: a draft fails at once
    while there is no drafter, and a verification waits for a target.
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
        super().__init__(servers, log)
        delays = network if isinstance(network, Mapping) else dict.fromkeys(self._servers, network)
        if cancel_points < 0 or min(delays.values(), default=0) < 0 or contention < 0:
            raise ValueError(
                f"cancel points {cancel_points}, network {network}, contention {contention}: must be at least 0"
            )
        if unknown := {*delays, *(outages or {})} - self._servers.keys():
            raise ValueError(f"there is no server {min(unknown)!r}")
        if not 0 <= network_jitter < 1:
            raise ValueError(f"network jitter {network_jitter}: must be at least 0 and below 1")
        self.outages = 0  # so far
        self._delays, self._contention = delays, contention
        self._cancel_points = cancel_points, cancel_points if drafter_cancel_points is None else drafter_cancel_points
        self._network_jitter, self._rng = network_jitter, Random(seed)
        self._thread_pool, self._fails = thread_pool, fails
        self._forwards: dict[str, SimulatedForward] = {}
        self._heap: list[tuple[Time, int, int, str, SimulatedForward | Transition]] = []
        self._order = count()
        self._now: Time = 0
        self._undetected: set[str] = set()  # failed servers whose failure was not detected yet
        self._outages = {name: iter(schedule) for name, schedule in (outages or {}).items()}
        for name in self._outages:
            self._schedule_outage(name)

    def now(self) -> Time:
        return self._now

    def _cancel_job(self, name: str, id: int) -> None:  # noqa: ARG002
        """Stop the forward at its next cancel point after the message has arrived."""
        forward = self._forwards.get(name)
        if forward is None or forward.event is None:
            return  # it has answered, or was cancelled before
        arrival = self._now + self._delay(name)
        forward.event, forward.end = None, self._stop_time(forward, arrival)
        self._schedule_end(name, forward)
        self._apply_contention()

    def kill(self, name: str, cause: str = DIED) -> None:
        self._outages.pop(name, None)  # it does not recover
        super().kill(name, cause)

    def _on_worker_death(self, name: str) -> None:
        if forward := self._forwards.pop(name, None):
            forward.event = None
            self._record_forward(name, forward, max(self._now, forward.start))
            self._apply_contention()

    def _is_computing(self, name: str) -> bool:
        return name in self._forwards

    def wake(self) -> None:
        self._events.append(WOKEN)

    def next_event(self) -> Event:
        self._start_jobs()
        while not self._events:
            if not self._heap or not self._scheduler.has_jobs:
                raise RuntimeError("the fleet has nothing to do: no event will come")
            when, _, _, name, entry = heappop(self._heap)
            if not isinstance(entry, SimulatedForward):
                if name in self._outages:  # else it was killed for good
                    self._now = when
                    entry(name)
            elif self._forwards.get(name) is entry and when == entry.arrival:  # else it was rescheduled
                self._now = when
                self._end_forward(name, entry)
        return self._events.popleft()

    def _assign(self, name: str, job: Job) -> None:
        if name in self._undetected:
            return  # the job fails when the failure is detected
        waits = WaitRecorder()
        events = work(job, self._servers[name], waits)
        forward = self._forwards[name] = SimulatedForward(job, events, job.context, waits)
        start = self.usage[name].since = self._now + self._delay(name)
        self._start_forward(name, forward, start)

    def _start_forward(self, name: str, forward: SimulatedForward, start: Time) -> bool:
        """Start the next forward of a job, if it has one."""
        forward.event = next(forward.events, None)
        if forward.event is None:
            return False
        if self._fails is not None and self._fails(forward.job):
            forward.event, forward.events = Failed(forward.job.id, "the forward failed"), iter(())
        forward.start, forward.end, forward.slowdown = start, start + forward.waits.read(), 1
        self._schedule_end(name, forward)
        self._apply_contention()
        return True

    def _schedule_end(self, name: str, forward: SimulatedForward) -> None:
        """Push the end of a forward; at equal times drafts come first, so that a verification finds them."""
        after_drafts = not isinstance(forward.event, Drafted | DraftedLevel)
        forward.arrival = max(forward.end + self._delay(name), self._now)
        heappush(self._heap, (forward.arrival, after_drafts, next(self._order), name, forward))

    def _delay(self, name: str) -> Time:
        """Draw the latency of the next message to or from this server."""
        delay = self._delays.get(name, 0)
        if delay and self._network_jitter:
            return delay * (1 + self._network_jitter * self._rng.uniform(-1, 1))
        return delay

    def _apply_contention(self) -> None:
        """Reschedule the forwards of the targets that compute now by how many they are."""
        if not self._contention:
            return
        busy = [
            (name, forward)
            for name, forward in self._forwards.items()
            if self._servers[name].role == TARGET and forward.end > self._now
        ]
        slowdown = 1 + self._contention * (len(busy) - 1)
        for name, forward in busy:
            if forward.event is not None and forward.slowdown != slowdown:  # the end of a cancelled one is fixed
                resumed = max(self._now, forward.start)
                forward.end = resumed + (forward.end - resumed) / forward.slowdown * slowdown
                forward.slowdown = slowdown
                self._schedule_end(name, forward)

    def _end_forward(self, name: str, forward: SimulatedForward) -> None:
        event = forward.event
        self._record_forward(name, forward, forward.end)
        if event is not None:
            self._events.append(event)
        if isinstance(event, Drafted):
            forward.context = forward.context.then(event.token)
        if event is None or not self._start_forward(name, forward, forward.end):
            del self._forwards[name]
            self._apply_contention()
            self._scheduler.release(name)
            if self._thread_pool or event is None:
                self._start_jobs()

    def _stop_time(self, forward: SimulatedForward, cancelled: Time) -> Time:
        """Return when a forward stops that is cancelled at this time."""
        if cancelled >= forward.end:  # its answer is on the way; a draft goes on until it is cancelled
            return cancelled if isinstance(forward.job, Draft) else forward.end
        cancel_points = self._cancel_points[isinstance(forward.job, Draft)]
        if not cancel_points:
            return cancelled
        part = (forward.end - forward.start) / cancel_points
        parts = floor((cancelled - forward.start) / part) + 1
        return min(forward.end, forward.start + parts * part)

    def _schedule_outage(self, name: str) -> None:
        """Push the server's next outage; a forward that ends at the very time it begins still counts."""
        outage = next(self._outages[name], None)
        if outage is not None:
            for when, transition in (
                (outage.down, self._fail),
                (outage.down + outage.notice, self._detect_failure),
                (outage.back, self._recover),
            ):
                heappush(self._heap, (max(when, self._now), 2, next(self._order), name, transition))

    def _fail(self, name: str) -> None:
        self.outages += 1
        self._undetected.add(name)
        self._on_worker_death(name)
        if not self._servers[name].prefixes.shared_kv:
            self._servers[name].prefixes.entries.clear()

    def _detect_failure(self, name: str) -> None:
        """Fail the server's job; without a drafter texts go on, without a target they wait for one."""
        self._undetected.discard(name)
        self._scheduler.remove(name, restarts=self._servers[name].role == TARGET)
        self._events.extend(self._scheduler.orphaned())

    def _recover(self, name: str) -> None:
        self._scheduler.add(name, self._servers[name].role)
        self._schedule_outage(name)
        self._start_jobs()

    def _record_forward(self, name: str, forward: SimulatedForward, end: Time) -> None:
        self._record(name, forward.job, forward.context, forward.start, end, forward.event)
