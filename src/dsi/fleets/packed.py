"""Continuous batching on one server: jobs of several requests share each forward.

A job joins between two forwards and leaves with its answer, so nobody waits for another's text to end. A forward
computes a limited number of new tokens: those of texts that continue come first, and a long prompt is read in chunks
of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsi.core.messages import Draft, Drafted, Event, Failed, Verified, Verify
from dsi.core.sequence import TokenSequence
from dsi.fleets.servers import CachedPrefix, Server
from dsi.models.protocol import Answer, ForwardRequest, SupportsPacking

MAX_TOKENS = 128  # new tokens of a forward
MIN_CHUNK = 16  # tokens of a long prompt that a forward reads at least

SharedJob = Verify | Draft
SharedEvent = tuple[SharedJob, TokenSequence, Event]  # a job, the text its forward computed, and what came of it


@dataclass(eq=False, slots=True)
class PackedJob:
    """A job that shares forwards, and how far it has come."""

    job: SharedJob
    prefix: CachedPrefix
    left: int  # answers that are missing: a draft's tokens, or one
    computing: bool = False  # whether a forward computes its next answer now

    @property
    def has_begun(self) -> bool:
        """Whether some of its draft tokens were given."""
        return isinstance(self.job, Draft) and self.left < self.job.count

    @property
    def width(self) -> int:
        return self.job.width if isinstance(self.job, Verify) else 1

    @property
    def num_new(self) -> int:
        """Tokens that its next answer has to compute."""
        width, missing = self.width, len(self.prefix.tokens) - (self.prefix.num_cached or 0)
        return width if width > missing else missing

    def num_tokens(self, room: int) -> int:
        """How many of them the next forward computes, where there is room for so many: all, or a chunk of a prompt."""
        num_new = self.num_new
        before = num_new - self.width  # those whose logits are not wanted
        return num_new if num_new <= room or not before else min(room, before)

    def request(self, num_tokens: int) -> ForwardRequest:
        """The next forward over so many of its new tokens."""
        tokens, num_cached = self.prefix.tokens, self.prefix.num_cached
        if num_tokens < self.num_new:
            chunk = tokens[: (num_cached or 0) + num_tokens]
            return ForwardRequest(chunk, len(chunk) + 1, num_cached)
        job, prompt_length = self.job, len(self.job.context.origin)
        if isinstance(job, Draft):
            return ForwardRequest(tokens, len(tokens), num_cached, job.sampling, prompt_length=prompt_length)
        start = len(tokens) + 1 - job.width
        return ForwardRequest(
            tokens, start, num_cached, job.sampling, guesses=job.draft_tokens, prompt_length=prompt_length
        )


@dataclass(eq=False, slots=True)
class PackedForward:
    """A forward over new tokens of several texts, and what it answered once it has run."""

    taken: list[tuple[PackedJob, int]]  # jobs, and how many new tokens of each
    requests: list[ForwardRequest]
    answers: Sequence[Answer | Exception] = ()

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.taken)


class PackedServer:
    """Runs the jobs that have joined in forwards that they share, one at a time with `step`.

    `begin` and `finish` are its two ends: `run`, between them, may take place in another thread, where the model can
    compute several forwards at once.
    """

    def __init__(self, server: Server, model: SupportsPacking, max_tokens: int = MAX_TOKENS) -> None:
        self.server, self._model, self.max_tokens = server, model, max_tokens
        self.jobs: dict[int, PackedJob] = {}  # by id, the longest there first
        self._origins: set[TokenSequence] = set()  # whose jobs they are, or were when their forward began

    @classmethod
    def of(cls, server: Server) -> PackedServer | None:
        """None: its model computes one text at a time."""
        model = server.model
        return cls(server, model) if isinstance(model, SupportsPacking) and model.can_pack else None

    @property
    def forwards_at_once(self) -> int:
        """How many forwards its model can compute at once, in threads of their own."""
        return self._model.forwards_at_once

    def accepts(self, job: object) -> bool:
        """Whether a job can join now: one of each request, and only such as give nothing but tokens."""
        if not isinstance(job, SharedJob) or job.context.origin in self._origins:
            return False
        if job.tree or (isinstance(job, Draft) and job.expansions):
            return False
        if isinstance(job, Verify):
            return job.width <= MAX_TOKENS
        return not job.sampling.needs_draft

    def add(self, job: SharedJob) -> None:
        left = job.count if isinstance(job, Draft) else 1
        self.jobs[job.id] = PackedJob(job, self.server.prefixes.lookup(job.context), left)
        self._origins.add(job.context.origin)

    def discard(self, id: int) -> bool:
        """Drop a job; return whether it was here."""
        if (packed := self.jobs.pop(id, None)) is None:
            return False
        if not packed.computing:  # or another job of its request would share the KV cache with that forward
            self._origins.discard(packed.job.context.origin)
        return True

    @property
    def has_ready_jobs(self) -> bool:
        """Whether there are jobs that no forward computes."""
        return any(not packed.computing for packed in self.jobs.values())

    @property
    def num_new(self) -> int:
        """New tokens of all jobs, those that are computed now included."""
        return sum(packed.num_new for packed in self.jobs.values())

    def step(self) -> list[SharedEvent]:
        """Run one forward; return what came of it."""
        forward = self.begin(self.max_tokens)
        self.run(forward)
        return self.finish(forward)

    def begin(self, max_tokens: int) -> PackedForward:
        """Take the jobs of the next forward."""
        taken = self._take(max_tokens)
        for packed, _ in taken:
            packed.computing = True
        return PackedForward(taken, [packed.request(num_tokens) for packed, num_tokens in taken])

    def run(self, forward: PackedForward, at_once: int = 1) -> None:
        """Compute the forward, one of so many that run at once."""
        try:
            forward.answers = self._model.answer_packed(forward.requests, at_once)
        except Exception:  # one of them cannot be computed: which?
            forward.answers = [self._answer_alone(request, at_once) for request in forward.requests]

    def finish(self, forward: PackedForward) -> list[SharedEvent]:
        """Return what came of a forward that has run, but for jobs that were dropped meanwhile."""
        events = []
        for (packed, _), request, answer in zip(forward.taken, forward.requests, forward.answers):
            context, packed.computing = packed.prefix.context, False
            if self.jobs.get(packed.job.id) is not packed:
                self._origins.discard(packed.job.context.origin)
            elif (event := self._finish(packed, request, answer)) is not None:
                events.append((packed.job, context, event))
        return events

    def _take(self, room: int) -> list[tuple[PackedJob, int]]:
        """What the next forward computes: jobs that fit, and how many new tokens of each."""
        taken, long = list[tuple[PackedJob, int]](), list[PackedJob]()
        for packed in self.jobs.values():
            if packed.computing:
                continue
            if (num_new := packed.num_new) > MIN_CHUNK:
                long.append(packed)
            elif num_new <= room or not taken:
                taken.append((packed, num_new))
                room -= num_new
        room = max(room, MIN_CHUNK)  # prompts are read even where texts that continue fill every forward
        for packed in long:
            if room > 0:
                taken.append((packed, num_tokens := packed.num_tokens(room)))
                room -= num_tokens
        return taken

    def _answer_alone(self, request: ForwardRequest, at_once: int) -> Answer | Exception:
        try:
            [answer] = self._model.answer_packed([request], at_once)
        except Exception as error:
            return error
        return answer

    def _finish(self, packed: PackedJob, request: ForwardRequest, answer: Answer | Exception) -> Event | None:
        """The event of an answer; None for a chunk of a prompt."""
        job, prefix = packed.job, packed.prefix
        if isinstance(answer, Exception):
            self.discard(job.id)
            return Failed(job.id, f"{type(answer).__name__}: {answer}")
        prefix.num_cached = len(request.tokens)
        if not request.num_positions:
            return None
        tokens, top_logprobs = answer
        packed.left -= 1
        if not packed.left:
            self.discard(job.id)
        if isinstance(job, Draft):
            prefix.append(tokens[0])
            return Drafted(job.id, tokens[0])
        if not job.fits(tokens):
            return Failed(job.id, f"{len(tokens)} tokens in answer to {job.width} positions")
        return Verified(job.id, tokens, top_logprobs)
