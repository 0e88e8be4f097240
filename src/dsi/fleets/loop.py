"""The engine's loop: any number of requests over one fleet, whatever the fleet is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dsi.core.generation import Generation
from dsi.core.messages import Event, Failed, Job, Step, Time, Verify
from dsi.core.policies import Load
from dsi.core.request import Completion, Request, ScoreRequest, VerifyRequest
from dsi.core.sequence import Tokens
from dsi.core.single_forward import Scoring, SingleForward, Verification
from dsi.core.stats import Overlap, ServerUsages, overlap

AnyRequest = Request | ScoreRequest | VerifyRequest
MAX_FAILURES = 32  # of verifications in a row, without a token between them, that a request survives


class Fleet(Protocol):
    """Where jobs run. Cancelling is advice: a late answer is harmless.

    Only one thread may call it, but for `wake`: after that, `next_event` returns at once, if only `WOKEN`.
    """

    job_ids: Iterator[int]  # of all loops: a worker may have been told to cancel an id that was given before
    num_requests: int  # that are running: the loop sets it
    most_verified_unseen: int  # draft tokens of a tree that can be verified in the same forward while it is drafted

    def start(self, job: Job) -> None: ...
    def promote(self, id: int) -> None: ...
    def cancel(self, id: int) -> None: ...
    def next_event(self) -> Event: ...
    def wake(self) -> None: ...
    def now(self) -> Time: ...
    def server_usage(self) -> ServerUsages: ...
    def close(self) -> None: ...


class FleetError(RuntimeError):
    """The fleet cannot finish a request."""


class ActiveRequest:
    """A request in the loop: its state machine, and when its tokens came."""

    def __init__(self, generation: Generation | SingleForward, fleet: Fleet) -> None:
        self.generation = generation
        self._fleet = fleet
        self.started: Time = fleet.now()
        self.alone = True  # whether no other request has run beside it
        self.leads: list[int] = []  # draft tokens ahead of the verified text, each time it had grown
        self._usage_before = fleet.server_usage()
        self._end: tuple[Time, ServerUsages] | None = None  # how long it took, and the usage of servers by then
        self.tokens: list[int] = []
        self.times: list[Time] = []
        self.decision_times: list[Time] = []
        self.failures = 0
        self.error: FleetError | None = None

    @property
    def done(self) -> bool:
        return self.generation.done

    def end(self) -> None:
        """Server usage from now on does not count for this request."""
        self._end = self._end or self._so_far()

    def _so_far(self) -> tuple[Time, ServerUsages]:
        return self._fleet.now() - self.started, self._fleet.server_usage()

    @property
    def overlap(self) -> Overlap:
        """What overlapping forwards gained and cost, up to now while it runs."""
        elapsed, usage = self._end or self._so_far()
        origins, tally = self.generation.origins, self.generation.tally
        return overlap(self.times, origins, tally, self.leads, self._usage_before, usage, elapsed, self.alone)

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
            tuple(self.generation.top_logprobs),
            tuple(zip(self.decision_times, self.generation.decisions)),
            self.overlap,
        )


def _state_machine(request: AnyRequest, fleet: Fleet) -> Generation | SingleForward:
    if isinstance(request, ScoreRequest):
        return Scoring(request, fleet.job_ids)
    if isinstance(request, VerifyRequest):
        return Verification(request, fleet.job_ids)
    return Generation(
        request.prompt,
        request.max_new_tokens,
        request.policy,
        stop=request.stop,
        sampling=request.sampling,
        drafter_contexts=request.drafter_contexts,
        streams=request.streams,
        most_verified_unseen=fleet.most_verified_unseen,
        ids=fleet.job_ids,
    )


class EngineLoop:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.load = Load()
        self._owners: dict[int, ActiveRequest] = {}  # the request of each open job
        self._verifying: set[int] = set()  # open verifications
        self._active: dict[ActiveRequest, None] = {}  # in the order in which targets are given to them

    def submit(self, request: AnyRequest) -> ActiveRequest:
        active = ActiveRequest(_state_machine(request, self.fleet), self.fleet)
        self._active[active] = None
        if len(self._active) > 1:
            for other in self._active:
                other.alone = False
        self.load.requests = self.fleet.num_requests = len(self._active)
        self._apply(active, active.generation.start())
        return active

    def cancel(self, active: ActiveRequest) -> None:
        """End a request before its time."""
        self._apply(active, active.generation.stop())

    def step(self) -> tuple[ActiveRequest, Tokens] | None:
        """Handle one event; return the request it belongs to and the tokens it verified."""
        event = self.fleet.next_event()
        active = self._owners.get(event.id)
        if active is None:
            return None
        generation = active.generation
        if isinstance(event, Failed) and isinstance(generation.job(event.id), Verify):
            self._count_failure(active, event)
        step = generation.handle(event)
        if generation.job(event.id) is None:
            self._forget(event.id)
        self._apply(active, step)
        self._replan_waiting()
        return active, step.emit

    def tokens(self, request: Request) -> Iterator[Tokens]:
        """Yield the tokens of one request as they are verified."""
        active = self.submit(request)
        yield from self.follow(active)
        active.completion()

    def follow(self, active: ActiveRequest) -> Iterator[Tokens]:
        """Yield the tokens of a submitted request; it is cancelled if the iterator is closed early."""
        num_yielded = 0
        try:
            while not active.done:
                self.step()  # which may be another request's
                if len(active.tokens) > num_yielded:
                    num_yielded, tokens = len(active.tokens), active.tokens[num_yielded:]
                    yield tuple(tokens)
            if len(active.tokens) > num_yielded:
                yield tuple(active.tokens[num_yielded:])
        finally:
            if not active.done:
                self.cancel(active)

    def run(self, *requests: AnyRequest) -> list[Completion]:
        """Run all of these at once, to their ends."""
        submitted = [self.submit(request) for request in requests]
        for active in submitted:
            while not active.done:
                self.step()  # which may be another's
        return [active.completion() for active in submitted]

    def _replan_waiting(self) -> None:
        """While a target is idle, let the next request in turn verify its root without more draft tokens."""
        if self.load.requests < 2 or not self.load.idle or self.load.shared_spec is not None:
            return
        for active in [active for active in self._active if active.generation.root_unverified]:
            if not self.load.idle:
                return
            self._active.pop(active)  # and to the end of the line
            self._active[active] = None
            self._apply(active, active.generation.replan())

    def _forget(self, id: int) -> None:
        self._owners.pop(id, None)
        self._verifying.discard(id)

    def _apply(self, active: ActiveRequest, step: Step) -> None:
        """Pass the jobs of a step on to the fleet, and record its tokens."""
        for id in step.cancel:
            self._forget(id)
            self.fleet.cancel(id)
        for id in step.promote:
            self.fleet.promote(id)
        for job in step.start:
            self._start(active, job)
        if new := len(active.generation.decisions) - len(active.decision_times):
            active.decision_times += [self.fleet.now() - active.started] * new
        if step.emit:
            self._emit(active, step.emit)
        if active.done:
            active.end()
            self._active.pop(active, None)
        self.load.requests = self.fleet.num_requests = len(self._active)
        self.load.verifying = len(self._verifying)

    def _start(self, active: ActiveRequest, job: Job) -> None:
        self._owners[job.id] = active
        if isinstance(job, Verify):
            self._verifying.add(job.id)
        self.fleet.start(job)

    def _emit(self, active: ActiveRequest, tokens: Tokens) -> None:
        active.failures = 0
        active.tokens += tokens
        active.times += [self.fleet.now() - active.started] * len(tokens)
        if not active.done:
            verified, drafted = active.generation.progress
            active.leads.append(drafted - verified)

    def _count_failure(self, active: ActiveRequest, event: Failed) -> None:
        active.failures += 1
        if active.failures > MAX_FAILURES:
            reason = f"{active.failures} verifications of one request failed in a row, the last: {event.reason}"
            active.error = FleetError(reason)
            self.cancel(active)
