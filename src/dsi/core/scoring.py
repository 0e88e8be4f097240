"""What a target thinks of a text that is given: one forward, asked for again if it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsi.core.generation import Tally
from dsi.core.messages import Event, Failed, Job, Sampling, Step, TopLogprobs, Verified, Verify
from dsi.core.sequence import TokenSequence
from dsi.core.spec import Decision


class Scoring:
    """A request for no new token: it has notes on those that are there, each but the first."""

    def __init__(self, prompt: Iterable[int], sampling: Sampling, ids: Iterator[int]) -> None:
        self._context, self._sampling, self._ids = TokenSequence.of(prompt), sampling, ids
        if len(self._context) < 1:
            raise ValueError("an empty text: there is no token to score")
        self.open: dict[int, Job] = {}
        self.tally = Tally()
        self.origins: list[str] = []
        self.notes: list[TopLogprobs] = []
        self.decisions: list[Decision] = []
        self.finish_reason: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def origin(self) -> TokenSequence:
        return self._context

    @property
    def reached(self) -> tuple[int, int]:
        return 0, 0

    @property
    def waits(self) -> bool:
        """Its one forward is always asked for."""
        return False

    def start(self) -> Step:
        prompt = tuple(self._context)
        guesses = (*(((token, None),) for token in prompt[1:]), ())
        id = next(self._ids)
        job = self.open[id] = Verify(id, self._context, len(prompt), 0, self._sampling, guesses)
        return Step(start=(job,))

    def look(self) -> Step:
        return Step()

    def handle(self, event: Event) -> Step:
        if self.open.pop(event.id, None) is None:
            return Step()
        if isinstance(event, Failed):
            self.tally.failed += 1
            return self.start()
        if isinstance(event, Verified):
            self.tally.forwards += 1
            self.notes, self.finish_reason = list(event.notes[:-1]), "length"
        return Step()

    def stop(self) -> Step:
        self.finish_reason = self.finish_reason or "cancelled"
        cancelled, self.open = tuple(self.open), {}
        return Step(cancel=cancelled)
