"""Predict milliseconds per token at any acceptance rate, from one virtual run in which every draft token is right.

Every rejection is a renewal: the target's token is there when the rejected draft token would have been
verified, and nothing of what came after is kept. So, if token k + 1 comes `gaps_ms[k]` after token k when all is
accepted, the next token takes `gaps_ms[K]` on average, where K is how many draft tokens were accepted since the
last rejection: a geometric number. That is exact for constant latencies and forwards that can be cancelled at
once, and holds for non-SI, SI, PEARL and DSI alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice, pairwise
from operator import mul
from typing import Any

import numpy as np

from dsi.core.spec import SpecConfig
from dsi.planning.simulation import SimulationConfig

ACCEPTED_RUNS = (0, 0, 0, 1, 0, 2, 1, 1, 0, 4, 0, 9, 2, 20)  # draft tokens accepted between two rejections
LAST_RUN = 48  # accepted at the end, at least
LONGEST_RUN = 1024  # at most: a simulation of so many tokens takes a while
BLOCKS_IN_LAST_RUN = 4  # at least, or its period could not be seen
POSITIONS = 400  # summed over where several drafters draft
MARGIN = 16  # tokens after the last run, so that the end of a text, with less left to draft, does not count

Array = Any  # a float or an array of floats


@dataclass(frozen=True)
class Segment:
    """The gaps between tokens from one rejection to the next."""

    accepted_before: int  # draft tokens accepted between the rejection before and this one
    gaps_ms: Sequence[float]


@dataclass(frozen=True)
class RenewalModel:
    """The gaps between tokens after rejections, and the period that repeats in the long run."""

    segments: tuple[Segment, ...]
    period_ms: Sequence[float]

    def ms(self, acceptance: Array) -> Array:
        """Milliseconds per token; a segment counts as much as the one before it is likely."""
        p = np.asarray(acceptance, float)
        longest = max(len(segment.gaps_ms) for segment in self.segments)
        powers = [p**k for k in range(len(self.period_ms))]
        total = p**longest * sum(w * gap for w, gap in zip(powers, self.period_ms)) / sum(powers)
        for k in range(longest):
            segments = [segment for segment in self.segments if len(segment.gaps_ms) > k]
            weights = [p**segment.accepted_before + 1e-9 for segment in segments]
            gap = sum(w * segment.gaps_ms[k] for w, segment in zip(weights, segments)) / sum(weights)
            total = total + (1 - p) * p**k * gap
        return total

    def ms_of_several(self, acceptance: float, drafters: int) -> float:
        """The same with drafters that err independently: the text goes on as long as one branch is accepted."""
        longest = max(self.segments, key=lambda segment: len(segment.gaps_ms)).gaps_ms
        gaps = [*longest, *islice(cycle(self.period_ms), POSITIONS - len(longest))]
        accepted = [1 - (1 - acceptance**k) ** drafters for k in range(POSITIONS)]
        return float(sum(map(mul, accepted, gaps)) / sum(accepted))


def predicted_ms(config: SimulationConfig, algorithm: str | SpecConfig | None = None) -> float:
    """Milliseconds per token under the config's spec, or under another algorithm or spec."""
    model = renewal_model(replace(config, drafters=1), algorithm)
    if config.drafters > 1:
        return model.ms_of_several(config.acceptance, config.drafters)
    return float(model.ms(config.acceptance))


def renewal_model(config: SimulationConfig, algorithm: str | SpecConfig | None = None) -> RenewalModel:
    """Measure the model in virtual time; it is the same at every acceptance rate."""
    spec = algorithm if isinstance(algorithm, SpecConfig) else config.spec
    if isinstance(algorithm, str):
        spec = replace(spec, algorithm=algorithm)
    latency = config.latency.under(spec.algorithm)
    alone = replace(
        config, latency=latency, acceptance=1.0, acceptance_change=None, tokens=LAST_RUN, requests=1, spec=spec
    )
    block = 1 + max(alone.lookahead_for(spec.algorithm) or 0, spec.min_draft or 0)
    tokens = min(LONGEST_RUN, max(LAST_RUN, BLOCKS_IN_LAST_RUN * block))
    return _renewal_model(replace(alone, tokens=tokens).with_latency(jitter=0, network_jitter=0))


@lru_cache(4096)
def _renewal_model(config: SimulationConfig) -> RenewalModel:
    """Where nothing lasts beyond a rejection, one segment without rejections is enough."""
    latency = config.latency
    lasting = latency.contention or latency.per_token_ms or len(latency.by_width) > 1
    runs = (*(ACCEPTED_RUNS if lasting else ()), config.tokens)
    ends = [sum(runs[: i + 1]) + i for i in range(len(runs))]
    rejected = frozenset(ends[:-1])
    simulated = replace(config, rejected_positions=rejected, tokens=ends[-1] + MARGIN).run(config.spec, 0)
    gaps = [after - before for before, after in pairwise([0.0, *map(float, simulated.completion.times)])]
    segments = [
        Segment(before, gaps[end - run : end + (end in rejected)]) for before, run, end in zip((0, *runs), runs, ends)
    ]
    *others, last = segments[1:] or segments
    start, period = split_period(last.gaps_ms, float(latency.drafter_ms))
    return RenewalModel((*others, replace(last, gaps_ms=start)), period)


def split_period(gaps_ms: Sequence[float], least_ms: float) -> tuple[Sequence[float], Sequence[float]]:
    """Split the gaps at the last block: what comes before it, and the period that repeats from there on.

    In the long run no token takes less than `least_ms`.
    """
    block_starts = [i for i, gap in enumerate(gaps_ms) if gap > 0]
    last = block_starts[-1]
    period = gaps_ms[next(i for i in block_starts if i >= last // 2) : last] or gaps_ms[-1:]
    factor = max(1.0, least_ms * len(period) / sum(period)) if sum(period) else 1.0
    return gaps_ms[:last], [gap * factor for gap in period]
