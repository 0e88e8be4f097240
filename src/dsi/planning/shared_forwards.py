"""How many draft tokens pay for requests that share forwards: expected tokens per time, by the measured latencies."""

from __future__ import annotations

from dsi.planning.latency import LatencyModel

MAX_BLOCK = 8
MIN_GAIN = 0.05
DRAFT_ROW = 0.4  # of a draft forward that each text after the first adds to it
VERIFY_MS, DRAFT_MS = 0.06, 0.025  # that the engine takes to handle a verification and a draft token of one request


def shared_block(latency: LatencyModel, requests: int, acceptance: float) -> int:
    """The block, 0 for none, with which this many requests in shared forwards get the most tokens per time.

    Plain decoding is left for a clear gain only: its cost does not depend on what was estimated.
    """
    plain, *others = (tokens_per_ms(latency, requests, acceptance, block) for block in range(MAX_BLOCK + 1))
    best = max(others)
    return 1 + others.index(best) if best > (1 + MIN_GAIN) * plain else 0


def tokens_per_ms(latency: LatencyModel, requests: int, acceptance: float, block: int) -> float:
    """The expected tokens per ms of all requests: a draft forward for each token of a block, then the target's."""
    turns = latency.alone or latency
    tokens = sum(acceptance**i for i in range(block + 1))
    engine_ms = requests * (VERIFY_MS + DRAFT_MS * block)
    computed_ms = forward_ms(turns, requests * (block + 1)) + block * draft_ms(turns, requests)
    return requests * tokens / (computed_ms + engine_ms)


def draft_ms(latency: LatencyModel, texts: int) -> float:
    """A draft forward over one token of each of so many texts."""
    return float(latency.drafter_ms) * (1 + DRAFT_ROW * (texts - 1))


def forward_ms(latency: LatencyModel, width: int) -> float:
    """A target forward over so many new tokens, beyond the widest measured on the line through the last half."""
    widths = [(measured, float(ms - latency.engine_ms)) for measured, ms in latency.by_width]
    widths = widths or [(1, float(latency.target_ms - latency.engine_ms))]
    for measured, ms in widths:
        if width <= measured:
            return ms
    (last, ms), (middle, middle_ms) = widths[-1], widths[len(widths) // 2]
    slope = (ms - middle_ms) / (last - middle) if last > middle else float(latency.per_token_ms)
    return ms + slope * (width - last)
