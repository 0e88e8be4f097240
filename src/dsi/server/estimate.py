"""What another algorithm would have taken for the same text, from what this one's forwards took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dsi.core.generation import CORRECTED
from dsi.fleets.spans import Span
from dsi.planning.latency import LatencyModel


def own_pace(spans: Sequence[Span], alone: LatencyModel) -> LatencyModel:
    """What a forward took while this text was written, whatever else the machine did: as many times as long
    as `alone` as its own did.
    """
    drafts = [_ms(span) / alone.drafter_ms for span in spans if span.kind == "draft"]
    verdicts = [
        _ms(span) / (alone.target_ms + (span.width - 1) * alone.per_token_ms)
        for span in spans
        if span.kind == "verify" and not span.stale
    ]
    slower, slow = (max(1.0, median(found)) if found else 1.0 for found in (verdicts, drafts))
    return alone.scaled(slower, slow)


def _ms(span: Span) -> float:
    return 1000 * float(span.end - span.start)


def nonsi_seconds(tokens: int, pace: LatencyModel) -> float:
    return tokens * pace.target_ms / 1000


def si_seconds(origins: Sequence[str], pace: LatencyModel, block: int) -> float:
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
