"""The state machine of a ScoreRequest: one forward of the target over the text, repeated if it fails."""

from __future__ import annotations

from collections.abc import Iterator

from dsi.core.generation import Tally
from dsi.core.messages import NO_STEP, Event, Failed, Job, Step, TopLogprobs, Verified, Verify
from dsi.core.request import ScoreRequest
from dsi.core.sequence import TokenSequence
from dsi.core.spec import Decision


class Scoring:
    """Has the interface of a Generation towards the loop; it ends with `top_logprobs` and emits no token."""

    root_unverified = False  # its one forward is always in flight
    progress = (0, 0)

    def __init__(self, request: ScoreRequest, ids: Iterator[int]) -> None:
        self.origin, self._sampling, self._ids = TokenSequence.of(request.prompt), request.sampling, ids
        self._job: Verify | None = None
        self.tally = Tally()
        self.origins: list[str] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.decisions: list[Decision] = []
        self.finish_reason: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def job(self, id: int) -> Job | None:
        return self._job if self._job is not None and self._job.id == id else None

    def start(self) -> Step:
        prompt = tuple(self.origin)
        draft_tokens = (*(((token, None),) for token in prompt[1:]), ())
        self._job = Verify(next(self._ids), self.origin, len(prompt), 0, self._sampling, draft_tokens)
        return Step(start=(self._job,))

    def replan(self) -> Step:
        return NO_STEP

    def handle(self, event: Event) -> Step:
        if self.job(event.id) is None:
            return NO_STEP
        self._job = None
        if isinstance(event, Failed):
            self.tally.failed += 1
            return self.start()
        if isinstance(event, Verified):
            self.tally.forwards += 1
            self.top_logprobs, self.finish_reason = list(event.top_logprobs[:-1]), "length"
        return NO_STEP

    def stop(self) -> Step:
        self.finish_reason = self.finish_reason or "cancelled"
        cancelled, self._job = () if self._job is None else (self._job.id,), None
        return Step(cancel=cancelled)
