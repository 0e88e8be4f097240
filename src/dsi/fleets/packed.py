"""Continuous batching on one server: jobs of several requests share each forward.

A job joins between two forwards and leaves with its answer, so nobody waits for another's text to end. A forward
computes a limited number of rows, which are new tokens of texts and nodes of the trees after them: first those of
texts that continue, speculation last, then long prompts in chunks of what is left.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from dsi.core.messages import Draft, Drafted, Event, Failed, Verified, Verify
from dsi.core.sequence import TokenSequence
from dsi.fleets.job_requests import TreeGrowth, draft_request, verify_request
from dsi.fleets.servers import CachedPrefix, Server
from dsi.models.protocol import Answer, ForwardRequest, PollsPacked, SupportsPacking, computes_trees

MAX_TOKENS = 128  # new tokens of a forward, with nodes of trees
MIN_CHUNK = 16  # tokens of a long prompt that a forward reads at least

SharedJob = Verify | Draft
SharedEvent = tuple[SharedJob, TokenSequence, Event]  # a job, the text its forward computed, and what came of it


@dataclass(eq=False, slots=True)
class PackedJob:
    """A job that shares forwards, and how far it has come."""

    job: SharedJob
    prefix: CachedPrefix
    left: int  # answers that are missing: a draft's tokens, or levels of its tree, or one
    growth: TreeGrowth | None = None  # of a tree's draft

    @property
    def has_begun(self) -> bool:
        """Whether some of its answers were given."""
        return isinstance(self.job, Draft) and self.left < self.job.num_answers

    def forward(self) -> PackedForward:
        """Its next forward, over all that it takes."""
        request, prefix = self._request(), self.prefix
        num_positions = max(0, len(request.tokens) + 1 - request.start)
        num_new = max(num_positions, len(request.tokens) - (request.num_cached or 0))
        num_nodes = len({*request.asked, *prefix.new_nodes(request.tree)}) if request.tree else 0
        return PackedForward(self, request, num_new - num_positions, num_new + num_nodes)

    def _request(self) -> ForwardRequest:
        if self.growth is not None:
            return self.growth.request(self.prefix)
        if isinstance(self.job, Draft):
            return draft_request(self.job, self.prefix)
        return verify_request(self.job, self.prefix)


@dataclass(frozen=True, slots=True)
class PackedForward:
    """A job's share of a forward."""

    packed: PackedJob
    request: ForwardRequest
    num_read: int  # new tokens before those whose logits are wanted
    num_rows: int  # new tokens and nodes
    is_chunk: bool = False  # whether only a part of a prompt is read

    @property
    def reads_prompt(self) -> bool:
        return self.num_read >= MIN_CHUNK

    @property
    def is_speculation(self) -> bool:
        """Whether nobody waits for it yet."""
        return isinstance(self.packed.job, Verify) and self.packed.job.lead > 0

    def within(self, room: int) -> PackedForward:
        """All of it where there is room for so many rows, or a chunk of the prompt."""
        if self.num_rows <= room or not self.num_read:
            return self
        count, num_cached = min(room, self.num_read), self.request.num_cached
        chunk = self.request.tokens[: (num_cached or 0) + count]
        return PackedForward(
            self.packed, ForwardRequest(chunk, len(chunk) + 1, num_cached), count, count, is_chunk=True
        )


class PackedServer:
    """Runs the jobs that have joined, one forward at a time for all of them."""

    def __init__(self, server: Server, model: SupportsPacking, max_positions: float = MAX_TOKENS) -> None:
        self.server, self._model, self.max_tokens = server, model, MAX_TOKENS
        self._max_positions = max_positions  # of a job; a wider one would make the others wait
        self.jobs: dict[int, PackedJob] = {}  # by id, the longest there first
        self._origins: set[TokenSequence] = set()  # whose jobs they are
        self._in_flight: frozenset[int] = frozenset()  # jobs of the forward that is being computed
        self._discarded: set[int] = set()  # of these
        self.num_computed = self.num_texts = 0  # new tokens of the last forward, and texts that they belong to

    @classmethod
    def of(cls, server: Server) -> PackedServer | None:
        """None: its model computes one text at a time."""
        model = server.model
        return cls(server, model) if isinstance(model, SupportsPacking) and model.can_pack else None

    def accepts(self, job: object) -> bool:
        """Whether a job can join now: there is one of each request."""
        return isinstance(job, SharedJob) and job.context.origin not in self._origins and self.suits(job)

    def suits(self, job: object) -> bool:
        """Whether a job can share forwards: one that gives nothing but tokens."""
        if not isinstance(job, SharedJob):
            return False
        if (job.tree or (isinstance(job, Draft) and job.expansions)) and not computes_trees(self._model):
            return False
        if isinstance(job, Verify):
            return job.num_positions <= self._max_positions
        return not job.sampling.needs_draft and len(job.expansions) <= self._max_positions

    def add(self, job: SharedJob) -> None:
        left = job.num_answers if isinstance(job, Draft) else 1
        growth = TreeGrowth(job) if isinstance(job, Draft) and job.expansions else None
        self.jobs[job.id] = PackedJob(job, self.server.prefixes.lookup(job.context), left, growth)
        self._origins.add(job.context.origin)

    def discard(self, id: int) -> bool:
        """Drop a job, at the end of its forward if it is being computed; return whether it was here."""
        if id in self._in_flight and id in self.jobs:
            self._discarded.add(id)
            return True
        if (packed := self.jobs.pop(id, None)) is None:
            return False
        self._origins.discard(packed.job.context.origin)
        return True

    def step(self) -> list[SharedEvent]:
        """Run one forward; return what came of it."""
        steps = self.poll_step()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                events: list[SharedEvent] = end.value
                return events

    def poll_step(self) -> Generator[None, None, list[SharedEvent]]:
        """The same, but yield while a model that computes asynchronously does so."""
        taken = self._take()
        self.num_computed, self.num_texts = sum(forward.num_rows for forward in taken), len(taken)
        self._in_flight = frozenset(forward.packed.job.id for forward in taken)
        try:
            answers = yield from self._poll_answers([forward.request for forward in taken])
        finally:
            self._in_flight = frozenset()
        discarded, self._discarded = self._discarded, set()
        for id in discarded:
            self.discard(id)
        return self._events(
            [(forward, answer) for forward, answer in zip(taken, answers) if forward.packed.job.id not in discarded]
        )

    def _poll_answers(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, Sequence[Answer | Exception]]:
        try:
            if isinstance(self._model, PollsPacked):
                return (yield from self._model.poll_packed(requests))
            return self._model.answer_packed(requests)
        except Exception:  # one of them cannot be computed: which?
            return [self._answer_alone(request) for request in requests]

    def _events(self, answered: Sequence[tuple[PackedForward, Answer | Exception]]) -> list[SharedEvent]:
        events = []
        for forward, answer in answered:
            context = forward.packed.prefix.context
            if (event := self._finish(forward, answer)) is not None:
                events.append((forward.packed.job, context, event))
        return events

    def _take(self) -> list[PackedForward]:
        """What the next forward computes: jobs that fit, and the first even if it does not."""
        room, taken = self.max_tokens, list[PackedForward]()
        forwards = [packed.forward() for packed in self.jobs.values()]
        continuing = [forward for forward in forwards if not forward.reads_prompt]
        for forward in sorted(continuing, key=lambda forward: forward.is_speculation):
            if forward.num_rows <= room or not taken:
                taken.append(forward)
                room -= forward.num_rows
        room = max(room, MIN_CHUNK)  # prompts are read even where texts that continue fill every forward
        for forward in forwards:
            if forward.reads_prompt and room > 0:
                taken.append(part := forward.within(room))
                room -= part.num_rows
        return taken

    def _answer_alone(self, request: ForwardRequest) -> Answer | Exception:
        try:
            [answer] = self._model.answer_packed([request])
        except Exception as error:
            return error
        return answer

    def _finish(self, forward: PackedForward, answer: Answer | Exception) -> Event | None:
        """The event of an answer; None for a chunk of a prompt."""
        packed, request = forward.packed, forward.request
        job, prefix = packed.job, packed.prefix
        if isinstance(answer, Exception):
            self.discard(job.id)
            return Failed(job.id, f"{type(answer).__name__}: {answer}")
        prefix.num_cached = len(request.tokens)
        prefix.add_tree(request.tree)
        if forward.is_chunk:
            return None
        packed.left -= 1
        if not packed.left:
            self.discard(job.id)
        if packed.growth is not None:
            return packed.growth.add(answer.children)
        if isinstance(job, Draft):
            prefix.append(answer.tokens[0])
            return Drafted(job.id, answer.tokens[0])
        if not job.fits(answer.tokens):
            return Failed(job.id, f"{len(answer.tokens)} tokens in answer to {job.num_positions} positions")
        return Verified(job.id, answer.tokens, answer.top_logprobs)
