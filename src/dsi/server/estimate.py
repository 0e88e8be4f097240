"""Estimates what other algorithms would have taken for the same text, from the latencies of its own forwards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dsi.core.generation import CORRECTED
from dsi.fleets.spans import Span
from dsi.planning.latency import LatencyModel


def observed_latency(spans: Sequence[Span], idle: LatencyModel) -> LatencyModel:
    """Scale the latencies of an idle machine by the median slowdown of a request's own forwards."""
    drafts = [_ms(span) / idle.drafter_ms for span in spans if span.kind == "draft"]
    verifications = [
        _ms(span) / (idle.target_ms + (span.width - 1) * idle.per_token_ms)
        for span in spans
        if span.kind == "verify" and not span.stale
    ]
    target, drafter = (max(1.0, median(ratios)) if ratios else 1.0 for ratios in (verifications, drafts))
    return idle.scaled(target, drafter)


def _ms(span: Span) -> float:
    return 1000 * float(span.end - span.start)


def nonsi_seconds(tokens: int, latency: LatencyModel) -> float:
    return tokens * latency.target_ms / 1000


def si_seconds(origins: Sequence[str], latency: LatencyModel, lookahead: int) -> float:
    """Replay SI block by block over the tokens' origins: a correction ends a block.

    A token without a draft counts as one that SI would have drafted correctly, which favours SI.
    """
    at, ms = 0, 0.0
    while at < len(origins):
        accepted = 0
        while accepted < lookahead and at + accepted < len(origins) and origins[at + accepted] != CORRECTED:
            accepted += 1
        ms += lookahead * latency.drafter_ms + latency.target_ms + lookahead * latency.per_token_ms
        at += accepted + 1  # the verification yields one token of the target's own
    return ms / 1000
