"""From a row of scores to a distribution to a token, the same text for numpy and torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsi.core.messages import Sampling, TopLogprobs
from dsi.sampling.noise import Array, double, exponential, key, namespace


def probabilities(scores: Array, sampling: Sampling) -> Array:
    """A row of scores as probabilities: temperature, then top-k, top-p and min-p, each renormalised."""
    scores = double(scores - scores.max()) / sampling.temperature  # no overflow, however cold
    probs = _normalised(namespace(scores).exp(scores))
    if 0 < sampling.top_k < len(probs):
        probs = _at_least(_largest(probs, sampling.top_k), probs)
    if sampling.top_p < 1:
        probs = _at_least(_nucleus(_descending(probs), sampling.top_p), probs)
    return _at_least(sampling.min_p * probs.max(), probs)


def race(probs: Array, noise: Array) -> int:
    """Sample by an exponential race: the largest p / e wins. Equal noise couples any two models."""
    return int((probs / noise).argmax())


def choose(scores: Array, sampling: Sampling, position: int) -> int:
    """The token that a row of scores gives at this position of the text."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    return race(probabilities(scores, sampling), noise(scores, key(sampling.seed, position)))


def ranked(scores: Array, sampling: Sampling, position: int, count: int, doubt: float) -> tuple[int, ...]:
    """The token that `choose` gives, and up to `count - 1` runners-up that came to `doubt` of it or more."""
    marks = _marks(scores, sampling, position)
    found = [int(marks.argmax())]
    least = doubt * float(marks[found[0]])
    for _ in range(count - 1):
        marks[found[-1]] = 0.0  # out of the race
        token = int(marks.argmax())
        if not least <= float(marks[token]) > 0:
            break
        found.append(token)
    return tuple(found)


def noted(rows: Array, count: int, named: Sequence[Sequence[int]]) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens of each row, and those that are named, by what the model itself says.

    Without temperature or anything else that a request may do to its scores.
    """
    return tuple(_note(row, count, names) for row, names in zip(rows, named))


def _note(scores: Array, count: int, named: Sequence[int]) -> TopLogprobs:
    scores = double(scores - scores.max())
    logs = scores - namespace(scores).log(namespace(scores).exp(scores).sum())
    best = (-logs).argsort()[:count].tolist()
    found = {int(token): float(logs[token]) for token in (*best, *named)}
    return tuple(sorted(found.items(), key=lambda each: -each[1]))


def _marks(scores: Array, sampling: Sampling, position: int) -> Array:
    """What the race is decided by, p / e, up to a factor; without noise, p."""
    if sampling.temperature == 0:
        return namespace(scores).exp(double(scores) - double(scores).max())
    return probabilities(scores, sampling) / noise(scores, key(sampling.seed, position))


def noise(row: Array, number: int) -> Array:
    """A draw from Exp(1) for each token of a row, under one key."""
    xp = namespace(row)
    return exponential(number, xp.arange(len(row), dtype=xp.int64, device=row.device))


def _normalised(weights: Array) -> Array:
    return weights / weights.sum()


def _largest(probs: Array, k: int) -> Array:
    """The k-th largest, without a sort of all the others."""
    if isinstance(probs, np.ndarray):
        return np.partition(probs, len(probs) - k)[len(probs) - k]
    return probs.topk(k).values[-1]


def _descending(probs: Array) -> Array:
    return probs[(-probs).argsort()]


def _nucleus(ordered: Array, top_p: float) -> Array:
    """The smallest probability among the fewest that together reach `top_p`."""
    kept = int((ordered.cumsum(0) - ordered < top_p).sum())
    return ordered[max(kept, 1) - 1]


def _at_least(floor: Array, probs: Array) -> Array:
    """Drop what lies below `floor`. Ties stay in, so that the order of a sort does not matter."""
    return _normalised(probs * (probs >= floor))
