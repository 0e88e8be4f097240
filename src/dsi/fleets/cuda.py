"""A fleet on GPUs: one thread polls the forwards in flight on all of them.

No thread has to be woken and no lock is contended: the next poll sees what a GPU has finished, and the GPU gets
its next forward before the last answer is handled. Draft trees, and requests beside which others run, share forwards
where there are models for them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

from dsi.core.messages import (
    TARGET,
    WOKEN,
    Draft,
    Drafted,
    DraftedBlock,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefill,
    Verify,
    goes_on,
)
from dsi.core.scheduler import promoted
from dsi.core.sequence import TokenSequence
from dsi.fleets.base import RealTimeFleet
from dsi.fleets.job_requests import TreeGrowth
from dsi.fleets.packed import MAX_STEPS, PackedForward, PackedServer, SharedEvent
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import poll_work
from dsi.models.protocol import Answer, Cancelled, LaunchedGrowth

ENDED = object()
MAX_TOKENS_AHEAD = 24  # of each text that a target generates before other texts may join


class CudaCancelFlag:
    """A cancel flag that the polling thread itself sets."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def is_set(self) -> bool:
        return self.cancelled

    def wait(self, timeout: float) -> bool:
        """Sleep, for models that wait instead of computing."""
        time.sleep(timeout)
        return self.cancelled


class CudaWorker:
    """A server's current job, and the generator that computes it."""

    __slots__ = ("cancel_flag", "context", "events", "forward_start", "job", "remaining")

    def __init__(self, server: Server, job: Job, now: float) -> None:
        self.job, self.cancel_flag = job, CudaCancelFlag()
        self.events: Iterator[Event | None] = poll_work(job, server, self.cancel_flag)
        self.context: TokenSequence = job.context
        self.forward_start = now
        self.remaining = job.num_answers if isinstance(job, Draft) else 1  # events to come

    def poll(self) -> tuple[Event | None, bool]:
        """Return the event that has come since the last poll, if any, and whether the server is idle."""
        try:
            event = next(self.events)
        except Cancelled:
            return None, True
        except StopIteration:  # with events to come only if an interrupt has ended the generator
            return (Failed(self.job.id, "interrupted") if self.remaining else None), True
        if event is None:
            return None, False
        last = not isinstance(event, Drafted | DraftedLevel)
        self.remaining = 0 if last else self.remaining - 1
        if last:
            next(self.events, None)  # runs what follows the last event
        return event, last


class InflightForward:
    """A forward that a server computes for several texts, or begins when the one before has ended."""

    __slots__ = ("began", "follows", "forward", "steps")

    def __init__(
        self,
        forward: PackedForward,
        steps: Generator[Answer | list[Answer] | None, None, None],
        began: float,
        follows: bool = False,
    ) -> None:
        self.forward, self.steps, self.began = forward, steps, began
        self.follows = follows  # on a draft, after which it began: when, only the device knows

    @classmethod
    def begin(cls, packed: PackedServer, began: float) -> InflightForward:
        forward = packed.begin(packed.max_tokens)
        return cls(forward, packed.poll(forward), began)

    def poll(self, packed: PackedServer) -> tuple[list[SharedEvent], bool]:
        """Return what has come of it, and whether it has ended."""
        step = next(self.steps, ENDED)
        if step is None:
            return [], False
        if isinstance(step, Answer):
            return packed.finish_level(self.forward, step), False
        if isinstance(step, list):
            return packed.finish_some(self.forward, step), False
        return packed.finish(self.forward), True


class CudaFleet(RealTimeFleet):
    """Polls models that compute on GPUs; any other model computes during its poll, and blocks the rest.

    `packed` has, by the names of servers, those whose models compute several texts and trees in one forward.
    """

    def __init__(
        self, servers: Iterable[Server], *, packed: Mapping[str, Server] | None = None, log: list[Span] | None = None
    ) -> None:
        super().__init__(servers, log)
        self._workers: dict[str, CudaWorker] = {}
        shared = {name: PackedServer.of(server) for name, server in (packed or {}).items()}
        drafters_first = sorted(shared.items(), key=lambda item: self._servers[item[0]].role == TARGET)
        self._packed = {name: server for name, server in drafters_first if server is not None}
        for server in self._packed.values():
            most = MAX_TOKENS_AHEAD if server.server.role == TARGET else MAX_STEPS
            server.tells_meanwhile = True
            server.steps_for = lambda _, most=most: most  # type: ignore[misc]
        roles = [self._servers[name].role for name in self._packed]
        self.packs = roles.count(TARGET) == 1  # whether a target computes several requests in one forward
        num_targets = sum(server.role == TARGET for server in self._servers.values())
        if self.packs and num_targets == 1 and len(self._packed) > 1:
            self.most_verified_unseen = min(server.most_nodes for server in self._packed.values())
        self._packed_jobs: dict[str, Job] = {}  # that share forwards, by the server that is busy with them
        self._blocks: dict[int, list[int]] = {}  # draft tokens of shared forwards, by job
        self._joined: set[int] = set()  # of these, those that did not have to wait
        self._forwards: dict[str, list[InflightForward]] = {name: [] for name in self._packed}  # the first ends first

    def _assign(self, name: str, job: Job) -> None:
        packed = self._packed.get(name)
        if packed is not None and self._is_packed(job) and packed.suits(job):
            if goes_on(job) and not packed.computes_text_of(job):  # others are not to wait until it has all its tokens
                packed.add(job)
                self._scheduler.release(name, computed=False)
            else:
                self._packed_jobs[name] = job
                self._join(name, packed)
            if self.num_requests < 2:  # nothing else is going to share its forward
                self._poll_packed(name, packed)
            return
        self._workers[name] = CudaWorker(self._servers[name], job, self.now())
        self._poll(name)  # which launches the first forward

    def _join(self, name: str, packed: PackedServer) -> None:
        """Let a server's job join the shared forwards, unless one that was given up still computes its text."""
        job = self._packed_jobs[name]
        if not packed.computes_text_of(job):
            packed.add(job)
            self._joined.add(job.id)

    def _is_packed(self, job: Job) -> bool:
        """Whether a job shares forwards with those of other requests, has a tree, or goes on where trees are cached."""
        if isinstance(job, Draft):
            return bool(job.expansions) or self._is_shared(job)
        has_tree = isinstance(job, Verify) and (bool(job.tree) or job.draft is not None)
        return has_tree or self._is_shared(job) or any(packed.knows(job) for packed in self._packed.values())

    def _is_shared(self, job: Job) -> bool:
        if not self.packs or isinstance(job, Prefill) or not job.alone:
            return False
        return self.num_requests > 1 or goes_on(job)

    def close(self) -> None:
        """Give up the forwards that are computed, too: what they fill is free again."""
        for forwards in self._forwards.values():
            for inflight in forwards:
                inflight.steps.close()
            forwards.clear()
        super().close()

    def limit_rows(self, most: int) -> None:
        """Let a target's shared forwards have so many new tokens and nodes at most, but for what has more alone."""
        for packed in self._packed.values():
            if packed.server.role == TARGET:
                packed.max_tokens = min(packed.max_tokens, most)
                self.most_verified_unseen = min(self.most_verified_unseen, packed.most_nodes)

    def promote(self, id: int) -> None:
        super().promote(id)
        for packed in self._packed.values():
            packed.promote(id)
        for name, job in self._packed_jobs.items():  # some of which have not joined yet
            if job.id == id:
                self._packed_jobs[name] = promoted(job)

    def cancel(self, id: int) -> None:
        self._blocks.pop(id, None)
        for name, packed in self._packed.items():
            for inflight in self._forwards[name]:
                if any(part.packed.job.id == id for part in inflight.forward.parts):
                    inflight.forward.stop.set()  # its text may go on in another way
            packed.discard(id)
        super().cancel(id)

    def _cancel_job(self, name: str, id: int) -> None:
        if name in self._packed_jobs:
            self._joined.add(id)  # it joins no forward from now on
            self._release_packed()
            return
        self._workers[name].cancel_flag.cancelled = True
        self._poll(name)  # a server that stops at once is idle for the next job

    def _on_worker_death(self, name: str) -> None:
        self._workers.pop(name, None)
        if job := self._packed_jobs.pop(name, None):
            self._joined.discard(job.id)
            self._blocks.pop(job.id, None)
            self._packed[name].discard(job.id)

    def wake(self) -> None:
        self._events.append(WOKEN)

    @property
    def _has_work(self) -> bool:
        return super()._has_work or any(packed.jobs for packed in self._packed.values())

    def _wait_for_events(self) -> None:
        for name in list(self._workers):
            self._poll(name)
        for name, packed in self._packed.items():
            if name in self._packed_jobs and self._packed_jobs[name].id not in self._joined:
                self._join(name, packed)
            if self.packs and self.num_requests > 1:
                packed.take_waiting(self._scheduler, self._servers[name].role, self._is_packed)
            self._poll_packed(name, packed)
            if packed.following:
                self._follow_drafts(name, packed)
        if not self._events and self._scheduler.changed:
            self._start_jobs()

    def _poll_packed(self, name: str, packed: PackedServer) -> None:
        forwards = self._forwards[name]
        num_coming = 0
        if packed.server.role == TARGET and packed.has_ready_jobs:
            num_coming = sum(other.num_drafting for other in self._packed.values() if other is not packed)
        if packed.should_begin([inflight.forward for inflight in forwards], num_coming):
            forwards.append(InflightForward.begin(packed, self.now()))
        elif forwards and (packed.has_ready_jobs or self._waits_for_text(name, packed)):
            forwards[0].forward.stop.set()  # or they would wait until it has ended
        for inflight in tuple(forwards):
            events, ended = inflight.poll(packed)
            if ended:
                forwards.remove(inflight)
            if ended or events:
                self._handle(name, inflight, events)

    def _waits_for_text(self, name: str, packed: PackedServer) -> bool:
        """Whether a server's job waits until its text is no longer computed."""
        job = self._packed_jobs.get(name)
        return job is not None and job.id not in self._joined and packed.computes_text_of(job)

    def _follow_drafts(self, name: str, packed: PackedServer) -> None:
        """Begin what waits for a draft of a tree: when it is there, or behind it on the device that drafts it."""
        for id, waiting in list(packed.following.items()):
            draft: int = waiting.job.draft  # type: ignore[union-attr, assignment]
            drafter = next((other for other in self._packed.values() if draft in other.growths), None)
            if drafter is None:
                if not self._is_coming(draft):
                    self._fail(packed, id)
                continue
            growth = drafter.growths[draft]
            if growth.done:
                packed.verify_grown(id, growth)
            elif growth.given_up:
                self._fail(packed, id)
            elif launched := drafter.launched(draft):
                self._launch_following(name, packed, growth, launched)

    def _launch_following(self, name: str, packed: PackedServer, growth: TreeGrowth, launched: LaunchedGrowth) -> None:
        """Launch the forward over a tree behind its draft, if nothing else is to be computed there."""
        if len(packed.jobs) > 1 or self._forwards[name]:
            return
        if (forward := packed.begin_following(growth, launched)) is not None:
            steps = packed.poll_following(forward, launched)
            self._forwards[name].append(InflightForward(forward, steps, self.now(), follows=True))
            self._poll_packed(name, packed)

    def _is_coming(self, id: int) -> bool:
        """Whether a job has not begun yet."""
        return self._scheduler.waits(id) or any(job.id == id for job in self._packed_jobs.values())

    def _fail(self, packed: PackedServer, id: int) -> None:
        packed.discard(id)
        self._release_packed()
        self._events.append(Failed(id, "the draft that it verifies was given up"))

    def _handle(self, name: str, inflight: InflightForward, events: Sequence[SharedEvent]) -> None:
        began, num_texts = inflight.began, len(inflight.forward.parts)
        now = self.now()
        following = [other for forwards in self._forwards.values() for other in forwards if other.follows]
        for other in (inflight, *self._forwards[name], *following):  # a tree's next level, and what was behind this
            other.began = now
        for job, context, event in events:
            began_then = not inflight.follows
            self._record_shared(name, job, context, began, now, event, len(events), num_texts, began_then)
            if isinstance(event, Failed):
                self._blocks.pop(job.id, None)
            if isinstance(event, Drafted | DraftedBlock):
                self._collect(job, event)
            else:
                self._events.append(event)
        self._release_packed()

    def _collect(self, job: Job, event: Drafted | DraftedBlock) -> None:
        """Tell of draft tokens, of a request that takes turns once its block is complete: each event takes time."""
        waits = isinstance(job, Draft) and job.alone and not goes_on(job)
        if not waits or (isinstance(event, Drafted) and (event.draft_probs is not None or event.alternates)):
            self._events.append(event)
            return
        tokens = self._blocks.setdefault(job.id, [])
        tokens += event.tokens if isinstance(event, DraftedBlock) else (event.token,)
        if len(tokens) == job.count:  # type: ignore[union-attr]
            self._events.append(DraftedBlock(job.id, tuple(self._blocks.pop(job.id))))

    def _release_packed(self) -> None:
        """Servers whose job is done, or was given up, are idle."""
        for name, job in list(self._packed_jobs.items()):
            if job.id in self._joined and job.id not in self._packed[name].jobs:
                del self._packed_jobs[name]
                self._joined.discard(job.id)
                # A prefill that is not recorded would come again and again.
                self._scheduler.release(name, computed=isinstance(job, Prefill))

    def _poll(self, name: str) -> None:
        worker = self._workers[name]
        event, idle = worker.poll()
        if worker.cancel_flag.cancelled:
            event = None
        if event is not None:
            self._events.append(event)
        if event is not None or (worker.cancel_flag.cancelled and idle):
            self._end_forward(name, worker, event)
        if idle:
            del self._workers[name]
            self._scheduler.release(name)

    def _end_forward(self, name: str, worker: CudaWorker, event: Event | None) -> None:
        now = self.now()
        self._record(name, worker.job, worker.context, worker.forward_start, now, event)
        if self.log is not None and isinstance(event, Drafted):
            worker.context = worker.context.then(event.token)
        worker.forward_start = now
