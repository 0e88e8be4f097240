"""The state machines of requests that one forward of the target answers; it is repeated if it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dsi.core.generation import PLAIN, Tally
from dsi.core.messages import NO_STEP, Event, Failed, Job, Step, TopLogprobs, Verified, Verify
from dsi.core.request import ScoreRequest, VerifyRequest
from dsi.core.sequence import TokenSequence
from dsi.core.spec import Decision


class SingleForward(ABC):
    """Has the interface of a Generation towards the loop; a subclass says what the forward is and takes its answer."""

    root_unverified = False  # its one forward is always in flight
    progress = (0, 0)

    def __init__(self, context: TokenSequence, ids: Iterator[int]) -> None:
        self.origin, self._context, self._ids = context.origin, context, ids
        self._job: Verify | None = None
        self.tally = Tally()
        self.origins: list[str] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.decisions: list[Decision] = []
        self.finish_reason: str | None = None

    @abstractmethod
    def _forward(self, id: int) -> Verify:
        """Return the job."""

    @abstractmethod
    def _finish(self, event: Verified) -> Step:
        """Take its answer."""

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def job(self, id: int) -> Job | None:
        return self._job if self._job is not None and self._job.id == id else None

    def start(self) -> Step:
        self._job = self._forward(next(self._ids))
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
        if not isinstance(event, Verified):
            return NO_STEP
        self.tally.forwards += 1
        self.finish_reason = "length"
        return self._finish(event)

    def stop(self) -> Step:
        self.finish_reason = self.finish_reason or "cancelled"
        cancelled, self._job = () if self._job is None else (self._job.id,), None
        return Step(cancel=cancelled)


class Scoring(SingleForward):
    """Ends with the `top_logprobs` of a given text and emits no token."""

    def __init__(self, request: ScoreRequest, ids: Iterator[int]) -> None:
        super().__init__(TokenSequence.of(request.prompt), ids)
        self._sampling = request.sampling

    def _forward(self, id: int) -> Verify:
        prompt = self.origin.prompt
        draft_tokens = (*(((token, None),) for token in prompt[1:]), ())
        return Verify(id, self.origin, len(prompt), 0, self._sampling, draft_tokens)

    def _finish(self, event: Verified) -> Step:
        self.top_logprobs = list(event.top_logprobs[:-1])
        return NO_STEP


class Verification(SingleForward):
    """Emits the target's token after each of the last prefixes of a given text."""

    def __init__(self, request: VerifyRequest, ids: Iterator[int]) -> None:
        super().__init__(request.context, ids)
        self._request = request

    def _forward(self, id: int) -> Verify:
        request = self._request
        return Verify(id, request.context, request.num_positions, sampling=request.sampling, alone=True)

    def _finish(self, event: Verified) -> Step:
        self.tally.useful = self.tally.exposed = 1
        self.origins += [PLAIN] * len(event.tokens)
        return Step(emit=event.tokens)
