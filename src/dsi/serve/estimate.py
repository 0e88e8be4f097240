"""What another algorithm would have taken for the same text, from what one forward takes on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from dsi.core.generation import CORRECTED
from dsi.loading import Pace


def nonsi_seconds(tokens: int, pace: Pace) -> float:
    return tokens * pace.target_ms / 1000


def si_seconds(origins: Sequence[str], pace: Pace, block: int) -> float:
    """Block after block over the tokens as they came: a wrong guess ends a block.

    A token that nobody had guessed counts as one that SI would have guessed: in doubt for SI.
    """
    at, ms = 0, 0.0
    while at < len(origins):
        run = 0
        while run < block and at + run < len(origins) and origins[at + run] != CORRECTED:
            run += 1
        ms += block * pace.drafter_ms + pace.target_ms + block * pace.per_token_ms
        at += run + 1  # the target adds one of its own
    return ms / 1000
