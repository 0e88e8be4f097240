"""A drafter without a model: what followed the last time these words were said (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsi.core.sequence import Tokens
from dsi.models.protocol import ForwardRequest


@dataclass(frozen=True)
class NGram:
    """Guesses the token after the latest earlier place that ends alike, in as many tokens as possible."""

    longest: int = 4
    shortest: int = 2

    def answer(self, request: ForwardRequest) -> Tokens:
        """A text that never said anything like its end has no guess: the draft fails, and costs nothing."""
        return tuple(self.guess(request.tokens[:i]) for i in range(request.start, len(request.tokens) + 1))

    def guess(self, tokens: Sequence[int]) -> int:
        for length in range(self.longest, self.shortest - 1, -1):
            place = _last(tokens, length)
            if place is not None:
                return tokens[place]
        raise LookupError("nothing like the end of this text was said before")


def _last(tokens: Sequence[int], length: int) -> int | None:
    """The latest place, before the end, that follows the same `length` tokens as the end does."""
    end = list(tokens[len(tokens) - length :])
    for place in range(len(tokens) - 1, length - 1, -1):
        if tokens[place - 1] == end[-1] and list(tokens[place - length : place]) == end:
            return place
    return None
