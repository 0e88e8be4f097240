"""What a token will take, at any acceptance rate, from one virtual run in which every guess is right.

Every rejection begins anew: the correction is there when its guess would have been confirmed, and nothing of
what came after is kept. So, if token k + 1 comes `rise[k]` after token k when all is right, the next token
takes `rise[K]` on average, where K is how many guesses were right before it since the last rejection: a
geometric number. That is exact for constant latencies and forwards that can be stopped at once, and holds
for non-SI, SI, PEARL and DSI alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice, pairwise
from operator import mul
from typing import Any

import numpy as np

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AdaptiveController, LatencyMonitor
from dsi.core.generation import Policy
from dsi.core.latency_table import LatencyTable
from dsi.core.policies import policy_for
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.planning.equation_1 import best_si_lookahead, minimal_lookahead
from dsi.planning.simulation import PolicyFactory, SimulationConfig

GAPS = (0, 0, 0, 1, 0, 2, 1, 1, 0, 4, 0, 9, 2, 20)  # guesses that are right between two that are wrong
LONG = 48  # and in the end, at least
LONGEST = 1024  # at most: a run of so many tokens takes a while
BLOCKS_IN_THE_END = 4  # at least, or what repeats itself could not be seen
FAR = 400  # places that are looked at where several drafters guess
SPARE = 16  # tokens more, so that the end of a text, where there is less to guess, is not seen
PARTS = 50  # of the acceptance rates at which ways are compared
SCALES = (0.5, 1.0, 2.0)  # how slow a drafter may turn out to be
SHARES = (0.5, 1)  # of the lookahead that Eq. (1) asks for
BLOCKS = (1, 2, 5)  # lookaheads that are tried besides
RATES = (0.2, 0.4, 0.7, 0.9)  # at which SI's best block may be a good patience
MOST = 32  # guesses of a block
CAUTION = 0.02  # by how much targets that crowd each other may be later than they are foretold to be
DEGREES = (1, 2, 4, 8)  # numbers of targets that are tried, besides all

Array = Any  # a float or an array of floats


@dataclass(frozen=True)
class Segment:
    """From one rejection to the next: by how much each token came after the one before."""

    before: int  # guesses that were right between the rejection and the one before that
    rises: Sequence[float]


@dataclass(frozen=True)
class RenewalModel:
    """What is known of a way: how it goes on after rejections, and what repeats itself in the long run."""

    stretches: tuple[Segment, ...]
    cycle: Sequence[float]

    def ms(self, acceptance: Array) -> Array:
        """A token, on average; a stretch counts as much as the one before it is likely."""
        p = np.asarray(acceptance, float)
        longest = max(len(each.rises) for each in self.stretches)
        fading = [p**k for k in range(len(self.cycle))]
        total = p**longest * sum(w * rise for w, rise in zip(fading, self.cycle)) / sum(fading)
        for k in range(longest):
            known = [each for each in self.stretches if len(each.rises) > k]
            weights = [p**each.before + 1e-9 for each in known]
            rise = sum(w * each.rises[k] for w, each in zip(weights, known)) / sum(weights)
            total = total + (1 - p) * p**k * rise
        return total

    def ms_of_several(self, acceptance: float, drafters: int) -> float:
        """With drafters that err each on its own: the text goes on as long as one of the branches stands."""
        longest = max(self.stretches, key=lambda each: len(each.rises)).rises
        rises = [*longest, *islice(cycle(self.cycle), FAR - len(longest))]
        stands = [1 - (1 - acceptance**k) ** drafters for k in range(FAR)]
        return float(sum(map(mul, stands, rises)) / sum(stands))


def stairs(setting: SimulationConfig, algorithm: str | SpecConfig) -> RenewalModel:
    """They are the same at every acceptance rate, so that is no part of the question."""
    alone = replace(setting, acceptance=1.0, later=None, tokens=LONG, requests=1)
    tokens = max(LONG, BLOCKS_IN_THE_END * longest_block(alone, algorithm))
    return _stairs(replace(alone, tokens=min(LONGEST, tokens)), algorithm)


def longest_block(setting: SimulationConfig, algorithm: str | SpecConfig) -> int:
    """Tokens that one forward may bring."""
    if isinstance(algorithm, SpecConfig):
        return 1 + max(algorithm.lookahead or 0, algorithm.min_draft or 0)
    return 1 + max(setting.lookahead_for(algorithm) or 0, setting.patience)


@lru_cache(4096)
def _stairs(setting: SimulationConfig, algorithm: str | SpecConfig) -> RenewalModel:
    """Where nothing lasts beyond a rejection, one stretch without any tells all."""
    latency = setting.latency
    lasting = latency.contention or latency.per_token_ms or len(latency.by_width) > 1
    gaps = (*(GAPS if lasting else ()), setting.tokens)
    ends = [sum(gaps[: i + 1]) + i for i in range(len(gaps))]
    wrong = frozenset(ends[:-1])
    right = replace(setting, wrong=wrong, tokens=ends[-1] + SPARE).with_latency(jitter=0, network_jitter=0)
    how = guide(algorithm, setting) if isinstance(algorithm, SpecConfig) else algorithm
    times = [0.0, *map(float, right.run(how, 0).completion.times)]
    rises = [b - a for a, b in pairwise(times)]
    stretches = [
        Segment(before, rises[end - gap : end + (end in wrong)]) for before, gap, end in zip((0, *gaps), gaps, ends)
    ]
    *others, last = stretches[1:] or stretches
    begun, again = settled(last.rises, float(latency.drafter_ms))
    return RenewalModel((*others, replace(last, rises=begun)), again)


def settled(rises: Sequence[float], least: float) -> tuple[Sequence[float], Sequence[float]]:
    """Up to the last block, and what comes again and again from then on: as from some block before to it.

    In the long run no token takes less than `least`.
    """
    knots = [i for i, rise in enumerate(rises) if rise > 0]
    again = rises[next(i for i in knots if i >= knots[-1] // 2) : knots[-1]] or rises[-1:]
    slower = max(1.0, least * len(again) / sum(again)) if sum(again) else 1.0
    return rises[: knots[-1]], [rise * slower for rise in again]


def expected_ms(setting: SimulationConfig, algorithm: str | SpecConfig) -> float:
    """Of a token."""
    found = stairs(replace(setting, drafters=1), algorithm)
    if setting.drafters > 1:
        return found.ms_of_several(setting.acceptance, setting.drafters)
    return float(found.ms(setting.acceptance))


def guide(way: SpecConfig, setting: SimulationConfig) -> PolicyFactory:
    return lambda _, __: policy_for(replace(way, drafters=setting.drafter_names))


def ways(setting: SimulationConfig, degrees: Iterable[int] = DEGREES) -> list[SpecConfig]:
    """All that may be the best at some acceptance."""
    found = [SpecConfig("nonsi", max_targets=1)]
    patiences = sorted({0, 1, *(block(setting, rate) for rate in RATES)})
    for sp in sorted({sp for sp in degrees if sp < setting.sp} | {setting.sp}):
        least = minimal_lookahead(setting.latency.target_ms, setting.latency.drafter_ms, sp)
        blocks = sorted({max(1, round(least * share)) for share in SHARES} | {*BLOCKS})
        found += [SpecConfig("dsi", ahead, patience, max_targets=sp) for ahead in blocks for patience in patiences]
    return found


def block(setting: SimulationConfig, rate: float) -> int:
    return best_si_lookahead(setting.latency.target_ms, setting.latency.drafter_ms, rate, MOST)


def outlook(setting: SimulationConfig, scales: Iterable[float] = SCALES) -> LatencyTable:
    """What each way takes at each speed of the drafter."""
    found = ways(setting)
    rates = np.arange(PARTS + 1) / PARTS
    tables, latency = [], setting.latency
    for scale in scales:
        slower = replace(setting, latency=latency.scaled(drafter=scale))
        tables.append(tuple(tuple(foretold(slower, way, rates).tolist()) for way in found))
    steps = latency.by_width or ((1, latency.target_ms),)
    return LatencyTable(
        tuple(found),
        tuple(scales),
        tuple(tables),
        float(latency.drafter_ms),
        tuple((width, float(ms)) for width, ms in steps),
        setting.sp,
        latency.contention,
    )


def foretold(setting: SimulationConfig, way: SpecConfig, rates: Array) -> Array:
    """What a token takes; a little more than expected where targets slow one another down, which is often
    foretold too well.
    """
    targets = way.max_targets or setting.sp
    wary = 1 + CAUTION if setting.latency.contention and targets > 1 else 1
    return wary * stairs(replace(setting, sp=targets), way).ms(rates)


def foreseen(setting: SimulationConfig) -> LatencyTable:
    """For any acceptance rate, of tokens after the first: nothing in it is of one text or one request."""
    return _foreseen(
        replace(
            setting,
            acceptance=0.5,
            tokens=LONG,
            lookahead=None,
            patience=0,
            later=None,
            requests=1,
            failures_per_hour=0,
        ).with_latency(target_ttft_ms=None, drafter_ttft_ms=None)
    )


@lru_cache
def _foreseen(setting: SimulationConfig) -> LatencyTable:
    return outlook(setting)


def best_way(known: LatencyTable, acceptance: float) -> tuple[SpecConfig, float]:
    """With the drafter as fast as it was measured; and what a token is expected to take."""
    scale, part = known.scale_index(1.0), known.rate_index(acceptance)
    way = known.best[scale][part]
    return known.configs[way], known.ms[scale][way][part]


def adaptive(known: LatencyTable, setting: SimulationConfig, prior: float = PRIOR_ACCEPTANCE) -> PolicyFactory:
    """What runs a setting by what it learns on the way."""

    def policy(loop: EngineLoop, unit: int) -> Policy:
        loop.latency_monitor = LatencyMonitor(known, unit)
        return AdaptiveController(known, setting.drafter_names, prior, loop.latency_monitor)

    return policy
