"""The one loop: any number of requests over one fleet, whatever the fleet is made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Protocol

from dsi.core.adaptive import LatencyMonitor
from dsi.core.generation import Generation
from dsi.core.messages import Draft, Drafted, Event, Failed, Job, Step, Time, Verified, Verify
from dsi.core.policies import Load
from dsi.core.request import Completion, Request
from dsi.core.scoring import Scoring
from dsi.core.sequence import Tokens
from dsi.core.stats import Overlap, ServerUsages, overlap

FAILURES = 32  # of verifications in a row, without a token between them, that a request survives


class Fleet(Protocol):
    """Where jobs run. Cancelling is advice: a late answer is harmless.

    All but `wake` is for one thread; after `wake` the next event is told at once, if only `WOKEN`.
    """

    def start(self, job: Job) -> None: ...
    def promote(self, id: int) -> None: ...
    def cancel(self, id: int) -> None: ...
    def next_event(self) -> Event: ...
    def wake(self) -> None: ...
    def now(self) -> Time: ...
    def tolls(self) -> ServerUsages: ...
    def close(self) -> None: ...


class FleetError(RuntimeError):
    """The fleet cannot finish a request."""


class Run:
    """One request under way."""

    def __init__(self, generation: Generation | Scoring, fleet: Fleet) -> None:
        self.generation = generation
        self._fleet = fleet
        self.began: Time = fleet.now()
        self.alone = True  # whether no other request has run beside it
        self.leads: list[int] = []  # how far the guesses were ahead each time the text had grown
        self._before = fleet.tolls()
        self._after: tuple[Time, ServerUsages] | None = None  # how long it took, and what the servers had done
        self.tokens: list[int] = []
        self.times: list[Time] = []
        self.turns: list[Time] = []  # when each decision was taken
        self.failures = 0
        self.error: FleetError | None = None

    @property
    def done(self) -> bool:
        return self.generation.done

    def end(self) -> None:
        """What the servers do from now on is not for this request."""
        self._after = self._after or self._so_far()

    def _so_far(self) -> tuple[Time, ServerUsages]:
        return self._fleet.now() - self.began, self._fleet.tolls()

    @property
    def overlap(self) -> Overlap:
        """What overlapping forwards gave and cost, up to now if it is not done."""
        times, made = tuple(self.times), self.generation  # which another thread may add to
        took, tolls = self._after or self._so_far()
        origins = made.origins[: len(times)]
        return overlap(times, origins, made.tally, self.leads, self._before, tolls, took, self.alone)

    def completion(self) -> Completion:
        if self.error is not None:
            raise self.error
        reason = self.generation.finish_reason
        if reason is None:
            raise RuntimeError("the request is still running")
        return Completion(
            tuple(self.tokens),
            reason,
            tuple(self.times),
            self.generation.tally,
            tuple(self.generation.origins),
            tuple(self.generation.notes),
            tuple(zip(self.turns, self.generation.decisions)),
            self.overlap,
        )


class EngineLoop:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._ids = count()
        self.crowd = Load()
        self._owners: dict[int, Run] = {}  # whose each open job is
        self._verifying: set[int] = set()  # which of them are verifications
        self._running: dict[Run, None] = {}  # in the order in which they came
        self.pulse: LatencyMonitor | None = None  # somebody wants to know how long forwards take
        self._since: dict[int, Time] = {}  # since when the next word on each open job is awaited

    def submit(self, request: Request) -> Run:
        """A request for no new token with notes is one for what the target thinks of the prompt."""
        run = Run(self._machine(request), self.fleet)
        self._running[run] = None
        if len(self._running) > 1:
            for each in self._running:
                each.alone = False
        self.crowd.requests = len(self._running)
        self._obey(run, run.generation.start())
        return run

    def _machine(self, request: Request) -> Generation | Scoring:
        if request.max_new_tokens == 0 and request.sampling.logprobs is not None:
            return Scoring(request.prompt, request.sampling, self._ids)
        return Generation(
            request.prompt,
            request.max_new_tokens,
            request.policy,
            stop=request.stop,
            sampling=request.sampling,
            ids=self._ids,
        )

    def cancel(self, run: Run) -> None:
        """Nobody wants this text any longer."""
        self._obey(run, run.generation.stop())

    def step(self) -> tuple[Run, Tokens] | None:
        """Take one event; returns the request it belongs to and the tokens it made certain."""
        event = self.fleet.next_event()
        run = self._owners.get(event.id)
        if run is None:
            return None
        if isinstance(event, Failed) and isinstance(run.generation.open.get(event.id), Verify):
            self._count_failure(run, event)
        if self.pulse is not None:
            self._time(self.pulse, run.generation.open.get(event.id), event)
        step = run.generation.handle(event)
        if event.id not in run.generation.open:
            self._forget(event.id)
        self._obey(run, step)
        self._share_out()
        return run, step.emit

    def tokens(self, request: Request) -> Iterator[Tokens]:
        """The tokens of one request, as they become certain."""
        run = self.submit(request)
        yield from self.follow(run)
        run.completion()

    def follow(self, run: Run) -> Iterator[Tokens]:
        """The tokens of a request under way; one that is not read to its end is cancelled."""
        seen = 0
        try:
            while not run.done:
                self.step()  # which may be another request's
                if len(run.tokens) > seen:
                    seen, fresh = len(run.tokens), run.tokens[seen:]
                    yield tuple(fresh)
            if len(run.tokens) > seen:
                yield tuple(run.tokens[seen:])
        finally:
            if not run.done:
                self.cancel(run)

    def run(self, *requests: Request) -> list[Completion]:
        """All of these at once, to their ends."""
        runs = [self.submit(request) for request in requests]
        for run in runs:
            while not run.done:
                self.step()  # which may be another's
        return [run.completion() for run in runs]

    def _share_out(self) -> None:
        """A target has nothing to do: the next request in turn need not wait for more guesses."""
        if self.crowd.requests < 2 or not self.crowd.idle:
            return
        for run in [run for run in self._running if run.generation.waits]:
            if not self.crowd.idle:
                return
            self._running.pop(run)  # and to the end of the line
            self._running[run] = None
            self._obey(run, run.generation.look())

    def _time(self, pulse: LatencyMonitor, job: Job | None, event: Event) -> None:
        since = self._since.get(event.id)
        if since is None:
            return
        now = self.fleet.now()
        match job, event:
            case Draft(), Drafted():
                pulse.guessed(job.model, float(now - since))
                self._since[event.id] = now
            case Verify(), Verified():
                pulse.verified(job.width, float(now - since))

    def _forget(self, id: int) -> None:
        self._since.pop(id, None)
        self._owners.pop(id, None)
        self._verifying.discard(id)

    def _obey(self, run: Run, step: Step) -> None:
        for id in step.cancel:
            self._forget(id)
            self.fleet.cancel(id)
        for id in step.promote:
            self.fleet.promote(id)
        for job in step.start:
            self._owners[job.id] = run
            if self.pulse is not None and (isinstance(job, Draft) or not self._verifying):
                self._since[job.id] = self.fleet.now()
            if isinstance(job, Verify):
                self._verifying.add(job.id)
            self.fleet.start(job)
        if fresh := len(run.generation.decisions) - len(run.turns):
            run.turns += [self.fleet.now() - run.began] * fresh
        if step.emit:
            run.failures = 0
            run.tokens += step.emit
            run.times += [self.fleet.now() - run.began] * len(step.emit)
            if not run.done:
                root, tip = run.generation.reached
                run.leads.append(tip - root)
        if run.done:
            run.end()
            self._running.pop(run, None)
        self.crowd.requests, self.crowd.verifying = len(self._running), len(self._verifying)

    def _count_failure(self, run: Run, event: Failed) -> None:
        run.failures += 1
        if run.failures > FAILURES:
            reason = f"{run.failures} verifications of one request failed in a row, the last: {event.reason}"
            run.error = FleetError(reason)
            self.cancel(run)
