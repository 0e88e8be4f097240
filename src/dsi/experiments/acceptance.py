"""How often a drafter is right: the paper's estimate, a direct count, and whether its luck has a memory."""

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
from dsi.engine.trial import ModelFactory, Trial, run_trial

CERTAIN = 1.96  # standard deviations, for 95%
ENOUGH = 5  # acceptances and rejections to be expected where a share is judged
CHANCE = 0.05  # a difference that chance gives less often than this is not put down to it
LITTLE = 0.05  # a largest gap up to which a law that does not hold is still a fair picture
Hits = Sequence[bool]


@dataclass(frozen=True)
class Share:
    """How many of some guesses were right; None where there were none."""

    rate: float | None
    places: int

    @classmethod
    def of(cls, hits: Iterable[bool]) -> Share:
        found = list(hits)
        return cls(fmean(found) if found else None, len(found))


@dataclass(frozen=True)
class HazardStep:
    """Runs of acceptances that had this length when a token came, and those of them that it ended."""

    length: int
    reached: int
    ended: int
    survival: float  # observed share of runs that become at least this long
    law: float  # the same by the geometric law


@dataclass(frozen=True)
class Geometric:
    """The lengths of runs of acceptances, beside those of independent luck."""

    steps: tuple[HazardStep, ...]
    chi_square: float
    freedom: int
    p_value: float

    @property
    def distance(self) -> float:
        """Kolmogorov's: the largest gap between the two shares."""
        return max(abs(step.survival - step.law) for step in self.steps)

    @property
    def verdict(self) -> str:
        if self.freedom < 1:
            return "too few rejections to say whether acceptances are independent"
        if self.p_value >= CHANCE:
            return "the geometric law fits: chance alone gives such differences"
        if self.distance <= LITTLE:
            return "nearly geometric: the differences are small, but more than chance gives"
        return "not geometric: acceptances come in stretches, or differ from text to text"

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"distance": self.distance, "verdict": self.verdict}


@dataclass(frozen=True)
class Acceptance:
    """`estimate` is the paper's 1 - 1 / (1 + mean match); `rate` is counted at every place of every text."""

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

    @property
    def mean_match(self) -> float:
        return fmean(self.matches)

    @property
    def estimate(self) -> float:
        return geometric_rate(self.mean_match)

    @property
    def estimate_interval(self) -> tuple[float, float]:
        """95%: there is one match for each prompt, so it is wider than that of the count."""
        half = CERTAIN * stdev(self.matches) / sqrt(len(self.matches))
        return geometric_rate(max(0.0, self.mean_match - half)), geometric_rate(self.mean_match + half)

    @property
    def corrected(self) -> float:
        """The estimate, if a text that is equal to its end does not count as rejected there."""
        matched = sum(self.matches)
        return matched / max(1, matched + len(self.matches) - self.whole)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {
            "mean_match": self.mean_match,
            "estimate": self.estimate,
            "estimate_interval": self.estimate_interval,
            "corrected": self.corrected,
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
    """Both write by themselves, greedily; then the drafter reads the target's text."""
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
    places = sum(map(len, texts))
    rate = sum(map(sum, texts)) / places
    low, high = interval(texts, rate)
    pairs = [pair for hits in texts for pair in pairwise(hits)]
    return Acceptance(
        matches=tuple(trial.matched for trial in trials),
        whole=sum(trial.whole for trial in trials),
        ended=sum(trial.ended for trial in trials),
        places=places,
        rate=rate,
        low=low,
        high=high,
        after_acceptance=Share.of(now for before, now in pairs if before),
        after_rejection=Share.of(now for before, now in pairs if not before),
        geometric=geometric(texts, rate),
    )


def geometric_rate(mean: float) -> float:
    """With which rate runs of independent acceptances have this mean length."""
    return 1 - 1 / (1 + mean)


def interval(texts: Sequence[Hits], rate: float) -> tuple[float, float]:
    """Wilson's. Places of one text are alike, so they count for as many as the spread between texts shows."""
    places = sum(map(len, texts))
    apart = rate * (1 - rate) * places  # the variance of the hits, if all places were independent
    seen = sum((sum(hits) - rate * len(hits)) ** 2 for hits in texts) * len(texts) / (len(texts) - 1)
    n = places * min(1.0, apart / seen) if seen else places
    z2 = CERTAIN**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = CERTAIN * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def geometric(texts: Iterable[Hits], rate: float) -> Geometric:
    """Independent luck ends a run as often at every length: that is compared, and nothing is lost of the runs
    that the end of a text cut off."""
    found = steps(texts, rate)
    groups = pooled(found, rate)
    if len(groups) < 2:
        return Geometric(found, 0.0, 0, 1.0)
    chi_square = sum((ended - reached * (1 - rate)) ** 2 / (reached * rate * (1 - rate)) for reached, ended in groups)
    return Geometric(found, chi_square, len(groups) - 1, beyond(chi_square, len(groups) - 1))


def steps(texts: Iterable[Hits], rate: float) -> tuple[HazardStep, ...]:
    reached, ended = Counter[int](), Counter[int]()
    for hits in texts:
        length = 0
        for hit in hits:
            reached[length] += 1
            ended[length] += not hit
            length = length + 1 if hit else 0
    found, survival = [], 1.0
    for length in range(len(reached)):  # a run has had every length below its own
        found.append(HazardStep(length, reached[length], ended[length], survival, rate**length))
        survival *= 1 - ended[length] / reached[length]
    return tuple(found)


def pooled(found: Iterable[HazardStep], rate: float) -> list[tuple[int, int]]:
    """Neighbouring lengths together, until enough of both outcomes is to be expected in each group."""
    groups: list[tuple[int, int]] = []
    reached = ended = 0
    for step in found:
        reached, ended = reached + step.reached, ended + step.ended
        if reached * min(rate, 1 - rate) >= ENOUGH:
            groups.append((reached, ended))
            reached = ended = 0
    if groups and reached:
        last = groups.pop()
        groups.append((last[0] + reached, last[1] + ended))
    return groups


def beyond(chi_square: float, freedom: int) -> float:
    """How often chance gives a chi-square this large (Wilson and Hilferty's approximation)."""
    share = 2 / (9 * freedom)
    return NormalDist().cdf((1 - share - (chi_square / freedom) ** (1 / 3)) / sqrt(share))
