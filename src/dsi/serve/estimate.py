"""What another algorithm would have taken for the same text, from what this one's forwards took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dsi.core.generation import CORRECTED
from dsi.fleets.spans import Span
from dsi.loading import Pace


def own_pace(spans: Sequence[Span], alone: Pace) -> Pace:
    """What a forward took while this text was written, whatever else the machine did; `alone` where it has
    none of a kind.
    """
    drafts = [1000 * float(span.end - span.start) for span in spans if span.kind == "draft"]
    verdicts = [span for span in spans if span.kind == "verify" and not span.stale]
    ones = [1000 * float(span.end - span.start) - (span.width - 1) * alone.per_token_ms for span in verdicts]
    return Pace(
        max(alone.target_ms, median(ones)) if ones else alone.target_ms,
        median(drafts) if drafts else alone.drafter_ms,
        alone.per_token_ms,
    )


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
