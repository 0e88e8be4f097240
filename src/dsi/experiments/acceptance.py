"""Measure the acceptance rate: the paper's estimate, a direct count, and whether acceptances are independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.core.sequence import Tokens
from dsi.engine.trial import ModelFactory, Trial, count_ranks, run_trial

Z_95 = 1.96  # standard deviations of a 95% interval
MIN_EXPECTED = 5  # acceptances and rejections in each group of a chi-square test
SIGNIFICANCE = 0.05  # of the chi-square test
SMALL_GAP = 0.05  # up to which a geometric law that the test rejects is still a fair approximation
Hits = Sequence[bool]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, for which the positions of one text are correlated."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of_rate(cls, texts: Sequence[Hits]) -> Estimate:
        """Return Wilson's interval for as many independent positions as the variance between texts implies."""
        count = sum(map(len, texts))
        rate = sum(map(sum, texts)) / count
        observed, independent = _variance_of_sum(texts, rate), rate * (1 - rate) * count
        n = count * min(1.0, independent / observed) if observed else count
        z2 = Z_95**2
        middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return cls(rate, max(0.0, middle - half), min(1.0, middle + half), count)

    @classmethod
    def of_mean(cls, texts: Sequence[Sequence[float]]) -> Estimate:
        count = sum(map(len, texts))
        mean = sum(map(sum, texts)) / count
        half = Z_95 * sqrt(_variance_of_sum(texts, mean)) / count
        return cls(mean, mean - half, mean + half, count)


def _variance_of_sum(texts: Sequence[Sequence[float]], mean: float) -> float:
    """Estimate the variance of the sum over all texts from how much the texts differ."""
    return sum((sum(text) - mean * len(text)) ** 2 for text in texts) * len(texts) / (len(texts) - 1)


@dataclass(frozen=True)
class Share:
    """The share of draft tokens that were accepted; None where there were none."""

    rate: float | None
    places: int

    @classmethod
    def of(cls, hits: Iterable[bool]) -> Share:
        accepted = list(hits)
        return cls(fmean(accepted) if accepted else None, len(accepted))


@dataclass(frozen=True)
class HazardStep:
    """The runs of acceptances that reached this length, and those of them that ended there."""

    length: int
    reached: int
    ended: int
    survival: float  # observed share of runs that become at least this long
    law: float  # the same by the geometric law


@dataclass(frozen=True)
class Geometric:
    """The lengths of runs of acceptances, compared with those of independent acceptances."""

    steps: tuple[HazardStep, ...]
    chi_square: float
    freedom: int
    p_value: float

    @property
    def distance(self) -> float:
        """Return the largest gap between the observed and the geometric survival (Kolmogorov's)."""
        return max(abs(step.survival - step.law) for step in self.steps)

    @property
    def verdict(self) -> str:
        if self.freedom < 1:
            return "too few rejections to say whether acceptances are independent"
        if self.p_value >= SIGNIFICANCE:
            return "the geometric law fits: chance alone gives such differences"
        if self.distance <= SMALL_GAP:
            return "nearly geometric: the differences are small, but more than chance gives"
        return "not geometric: acceptances come in stretches, or differ from text to text"

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"distance": self.distance, "verdict": self.verdict}


@dataclass(frozen=True)
class Acceptance:
    """`estimate` is the paper's 1 - 1 / (1 + mean match); `rate` is counted at every position of every text."""

    matches: tuple[int, ...]
    whole: int  # texts that were equal to the very end, so that the match was cut off there
    ended: int  # texts that the target ended early
    places: int
    rate: float
    low: float  # the 95% interval of the rate
    high: float
    after_acceptance: Share
    after_rejection: Share
    geometric: Geometric
    rank_counts: tuple[int, ...] = ()  # positions where the target's token is the drafter's first choice, its second...

    @property
    def chances(self) -> tuple[float, ...]:
        """Return how often the target's token is the drafter's first choice, its second, and so on."""
        return tuple(count / self.places for count in self.rank_counts)

    @property
    def mean_match(self) -> float:
        return fmean(self.matches)

    @property
    def estimate(self) -> float:
        return geometric_rate(self.mean_match)

    @property
    def estimate_interval(self) -> tuple[float, float]:
        """Return its 95% interval, wider than that of the count because a prompt gives one match only."""
        half = Z_95 * stdev(self.matches) / sqrt(len(self.matches))
        return geometric_rate(max(0.0, self.mean_match - half)), geometric_rate(self.mean_match + half)

    @property
    def corrected(self) -> float:
        """Return the estimate without counting a rejection at the end of texts that are equal to their end."""
        matched = sum(self.matches)
        return matched / max(1, matched + len(self.matches) - self.whole)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {
            "mean_match": self.mean_match,
            "estimate": self.estimate,
            "estimate_interval": self.estimate_interval,
            "corrected": self.corrected,
            "chances": self.chances,
            "geometric": self.geometric.json(),
        }


def acceptance(
    target: ModelFactory,
    drafter: ModelFactory,
    prompts: Sequence[Tokens],
    tokens: int,
    ends: Collection[int] = (),
    progress: Progress = no_progress,
) -> Acceptance:
    """Compare both models' greedy texts, and the drafter's predictions on the target's text."""
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompt: an interval needs at least 2")
    if tokens < 1:
        raise ValueError(f"tokens {tokens}: must be at least 1")
    trials = []
    for prompt in prompts:
        trials.append(run_trial(target, drafter, prompt, tokens, ends))
        progress()
    return summary(trials)


def summary(trials: Sequence[Trial]) -> Acceptance:
    texts = [trial.hits for trial in trials]
    rate = Estimate.of_rate(texts)
    pairs = [pair for hits in texts for pair in pairwise(hits)]
    return Acceptance(
        matches=tuple(trial.matched for trial in trials),
        whole=sum(trial.whole for trial in trials),
        ended=sum(trial.ended for trial in trials),
        places=rate.count,
        rate=rate.mean,
        low=rate.low,
        high=rate.high,
        after_acceptance=Share.of(now for before, now in pairs if before),
        after_rejection=Share.of(now for before, now in pairs if not before),
        geometric=geometric(texts, rate.mean),
        rank_counts=count_ranks(trial.ranks for trial in trials),
    )


def geometric_rate(mean: float) -> float:
    """Return the rate at which runs of independent acceptances have this mean length."""
    return 1 - 1 / (1 + mean)


def geometric(texts: Iterable[Hits], rate: float) -> Geometric:
    """Test whether a run ends equally often at every length, as independent acceptances would.

    Runs that the end of a text cut off count up to the length that they had.
    """
    steps = hazard_steps(texts, rate)
    groups = pooled(steps, rate)
    if len(groups) < 2:
        return Geometric(steps, 0.0, 0, 1.0)
    chi_square = sum((ended - reached * (1 - rate)) ** 2 / (reached * rate * (1 - rate)) for reached, ended in groups)
    return Geometric(steps, chi_square, len(groups) - 1, chi_square_p_value(chi_square, len(groups) - 1))


def hazard_steps(texts: Iterable[Hits], rate: float) -> tuple[HazardStep, ...]:
    reached, ended = Counter[int](), Counter[int]()
    for hits in texts:
        length = 0
        for hit in hits:
            reached[length] += 1
            ended[length] += not hit
            length = length + 1 if hit else 0
    steps, survival = [], 1.0
    for length in range(len(reached)):  # a run has had every length below its own
        steps.append(HazardStep(length, reached[length], ended[length], survival, rate**length))
        survival *= 1 - ended[length] / reached[length]
    return tuple(steps)


def pooled(steps: Iterable[HazardStep], rate: float) -> list[tuple[int, int]]:
    """Merge neighbouring lengths until each group expects enough of both outcomes."""
    groups: list[tuple[int, int]] = []
    reached = ended = 0
    for step in steps:
        reached, ended = reached + step.reached, ended + step.ended
        if reached * min(rate, 1 - rate) >= MIN_EXPECTED:
            groups.append((reached, ended))
            reached = ended = 0
    if groups and reached:
        last = groups.pop()
        groups.append((last[0] + reached, last[1] + ended))
    return groups


def chi_square_p_value(chi_square: float, freedom: int) -> float:
    """Return the probability of a chi-square this large (Wilson and Hilferty's approximation)."""
    share = 2 / (9 * freedom)
    return NormalDist().cdf((1 - share - (chi_square / freedom) ** (1 / 3)) / sqrt(share))
