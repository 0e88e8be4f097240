"""A drafter without a model: prompt lookup by matching n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsi.core.sequence import Tokens
from dsi.models.protocol import ForwardRequest


@dataclass(frozen=True)
class NGram:
    """Predict the token that followed the latest earlier occurrence of the longest matching suffix."""

    longest: int = 4
    shortest: int = 2

    def answer(self, request: ForwardRequest) -> Tokens:
        """Raise LookupError if no suffix occurs earlier: the draft fails, at no cost."""
        return tuple(self.guess(request.tokens[:i]) for i in range(request.start, len(request.tokens) + 1))

    def guess(self, tokens: Sequence[int]) -> int:
        for length in range(self.longest, self.shortest - 1, -1):
            position = _last_match(tokens, length)
            if position is not None:
                return tokens[position]
        raise LookupError("no n-gram at the end of this text occurs earlier in it")


def _last_match(tokens: Sequence[int], length: int) -> int | None:
    """Return the latest position before the end that follows the same `length` tokens as the end does."""
    suffix = list(tokens[len(tokens) - length :])
    for position in range(len(tokens) - 1, length - 1, -1):
        if tokens[position - 1] == suffix[-1] and list(tokens[position - length : position]) == suffix:
            return position
    return None
