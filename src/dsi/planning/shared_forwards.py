"""What pays for requests that share forwards: expected tokens per time, by the measured latencies.

Draft tokens are rows of the forwards that all requests share, those of a tree like those of a chain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import TREE_BRANCHES, Chances, best_paths, levels, num_accepted, rank_chances
from dsi.planning.latency import LatencyModel

MAX_BLOCK = 8
TREE_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_STEPS, STEPS_MS = 8, 40.0  # of forwards under plain decoding that follow one another
MIN_GAIN = 0.1
MIN_TREE_GAIN = 0.2  # of a tree over a chain: its forwards, and the engine's work for it, take a bit more
DRAFT_ROW = 0.4  # of a draft forward that each row after the first adds to it, where that was not measured
VERIFY_MS, DRAFT_MS = 0.08, 0.025  # that the engine takes at least for a verification and a draft token of one request
TOKEN_SHARE = 0.25  # of a verification that each token of plain decoding after the first takes it


NEARLY_TWICE = 1.7  # as long as one of half as many new tokens takes a forward that is no better than two of those
LEAST_SHARED_ROWS = 32


class Shape(NamedTuple):
    """What each request has drafted when it is verified."""

    spec: SpecConfig
    num_drafted: int
    num_accepted: float  # of them, on average
    levels: tuple[int, ...]  # rows of each draft forward


def chain(acceptance: float, block: int) -> Shape:
    spec = SpecConfig("si", block) if block else SpecConfig("nonsi")
    return Shape(spec, block, sum(acceptance**i for i in range(1, block + 1)), (1,) * block)


@lru_cache(256)
def trees(chances: Chances, most: int) -> tuple[Shape, ...]:
    """The best trees of each size up to `most` and each depth, but for those that are chains."""
    shapes = []
    for size in (size for size in TREE_SIZES if size <= most):
        for depth in range(1, min(size, MAX_BLOCK + 1)):
            if any(path[-1] for path, _ in best_paths(chances, size, depth)):
                spec = SpecConfig("si", depth, max_targets=1, tree=size, chances=chances)
                accepted = num_accepted(chances, size, depth)
                shapes.append(Shape(spec, size, accepted, tuple(levels(chances, size, depth))))
    return tuple(shapes)


def shared_spec(
    latency: LatencyModel, requests: int, acceptance: float, runner_up: float = 0.0, tree: int = 0
) -> SpecConfig:
    """How this many requests in shared forwards get the most tokens per time, with trees of `tree` nodes at most.

    Plain decoding is left for a clear gain only: its cost does not depend on what was estimated.
    """

    def speed(shape: Shape) -> float:
        return tokens_per_ms(latency, requests, shape)

    plain, *blocks = (chain(acceptance, block) for block in range(MAX_BLOCK + 1))
    best = max(blocks, key=speed)
    if speed(best) <= (1 + MIN_GAIN) * speed(plain):
        best = plain
    shapes = trees(rank_chances(acceptance, runner_up, TREE_BRANCHES), tree) if tree and runner_up else ()
    widest = max(shapes, key=speed, default=best)
    return (widest if speed(widest) > (1 + MIN_TREE_GAIN) * speed(best) else best).spec


def tokens_per_ms(latency: LatencyModel, requests: int, shape: Shape) -> float:
    """The expected tokens per ms of all requests: a draft forward for each level, then the target's.

    Where they are more than share a forward, the engine works for some of them while the others' forward runs. Under
    plain decoding some forwards follow one another before it does, on a device even while it does.
    """
    turns = latency.alone or latency
    rows = requests * (shape.num_drafted + 1)
    steps = 1 if shape.num_drafted else num_steps(turns, rows)
    verify_ms = max(VERIFY_MS, float(turns.engine_ms))
    engine_ms = requests * (verify_ms * (1 + TOKEN_SHARE * (steps - 1)) + DRAFT_MS * shape.num_drafted)
    forwards = max(1.0, rows / (turns.shared_rows or rows))
    drafting_ms = forwards * sum(draft_ms(turns, requests * drafted / forwards) for drafted in shape.levels)
    verifying_ms = forwards * forward_ms(turns, rows / forwards) + requests * float(turns.shared_text_ms)
    computing_ms = drafting_ms + steps * verifying_ms
    is_hidden = forwards > 1 or (steps > 1 and turns.shared_rows > 0)
    turn_ms = max(computing_ms, engine_ms) if is_hidden else computing_ms + engine_ms
    return requests * (steps + shape.num_accepted) / turn_ms


def draft_ms(latency: LatencyModel, rows: float) -> float:
    """A draft forward over so many rows, of texts or of their trees."""
    row_ms = latency.drafter_per_token_ms or DRAFT_ROW * latency.drafter_ms
    return float(latency.drafter_ms + latency.drafter_shared_ms + row_ms * (rows - 1))


def forward_ms(latency: LatencyModel, width: float) -> float:
    """A target forward over so many new tokens, beyond the widest measured on the line through the last half."""
    widths = [(measured, float(ms - latency.engine_ms)) for measured, ms in latency.by_width]
    widths = widths or [(1, float(latency.target_ms - latency.engine_ms))]
    for measured, ms in widths:
        if width <= measured:
            return ms
    (last, ms), (middle, middle_ms) = widths[-1], widths[len(widths) // 2]
    slope = (ms - middle_ms) / (last - middle) if last > middle else float(latency.per_token_ms)
    return ms + slope * (width - last)


def num_steps(latency: LatencyModel, rows: int) -> int:
    """How many forwards of plain decoding follow one another: others wait for them, if only until one has ended."""
    return max(1, min(MAX_STEPS, int(STEPS_MS / forward_ms(latency, rows))))


def shared_rows(latency: LatencyModel) -> int:
    """How many new tokens a forward should have at most where another can be launched behind it."""
    rows = latency.by_width[-1][0]
    while rows > LEAST_SHARED_ROWS and forward_ms(latency, rows) >= NEARLY_TWICE * forward_ms(latency, rows // 2):
        rows //= 2
    return rows
