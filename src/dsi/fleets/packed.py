"""Continuous batching on one server: jobs of several requests share each forward.

A job joins between two forwards and leaves with its answer, so nobody waits for another's text to end. A forward
computes a limited number of rows, which are new tokens of texts and nodes of the trees after them: first those of
texts that continue, speculation last, then long prompts in chunks of what is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dsi.core.generation import NO_TOKEN
from dsi.core.messages import (
    Draft,
    Drafted,
    DraftedBlock,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Verified,
    Verify,
)
from dsi.core.scheduler import Scheduler, promoted
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.tree_shape import Level, Tree
from dsi.fleets.job_requests import TreeGrowth, draft_request, verify_request
from dsi.fleets.servers import CachedPrefix, Server
from dsi.models.protocol import (
    MAX_ROWS,
    Answer,
    Cancelled,
    FollowsDrafts,
    ForwardRequest,
    GrowsTrees,
    LaunchedGrowth,
    PollsGenerated,
    PollsPacked,
    StopFlag,
    SupportsPacking,
    computes_trees,
    generate_packed,
)

MAX_TOKENS = MAX_ROWS  # new tokens of a forward, with nodes of trees
MAX_GROWTHS = 256  # drafts of trees that are kept for verifications
FEW = 3  # times as many as there are that may come yet
MIN_CHUNK = 16  # tokens of a long prompt that a forward reads at least
FEW_TEXTS = 24  # of which one that has all of its tokens does not wait for the others
MAX_STEPS = 8  # forwards of a drafter that follow one another

SharedEvent = tuple[Job, TokenSequence, Event]  # a job, the text its forward computed, and what came of it


@dataclass(eq=False, slots=True)
class PackedJob:
    """A job that shares forwards, and how far it has come."""

    job: Job
    prefix: CachedPrefix
    left: int  # answers that are missing: a draft's tokens, or levels of its tree, or one
    growth: TreeGrowth | None = None  # of a tree's draft, or of the one whose tree it verifies
    computing: bool = False  # whether a forward computes its next answer now

    @property
    def has_begun(self) -> bool:
        """Whether some of its answers were given."""
        return isinstance(self.job, Draft) and self.left < self.job.num_answers

    @property
    def drafts_chain(self) -> bool:
        """Whether its answers are tokens that follow one another, not levels of a tree."""
        return isinstance(self.job, Draft) and self.growth is None

    @property
    def num_new(self) -> int:
        """The rows of its next forward, about: counting all takes as long as making its request."""
        width = self.job.num_positions if isinstance(self.job, Verify) else int(isinstance(self.job, Draft))
        missing = len(self.prefix.tokens) - (self.prefix.num_cached or 0)
        return width if width > missing else missing

    def part(self) -> PackedPart:
        """Its part of the next forward: all that its answer takes."""
        request, prefix = self._request(), self.prefix
        num_positions = max(0, len(request.tokens) + 1 - request.start)
        num_new = max(num_positions, len(request.tokens) - (request.num_cached or 0))
        num_nodes = len(request.asked)
        if num_nodes < len(request.tree):
            num_nodes = len({*request.asked, *prefix.new_nodes(request.tree)})
        return PackedPart(self, request, num_new - num_positions, num_new + num_nodes)

    @property
    def waits_for_draft(self) -> bool:
        """Whether it verifies a tree that is not there yet."""
        return isinstance(self.job, Verify) and self.job.draft is not None

    def verify_tree(self, growth: TreeGrowth) -> None:
        """The tree that it verifies is there."""
        self.growth, self.job = growth, growth.verification(self.job)  # type: ignore[arg-type]

    def grown_tree(self, growth: TreeGrowth) -> Tree | None:
        """What it verifies behind its draft, once it is there; the host has time to record that before the answer."""
        if growth.given_up:
            raise Cancelled("its draft was given up")
        if growth.done and self.waits_for_draft:
            self.verify_tree(growth)
            self.prefix.add_tree(growth.tree)
        return growth.tree if growth.done else None

    def _request(self) -> ForwardRequest:
        if isinstance(self.job, Draft):
            return draft_request(self.job, self.prefix) if self.growth is None else self.growth.request(self.prefix)
        return verify_request(self.job, self.prefix)


@dataclass(slots=True)
class PackedPart:
    """A job's part of a forward."""

    packed: PackedJob
    request: ForwardRequest
    num_read: int  # new tokens before those whose logits are wanted
    num_rows: int  # new tokens and nodes
    is_chunk: bool = False  # whether only a part of a prompt is read

    @property
    def reads_prompt(self) -> bool:
        return self.num_read >= MIN_CHUNK

    @property
    def num_wanted(self) -> int:
        """The tokens that it takes one forward each to generate; 0 if it does anything else."""
        return self.packed.left if self.packed.drafts_chain and not self.reads_prompt else 0

    @property
    def is_speculation(self) -> bool:
        """Whether nobody waits for it yet."""
        job = self.packed.job
        return isinstance(job, Prefill) or (isinstance(job, Verify) and job.lead > 0)

    def within(self, room: int) -> PackedPart:
        """All of it where there is room for so many rows, or a chunk of the prompt."""
        if self.num_rows <= room or not self.num_read:
            return self
        count, num_cached = min(room, self.num_read), self.request.num_cached
        chunk = self.request.tokens[: (num_cached or 0) + count]
        return PackedPart(self.packed, ForwardRequest(chunk, len(chunk) + 1, num_cached), count, count, is_chunk=True)


@dataclass(eq=False, slots=True)
class PackedForward:
    """A forward over parts of several jobs, and what it answered once it has run.

    Where each of them only generates tokens, up to so many forwards follow one another, unless they are to stop.
    """

    parts: list[PackedPart]
    answers: Sequence[Answer | Exception] = ()
    num_steps: int = 1
    stop: StopFlag = field(default_factory=StopFlag)
    has_begun: bool = False  # whether some of the tokens were given

    @property
    def requests(self) -> list[ForwardRequest]:
        return [part.request for part in self.parts]

    @property
    def num_rows(self) -> int:
        """New tokens of texts, and nodes of trees."""
        return sum(part.num_rows for part in self.parts)

    @property
    def counts(self) -> list[int]:
        """The tokens to generate of each text."""
        return [min(self.num_steps, part.num_wanted) for part in self.parts]


class PackedServer:
    """Runs the jobs that have joined in forwards that they share, one at a time with `step`.

    `begin` and `finish` are its two ends: `run`, between them, may take place in another thread, where the model can
    compute several forwards at once, and `poll` yields while it computes asynchronously.
    """

    def __init__(self, server: Server, model: SupportsPacking, max_positions: float | None = None) -> None:
        self.server, self._model, self.max_tokens = server, model, getattr(model, "max_rows", MAX_TOKENS)
        # What it can do, once: asking takes as long as a small forward.
        self._polled = model if isinstance(model, PollsPacked) else None
        self._generates = model if isinstance(model, PollsGenerated) else None
        self._grows_trees = model if isinstance(model, GrowsTrees) else None
        self._follows = model if isinstance(model, FollowsDrafts) else None
        self._growing: int | None = None  # the draft of which a device computes all levels
        self._find_cached: Callable[[Sequence[int]], int] | None = getattr(model, "num_cached", None)
        # Of a job, by default as many as a forward has rows; a wider one would make the others wait.
        self._max_positions = self.max_tokens if max_positions is None else max_positions
        self.jobs: dict[int, PackedJob] = {}  # by id, the longest there first
        self._ready: dict[int, PackedJob] = {}  # of these, those that no forward computes...
        self.following: dict[int, PackedJob] = {}  # ...and those that wait for a draft
        self.growths: OrderedDict[int, TreeGrowth] = OrderedDict()  # of the latest drafts of trees, by job
        self._most_in_flight: int = getattr(model, "forwards_in_flight", 1)
        self._origins: set[TokenSequence] = set()  # whose jobs they are, or were when their forward began
        self.steps_for: Callable[[int], int] = lambda _: 1  # forwards that may follow one another, by their rows
        self.tells_meanwhile = False  # whether their tokens are told before the last of them has ended

    @classmethod
    def of(cls, server: Server) -> PackedServer | None:
        """None: its model computes one text at a time."""
        model = server.model
        return cls(server, model) if isinstance(model, SupportsPacking) and model.can_pack else None

    @property
    def forwards_at_once(self) -> int:
        """How many forwards its model can compute at once, in threads of their own."""
        return self._model.forwards_at_once

    @property
    def most_nodes(self) -> int:
        """The nodes of a tree that a forward can have after a token."""
        return self.max_tokens - 1 if computes_trees(self._model) else 0

    def accepts(self, job: Job) -> bool:
        """Whether a job can join now: there is one of each request."""
        return not self.computes_text_of(job) and self.suits(job)

    def computes_text_of(self, job: Job) -> bool:
        """Whether there is a job of the same request, or a forward still computes its text."""
        return job.context.origin in self._origins

    def knows(self, job: Job) -> bool:
        """Whether a request's text is cached here."""
        return job.context.origin in self.server.prefixes.entries

    def suits(self, job: Job) -> bool:
        """Whether a job can share forwards: one that gives nothing but tokens."""
        if isinstance(job, Prefill):
            return True
        has_tree = bool(job.tree) or bool(job.expansions if isinstance(job, Draft) else job.num_drafted)
        if has_tree and not computes_trees(self._model):
            return False
        if isinstance(job, Verify):
            return job.num_positions <= self._max_positions
        return not job.sampling.needs_draft and len(job.expansions) <= self._max_positions

    def add(self, job: Job) -> None:
        left = job.num_answers if isinstance(job, Draft) else 1
        growth = self._growth(job) if isinstance(job, Draft) and job.expansions else None
        prefix = self.server.prefixes.lookup(job.context)
        if prefix.num_cached is None and self._find_cached is not None:  # the turn of a chat, or a system prompt
            prefix.num_cached = self._find_cached(prefix.tokens) or None
        self.jobs[job.id] = packed = PackedJob(job, prefix, left, growth)
        (self.following if packed.waits_for_draft else self._ready)[job.id] = packed
        self._origins.add(job.context.origin)

    def _growth(self, job: Draft) -> TreeGrowth:
        self.growths[job.id] = growth = TreeGrowth(job)
        if len(self.growths) > MAX_GROWTHS:
            self.growths.popitem(last=False)
        return growth

    def take_waiting(self, scheduler: Scheduler, role: str, shares: Callable[[Job], bool]) -> None:
        """Let waiting jobs of a role that are to share forwards join."""
        for job in scheduler.take(role, lambda job: self.accepts(job) and shares(job)):
            if self.accepts(job):  # there may be two of one request
                self.add(job)
            else:
                scheduler.enqueue(job)

    def discard(self, id: int) -> bool:
        """Drop a job; return whether it was here."""
        if (packed := self.jobs.pop(id, None)) is None:
            return False
        self._ready.pop(id, None)
        self.following.pop(id, None)
        if packed.left and packed.growth is not None and isinstance(packed.job, Draft):
            packed.growth.given_up = True
        if not packed.computing:  # or another job of its request would share the KV cache with that forward
            self._origins.discard(packed.job.context.origin)
        return True

    def promote(self, id: int) -> None:
        """Somebody waits for this job now."""
        if packed := self.jobs.get(id):
            packed.job = promoted(packed.job)

    @property
    def has_ready_jobs(self) -> bool:
        """Whether there are jobs that no forward computes."""
        return bool(self._ready)

    @property
    def has_urgent_jobs(self) -> bool:
        """Whether there are others than those that go on with what they have begun to generate."""
        return any(not (isinstance(packed.job, Draft) and packed.has_begun) for packed in self._ready.values())

    def should_begin(self, in_flight: Sequence[PackedForward], num_coming: int = 0) -> bool:
        """Whether the jobs that no forward computes begin one now, beside those in flight.

        They wait for those with which they can share the next one, as it takes less time than two: for those in flight,
        and for so many that are coming soon if they are only a few.
        """
        if not self._ready or len(in_flight) >= self._most_in_flight:
            return False
        if not in_flight:
            return FEW * len(self._ready) >= num_coming
        num_ready = sum(packed.num_new for packed in self._ready.values())
        return num_ready + sum(forward.num_rows for forward in in_flight) > self.max_tokens

    @property
    def num_drafting(self) -> int:
        """The jobs that end soon: those that read no prompt."""
        return sum(packed.num_new < MIN_CHUNK for packed in self.jobs.values())

    @property
    def num_new(self) -> int:
        """New tokens and nodes of all jobs, those that are computed now included."""
        return sum(packed.num_new for packed in self.jobs.values())

    def step(self) -> list[SharedEvent]:
        """Run one forward; return what came of it."""
        forward = self.begin(self.max_tokens)
        self.run(forward)
        return self.finish(forward)

    def verify_grown(self, id: int, growth: TreeGrowth) -> None:
        """The tree that a verification waits for is there: it may share a forward."""
        packed = self._ready[id] = self.following.pop(id)
        packed.verify_tree(growth)

    def launched(self, draft: int) -> LaunchedGrowth | None:
        """What a device drafts for this job, all of whose levels it has been given."""
        return getattr(self._model, "launched", None) if self._growing == draft else None

    def begin_following(self, growth: TreeGrowth, launched: LaunchedGrowth) -> PackedForward | None:
        """The forward of the only verification that waits for a draft, if it can be launched behind that."""
        [packed] = self.following.values()
        request = verify_request(packed.job, packed.prefix)  # type: ignore[arg-type]
        num_rows = packed.num_new
        if self._follows is None or num_rows > self.max_tokens or not self._follows.can_follow(request, launched):
            return None
        del self.following[packed.job.id]
        packed.growth, packed.computing = growth, True
        return PackedForward([PackedPart(packed, request, 0, num_rows)])

    def poll_following(self, forward: PackedForward, launched: LaunchedGrowth) -> Generator[None, None, None]:
        """Compute such a forward: yield while the device does, and until the draft's answers have come."""
        [part] = forward.parts
        grown = partial(part.packed.grown_tree, part.packed.growth)  # type: ignore[arg-type]
        try:
            answer = yield from self._follows.poll_following(part.request, launched, grown)  # type: ignore[union-attr]
            forward.answers = [answer]
        except Exception as error:  # it is verified again, without a draft to follow
            forward.answers = [error]

    def begin(self, max_tokens: int) -> PackedForward:
        """Take the jobs of the next forward."""
        forward = PackedForward(self._take(max_tokens))
        wanted = [part.num_wanted for part in forward.parts]
        if wanted and all(wanted):
            together = self.tells_meanwhile or len(wanted) > FEW_TEXTS
            forward.num_steps = min(max(wanted) if together else min(wanted), self.steps_for(forward.num_rows))
        for part in forward.parts:
            part.packed.computing = True
            del self._ready[part.packed.job.id]
        return forward

    def run(self, forward: PackedForward, at_once: int = 1) -> None:
        """Compute the forward, one of so many that run at once."""
        try:
            if forward.num_steps > 1:
                counts, stop = forward.counts, forward.stop
                forward.answers = generate_packed(self._model, forward.requests, counts, at_once, stop)
            else:
                forward.answers = self._model.answer_packed(forward.requests, at_once)
        except Exception:  # one of them cannot be computed: which?
            forward.answers = [self._answer_alone(request, at_once) for request in forward.requests]

    def poll(self, forward: PackedForward) -> Generator[Answer | list[Answer] | None, None, None]:
        """The same, but yield while a model that computes asynchronously does so.

        Where it computes all levels of a tree together, yield the answer of each when it comes; where it generates
        several tokens of each text, the next ones of all.
        """
        if self._polled is None:
            self.run(forward)
            return
        levels: Sequence[Level] = ()
        try:
            if forward.num_steps > 1 and (yield from self._poll_generated(forward)):
                return
            if levels := self._levels_at_once(forward):
                self._growing = forward.parts[0].packed.job.id
                yield from self._grows_trees.poll_levels(forward.parts[0].request, levels)  # type: ignore[union-attr]
            else:
                forward.answers = yield from self._polled.poll_packed(forward.requests)
        except Exception as error:
            if forward.has_begun or (levels and forward.parts[0].packed.has_begun):  # it has answers already
                forward.answers = [error] * len(forward.parts)
            else:
                forward.answers = yield from self._poll_alone(forward.requests, self._polled)
        finally:
            self._growing = None

    def _poll_generated(self, forward: PackedForward) -> Generator[list[Answer] | None, None, bool]:
        """Return whether the model generated the tokens; each time that some have come, they are yielded."""
        if self._generates is None:
            return False
        return (yield from self._generates.poll_generated(forward.requests, forward.counts, forward.stop))

    def _poll_alone(
        self, requests: Sequence[ForwardRequest], model: PollsPacked
    ) -> Generator[None, None, list[Answer | Exception]]:
        """Answer one after the other: yield meanwhile, as one may have to wait for another forward to end."""
        answers: list[Answer | Exception] = []
        for request in requests:
            try:
                answers += yield from model.poll_packed([request])
            except Exception as error:
                answers.append(error)
        return answers

    def _levels_at_once(self, forward: PackedForward) -> Sequence[Level]:
        """The levels after the first of a growing tree, if the model can compute all of them together."""
        [first, *others] = forward.parts
        growth = first.packed.growth
        if others or growth is None or first.is_chunk or first.packed.has_begun or self._grows_trees is None:
            return ()
        levels = growth.later_levels(first.request)
        return levels if levels and self._grows_trees.can_grow(first.request, levels) else ()

    def finish(self, forward: PackedForward) -> list[SharedEvent]:
        """Return what came of a forward that has run, but for jobs that were dropped meanwhile."""
        for part in forward.parts:
            part.packed.computing = False
            if self._is_dropped(part):
                self._origins.discard(part.packed.job.context.origin)
            elif part.packed.waits_for_draft:  # an interrupt has ended the forward
                part.packed.growth, self.following[part.packed.job.id] = None, part.packed
            else:  # unless it is done now
                self._ready[part.packed.job.id] = part.packed
        return self._events(zip(forward.parts, forward.answers))

    def finish_some(self, forward: PackedForward, answers: Sequence[Answer]) -> list[SharedEvent]:
        """Return what came of a forward that others follow: tokens of texts that were not complete before."""
        forward.has_begun = True
        return self._events([(part, answer) for part, answer in zip(forward.parts, answers) if answer.tokens])

    def finish_level(self, forward: PackedForward, answer: Answer) -> list[SharedEvent]:
        """Return what came of a level of a tree, whose forward goes on."""
        return self._events([(forward.parts[0], answer)])

    def _is_dropped(self, part: PackedPart) -> bool:
        return self.jobs.get(part.packed.job.id) is not part.packed

    def _events(self, answers: Iterable[tuple[PackedPart, Answer | Exception]]) -> list[SharedEvent]:
        events = []
        for part, answer in answers:
            context = part.packed.prefix.context
            if not self._is_dropped(part) and (event := self._finish(part, answer)) is not None:
                events.append((part.packed.job, context, event))
        return events

    def _take(self, room: int) -> list[PackedPart]:
        """What the next forward computes: jobs that fit, and the first even if it does not."""
        taken = list[PackedPart]()
        parts = [packed.part() for id, packed in self.jobs.items() if id in self._ready]
        if len(parts) == 1 and parts[0].num_rows <= room:  # faster
            return parts
        by_id = {part.packed.job.id: part for part in parts}
        continuing = [by_id[id] for id in self._ready if not by_id[id].reads_prompt]  # the longest ready first
        for part in sorted(continuing, key=lambda part: part.is_speculation):
            if part.num_rows <= room or not taken:
                taken.append(part)
                room -= part.num_rows
        room = max(room, MIN_CHUNK)  # prompts are read even where texts that continue fill every forward
        for part in parts:
            if part.reads_prompt and room > 0:
                taken.append(chunk := part.within(room))
                room -= chunk.num_rows
        return taken

    def _answer_alone(self, request: ForwardRequest, at_once: int) -> Answer | Exception:
        try:
            [answer] = self._model.answer_packed([request], at_once)
        except Exception as error:
            return error
        return answer

    def _finish(self, part: PackedPart, answer: Answer | Exception) -> Event | None:
        """The event of an answer; None for a chunk of a prompt."""
        packed, request = part.packed, part.request
        job, prefix = packed.job, packed.prefix
        if isinstance(answer, Exception):
            self.discard(job.id)
            return Failed(job.id, f"{type(answer).__name__}: {answer}")
        prefix.num_cached = len(request.tokens)
        prefix.add_tree(request.tree)
        if part.is_chunk:
            return None
        packed.left -= len(answer.tokens) if packed.drafts_chain else 1
        if not packed.left:
            self.discard(job.id)
        if packed.growth is not None:
            return self._finish_tree(packed, packed.growth, answer)
        if isinstance(job, Prefill):
            return Prefilled(job.id)
        if isinstance(job, Draft):
            return self._drafted(job, prefix, answer.tokens)
        if not job.fits(answer.tokens):
            return Failed(job.id, f"{len(answer.tokens)} tokens in answer to {job.num_positions} positions")
        return Verified(job.id, answer.tokens, answer.top_logprobs)

    @staticmethod
    def _drafted(job: Draft, prefix: CachedPrefix, tokens: Tokens) -> Event:
        """The event of tokens that were generated, of which the last is not cached."""
        for token in tokens:
            prefix.append(token)
        prefix.num_cached = len(prefix.tokens) - 1
        return Drafted(job.id, tokens[0]) if len(tokens) == 1 else DraftedBlock(job.id, tokens)

    def _finish_tree(self, packed: PackedJob, growth: TreeGrowth, answer: Answer) -> Event:
        """The event of a level of a draft, or of a verification that followed one."""
        job = packed.job
        if isinstance(job, Draft):
            event = growth.add(answer.children)
            if not packed.left:
                packed.prefix.add_tree(growth.expanded)
            return event
        logprobs = growth.by_number(answer.top_logprobs, ()) if answer.top_logprobs else ()
        return Verified(job.id, growth.by_number(answer.tokens, NO_TOKEN), logprobs)
