"""The thread that owns the engine: jobs go in as plain data, outputs come out, and no other thread touches it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, ClassVar, TypeVar

from dsi.core.messages import TARGET, Sampling, TopLogprobs
from dsi.core.request import Completion
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.spec import Decision, SpecConfig
from dsi.engine.engine import Engine
from dsi.fleets.loop import ActiveRequest, AnyRequest
from dsi.fleets.spans import Span
from dsi.server.errors import ApiError, no_target, queue_full, shutting_down
from dsi.server.fair_queue import FairQueue
from dsi.server.limits import Limits

log = logging.getLogger("dsi.server")

CHECK_SECONDS = 0.25  # between two checks for dead workers while no job runs
TRACE_INTERVAL = 0.04  # seconds between two outputs of a traced job while no token is generated
OUTPUT_INTERVAL = 0.001  # between two outputs of a job, for each that runs: to send one takes a share of the cores
MAX_OUTPUT_INTERVAL = 0.1  # however many run
MAX_SPANS = 10_000  # forwards of one job that are recorded
MAX_RETRY_SECONDS = 60  # clients wait no longer
FINISHED_WEIGHT = 0.1  # of a finished job in the average of their seconds
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GenerationJob:
    """One text to generate, as plain data; `deliver` gets its outputs, in the engine thread."""

    prompt: Tokens
    max_new_tokens: int  # 0: the prompt is only scored
    spec: SpecConfig
    sampling: Sampling
    deliver: Callable[[EngineOutput], object]
    prompt_logprobs: int | None = None  # score the prompt first, naming this many of the likeliest tokens
    trace: bool = False
    client: int = 0  # whose it is: the number of an API key
    stop_token_ids: Tokens = ()
    ignore_eos: bool = False


@dataclass(frozen=True, eq=False)
class VerificationJob:
    """A text to verify, as plain data; its one output has a token for each of the last `num_positions` prefixes."""

    prompt: Tokens
    num_positions: int
    prompt_length: int | None  # what the text began with; None: all before the positions
    sampling: Sampling
    deliver: Callable[[EngineOutput], object]
    client: int = 0
    trace: ClassVar = False
    max_new_tokens: ClassVar = 1


Job = GenerationJob | VerificationJob


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One drafter or target server of the fleet."""

    name: str
    role: str
    alive: bool
    deaths: Mapping[str, int]  # by cause
    restarts: int
    busy: float  # seconds

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "alive": self.alive,
            "restarts": self.restarts,
            "deaths": dict(self.deaths),
        }


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The queue and the servers at one moment; drafters come first."""

    running: int = 0
    waiting: int = 0
    accepts: bool = True  # False: the server is shutting down
    servers: tuple[ServerStatus, ...] = ()

    @property
    def has_target(self) -> bool:
        return any(server.role == TARGET and server.alive for server in self.servers)


def since(start: float, span: Span) -> Span:
    """A span with times from `start` on."""
    return replace(span, start=float(span.start) - start, end=float(span.end) - start)


@dataclass(frozen=True, slots=True)
class JobStats:
    """Final statistics of a job. Decisions count from its admission, token times from its last request."""

    completion: Completion
    clock_spans: Sequence[Span]  # by the fleet's clock
    admitted: float  # by the same
    queued: float  # seconds
    shared: bool  # whether another job ran at the same time
    servers: Sequence[str]

    @property
    def spans(self) -> list[Span]:
        """Its forwards, with times from its admission on: made on demand, since few traces are asked for."""
        return [since(self.admitted, span) for span in self.clock_spans]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What has become of a job since its last output. Times are in seconds since it was admitted."""

    tokens: Sequence[int] = ()
    origins: Sequence[str] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    time: float = 0.0
    root: int = 0
    tip: int = 0
    spans: Sequence[Span] = ()
    decisions: Sequence[tuple[float, Decision]] = ()
    servers: Sequence[ServerStatus] = ()  # of a traced job, if one of them has died or was replaced
    finish_reason: str | None = None  # stop, length or cancelled, in the last output
    error: str | None = None
    refusal: ApiError | None = None  # why the job was not queued, in its only output
    stats: JobStats | None = None  # in the last output of a job that was admitted


@dataclass(eq=False)
class JobState:
    """A job as the engine thread sees it."""

    job: Job
    requests: deque[AnyRequest]  # in order: perhaps one that scores the prompt, then one that continues it
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0  # by the fleet's clock
    queued: float = 0.0  # seconds
    run: ActiveRequest | None = None
    shared: bool = False
    spans: list[Span] = field(default_factory=list)  # by the fleet's clock
    # Already delivered:
    num_tokens: int = 0
    num_spans: int = 0
    num_decisions: int = 0
    num_incidents: int = 0
    time: float = 0.0

    def spans_since_admission(self, skip: int) -> list[Span]:
        """The forwards after the first `skip`, with times from the admission on."""
        return [since(self.admitted, span) for span in self.spans[skip:]]

    def decisions(self, run: ActiveRequest, skip: int = 0) -> tuple[tuple[float, Decision], ...]:
        """What `auto` decided, and when."""
        offset = float(run.started) - self.admitted
        made = list(zip(run.decision_times, run.generation.decisions))[skip:]
        return tuple((offset + float(at), decision) for at, decision in made)

    def completion(self, run: ActiveRequest) -> Completion:
        """All that was generated, even if the job was cancelled or failed."""
        generation = run.generation
        return Completion(
            tokens=tuple(run.tokens),
            finish_reason=generation.finish_reason or "cancelled",
            times=tuple(run.times),
            tally=replace(generation.tally),
            origins=tuple(generation.origins),
            decisions=self.decisions(run),
            overlap=run.overlap,
        )


class EngineThread:
    """Schedules jobs on the engine: some run, others wait, the clients in turn, and more of one client are refused."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine, self._fleet, self._limits = engine, engine.deployment.fleet, limits
        self._max_running = min(limits.running, engine.deployment.max_running or limits.running)
        self._wake = self._fleet.wake  # the one method that any thread may call
        self._lock = Lock()
        self._commands: deque[Callable[[], object]] = deque()
        self._signal = Event()
        self._accepts, self._stopped = True, False
        self._states: dict[Job, JobState] = {}  # waiting and running
        self._num_open: Counter[int] = Counter()  # the same, by client
        self._waiting: FairQueue[JobState] = FairQueue()
        self._running: dict[ActiveRequest, JobState] = {}
        self._traced: dict[ActiveRequest, JobState] = {}  # of those, the ones whose forwards are followed
        self._held: dict[JobState, ActiveRequest] = {}  # those with tokens that are not delivered yet, oldest first
        self._by_prompt: dict[TokenSequence, JobState] = {}  # a span's context says whose it is
        self._job_seconds = 0.0  # that jobs ran, on average; 0: none has finished yet
        self._next_place = 0.0  # when those that were refused have all found one
        self._spans: list[Span] = []
        self._fleet.log = self._spans
        self._thread = Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # For any thread.

    async def submit(self, jobs: Sequence[Job]) -> EngineStatus:
        """Queue all of the jobs, or raise an `ApiError` and queue none."""
        return await self._call(partial(self._enqueue, jobs))

    def post(self, job: Job) -> None:
        """Queue a job without waiting for it; if it is refused, its only output says why."""
        if not self._post(partial(self._enqueue_or_refuse, job)):
            raise shutting_down()

    async def check_room(self, client: int, num_tokens: Sequence[int]) -> None:
        """Raise an `ApiError` if texts of these lengths would find the queue full, before any work is done for them."""
        if self._num_open[client] + len(num_tokens) > self._limits.open_texts:  # perhaps no longer
            await self._call(partial(self._check_room, client, num_tokens))

    async def status(self) -> EngineStatus:
        return await self._call(self._status)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs whose outputs are no longer wanted; finished ones are ignored."""
        for job in jobs:
            self._post(partial(self._cancel, job))

    def refuse(self) -> None:
        """Accept no more jobs."""
        self._post(partial(setattr, self, "_accepts", False))

    def cancel_all(self) -> None:
        self._post(self._cancel_all)

    def close(self) -> None:
        self.refuse()
        self.cancel_all()
        self._post(self._stop)
        self._thread.join(self._limits.shutdown_seconds)

    def _post(self, command: Callable[[], object]) -> bool:
        """Have the engine thread run a command; False: it has stopped."""
        with self._lock:
            if self._stopped:
                return False
            self._commands.append(command)
        self._signal.set()
        with suppress(OSError):  # the fleet is being closed
            self._wake()
        return True

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """The result of a function that the engine thread runs."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        if not self._post(run):
            raise shutting_down()
        return asyncio.wrap_future(future)

    # From here on: only the engine thread.

    def _work(self) -> None:
        while not self._stopped or self._commands:
            try:
                self._turn()
            except Exception as error:  # every client gets an answer, and the next one is served
                log.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {error}")
        self._engine.close()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._admit()
        if self._running:
            self._step()
        elif not self._stopped and not self._commands:
            self._signal.wait(CHECK_SECONDS)
            self._signal.clear()
            self._fleet.check_workers()  # also where commands come all the time: /health may be polled

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True

    def _status(self) -> EngineStatus:
        return EngineStatus(len(self._running), len(self._waiting), self._accepts, self._servers())

    def _servers(self) -> tuple[ServerStatus, ...]:
        fleet, busy = self._fleet, self._fleet.busy
        servers = [
            ServerStatus(
                name, role, alive, dict(fleet.death_causes.get(name, {})), fleet.restarts[name], float(busy[name])
            )
            for name, role, alive in fleet.servers()
        ]
        return tuple(sorted(servers, key=lambda server: server.role == TARGET))

    def _enqueue(self, jobs: Sequence[Job]) -> EngineStatus:
        try:
            states = [JobState(job, self._requests(job)) for job in jobs]
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        status = self._status()
        if not self._accepts:
            raise shutting_down()
        if not status.has_target:
            raise no_target()
        for client in {job.client for job in jobs}:
            self._check_room(client, [job.max_new_tokens for job in jobs])
        self._states.update(zip(jobs, states))
        for state in states:
            self._num_open[state.job.client] += 1
            self._waiting.append(state.job.client, state)
        return status

    def _enqueue_or_refuse(self, job: Job) -> None:
        try:
            self._enqueue([job])
        except ApiError as error:
            job.deliver(EngineOutput(finish_reason="cancelled", refusal=error))

    def _check_room(self, client: int, num_tokens: Sequence[int]) -> None:
        """Each client has its own places in the queue, so that none can fill it for the others."""
        limit, num_open = self._limits.open_texts, self._num_open[client]
        if num_open + len(num_tokens) > limit:
            raise queue_full(num_open, limit, self._retry_seconds(num_tokens))

    def _retry_seconds(self, num_tokens: Sequence[int]) -> int:
        """When places are likely free: clients that are refused are asked to come back one after the other."""
        now, deployment = time.perf_counter(), self._engine.deployment
        tokens = sum(max(1, number) for number in num_tokens)
        seconds = len(num_tokens) * self._job_seconds / self._max_running
        seconds = seconds or tokens * deployment.latency.target_ms / deployment.sp / 1000
        self._next_place = min(max(self._next_place, now) + seconds, now + MAX_RETRY_SECONDS)
        return math.ceil(self._next_place - now)

    def _requests(self, job: Job) -> deque[AnyRequest]:
        if isinstance(job, VerificationJob):
            positions = job.num_positions, job.sampling, job.prompt_length
            return deque([self._engine.verify_request(job.prompt, *positions)])
        requests: deque[AnyRequest] = deque()
        if job.prompt_logprobs is not None:
            requests.append(self._engine.score_request(job.prompt, job.prompt_logprobs))
        if job.max_new_tokens:
            ends = job.stop_token_ids, job.ignore_eos
            requests.append(self._engine.make_request(job.prompt, job.max_new_tokens, job.spec, job.sampling, *ends))
        return requests

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            state = self._waiting.popleft()
            state.queued = time.perf_counter() - state.submitted
            state.admitted = float(self._fleet.now())
            state.num_incidents = self._num_incidents()
            try:
                self._begin(state)
            except Exception as error:
                self._end(state, EngineOutput(finish_reason="cancelled", error=f"{type(error).__name__}: {error}"))

    def _begin(self, state: JobState) -> None:
        state.run = run = self._engine.loop.submit(state.requests.popleft())
        self._running[run] = state
        self._by_prompt[run.generation.origin] = state
        if state.job.trace:
            self._traced[run] = state
        if len(self._running) > 1:
            for other in self._running.values():
                other.shared = True

    def _leave(self, state: JobState) -> None:
        if state.run is not None:
            self._running.pop(state.run, None)
            self._traced.pop(state.run, None)
            self._held.pop(state, None)
            self._by_prompt.pop(state.run.generation.origin, None)

    def _step(self) -> None:
        """Handle one event, and deliver what came of it; that nothing came of others need not be looked at."""
        handled = self._engine.loop.step()
        self._assign_spans()
        run = handled[0] if handled else None
        state = self._running.get(run) if run else None
        if run and state and (run.done or len(run.tokens) > state.num_tokens):
            if run.done or not state.num_tokens:
                self._output(state, run)
            else:
                self._held.setdefault(state, run)
        self._output_held()
        for state in [state for state in self._traced.values() if self._is_due(state)]:
            if state.run is not None and state.run in self._running:
                self._output(state, state.run)

    def _output_held(self) -> None:
        """Deliver tokens whose turn has come: the more jobs run, the more tokens of one are delivered together."""
        num_running = len(self._running)
        interval = min(OUTPUT_INTERVAL * num_running, MAX_OUTPUT_INTERVAL) if num_running > 1 else 0.0
        while self._held:
            state, run = next(iter(self._held.items()))
            if self._elapsed(state) - state.time < interval:
                return
            self._output(state, run)

    def _is_due(self, state: JobState) -> bool:
        return len(state.spans) > state.num_spans and self._elapsed(state) - state.time > TRACE_INTERVAL

    def _elapsed(self, state: JobState) -> float:
        return float(self._fleet.now()) - state.admitted

    def _assign_spans(self) -> None:
        for span in self._spans:
            state = self._by_prompt.get(span.context.origin)
            if state is not None and len(state.spans) < MAX_SPANS:
                state.spans.append(span)
        self._spans.clear()

    def _output(self, state: JobState, run: ActiveRequest) -> None:
        """Deliver what is new; after the prompt's scores the job goes on with its next request."""
        self._held.pop(state, None)
        output = self._new_output(state, run)
        state.num_tokens, state.time = len(run.tokens), output.time
        if not run.done:
            self._deliver(state, output)
        elif state.requests and not output.error:
            self._deliver(state, replace(output, finish_reason=None))
            self._leave(state)
            self._begin(state)
        else:
            self._end(state, output)

    def _new_output(self, state: JobState, run: ActiveRequest) -> EngineOutput:
        generation, skip = run.generation, state.num_tokens
        root, tip = generation.progress
        output = EngineOutput(
            tokens=run.tokens[skip:],
            origins=generation.origins[skip:],
            top_logprobs=generation.top_logprobs[skip:],
            time=self._elapsed(state),
            root=root,
            tip=tip,
            finish_reason=generation.finish_reason,
            error=None if run.error is None else str(run.error),
        )
        return self._with_trace(output, state, run) if state.job.trace else output

    def _with_trace(self, output: EngineOutput, state: JobState, run: ActiveRequest) -> EngineOutput:
        spans, decisions = state.spans_since_admission(state.num_spans), state.decisions(run, state.num_decisions)
        incidents = self._num_incidents()
        servers = self._servers() if incidents > state.num_incidents else ()
        state.num_spans += len(spans)
        state.num_decisions += len(decisions)
        state.num_incidents = incidents
        return replace(output, spans=spans, decisions=decisions, servers=servers)

    def _num_incidents(self) -> int:
        """Deaths and replacements of servers so far."""
        return sum(self._fleet.deaths.values()) + self._fleet.restarts.total()

    def _cancel(self, job: Job) -> None:
        state = self._states.get(job)
        if state is None:
            return
        if state.run is None:
            self._waiting.remove(job.client, state)
        elif not state.run.done:
            self._engine.loop.cancel(state.run)
        self._end(state, EngineOutput(finish_reason="cancelled"))

    def _cancel_all(self) -> None:
        for job in list(self._states):
            self._cancel(job)

    def _fail(self, reason: str) -> None:
        """End the running jobs after an error that may have left them inconsistent."""
        for state in list(self._running.values()):
            if state.run is not None and not state.run.done:
                with suppress(Exception):
                    self._engine.loop.cancel(state.run)
            self._end(state, EngineOutput(finish_reason="cancelled", error=reason))

    def _end(self, state: JobState, output: EngineOutput) -> None:
        self._leave(state)
        del self._states[state.job]
        self._num_open[state.job.client] -= 1
        if state.run is not None:
            weight = FINISHED_WEIGHT if self._job_seconds else 1
            self._job_seconds += weight * (self._elapsed(state) - self._job_seconds)
        stats = None
        with suppress(ValueError):  # an engine that failed amid a step has no consistent statistics
            stats = self._stats(state)
        self._deliver(state, replace(output, stats=stats))

    def _stats(self, state: JobState) -> JobStats | None:
        if state.run is None or isinstance(state.job, VerificationJob):
            return None
        names = [server.name for server in self._servers()]
        return JobStats(state.completion(state.run), state.spans, state.admitted, state.queued, state.shared, names)

    def _deliver(self, state: JobState, output: EngineOutput) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to receive it
            state.job.deliver(output)
