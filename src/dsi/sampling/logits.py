"""Logits processing and sampling: one row of logits -> a distribution -> a token, in numpy or torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dsi.core.messages import Sampling, TopLogprobs
from dsi.sampling.noise import Array, array_namespace, exponential_noise, float64, noise_key


def probabilities(logits: Array, sampling: Sampling) -> Array:
    """Convert logits to probabilities: temperature, then top-k, top-p and min-p, each renormalised."""
    logits = float64(logits - logits.max()) / sampling.temperature  # no overflow at low temperatures
    probs = _normalise(array_namespace(logits).exp(logits))
    if 0 < sampling.top_k < len(probs):
        probs = _keep_at_least(_kth_largest(probs, sampling.top_k), probs)
    if sampling.top_p < 1:
        probs = _keep_at_least(_nucleus_threshold(probs, sampling.top_p), probs)
    return _keep_at_least(sampling.min_p * probs.max(), probs)


def gumbel_argmax(probs: Array, noise: Array) -> int:
    """Sample by the Gumbel-max trick, as an exponential race: argmax p / e. Equal noise couples two models."""
    return int((probs / noise).argmax())


def sample(logits: Array, sampling: Sampling, position: int) -> int:
    """Sample the token at this position of the text."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    noise = exponential_noise(logits, noise_key(sampling.seed, position))
    return gumbel_argmax(probabilities(logits, sampling), noise)


def greedy_tokens(logits: Sequence[Array]) -> list[int]:
    """The likeliest token of each row, of several texts' rows at once."""
    if not logits:
        return []
    tokens: list[int] = concatenated(logits).argmax(-1).tolist()
    return tokens


def concatenated(logits: Sequence[Array]) -> Array:
    """The rows of all; those of one are not copied."""
    return logits[0] if len(logits) == 1 else array_namespace(logits[0]).concatenate(tuple(logits))


def greedy_top_k(logits: Sequence[Array], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """As `top_k_tokens` without noise, of several rows at once, each with its count."""
    rows = concatenated(logits)
    most = min(max(counts), rows.shape[-1])
    if isinstance(rows, np.ndarray):
        best = (-rows).argsort(-1)[:, :most]
        values = np.take_along_axis(rows, best, -1)
    else:
        values, best = rows.topk(most)
    return [
        tuple(token for token, logit in zip(tokens[:count], own) if logit > -math.inf)
        for tokens, own, count in zip(best.tolist(), values.tolist(), counts)
    ]


def top_k_tokens(logits: Array, sampling: Sampling, position: int, count: int) -> tuple[int, ...]:
    """Return the token that `sample` gives, then up to `count - 1` runners-up."""
    weights = _race_weights(logits, sampling, position)
    tokens = [int(weights.argmax())]
    for _ in range(count - 1):
        weights[tokens[-1]] = 0.0
        token = int(weights.argmax())
        if not float(weights[token]) > 0:
            break
        tokens.append(token)
    return tuple(tokens)


def top_logprobs(logits: Array, count: int, required: Sequence[Sequence[int]]) -> tuple[TopLogprobs, ...]:
    """For each row, return the log-probabilities of the `count` likeliest tokens and of the required ones.

    These are the model's own, before temperature and any other logits processing.
    """
    return tuple(_row_logprobs(row, count, tokens) for row, tokens in zip(logits, required))


def _row_logprobs(logits: Array, count: int, required: Sequence[int]) -> TopLogprobs:
    logits = float64(logits - logits.max())
    logprobs = logits - array_namespace(logits).log(array_namespace(logits).exp(logits).sum())
    likeliest = (-logprobs).argsort()[:count].tolist()
    by_token = {int(token): float(logprobs[token]) for token in (*likeliest, *required)}
    return tuple(sorted(by_token.items(), key=lambda item: -item[1]))


def _race_weights(logits: Array, sampling: Sampling, position: int) -> Array:
    """What the argmax is taken of: p / e up to a factor, or p without noise."""
    if sampling.temperature == 0:
        return array_namespace(logits).exp(float64(logits) - float64(logits).max())
    return probabilities(logits, sampling) / exponential_noise(logits, noise_key(sampling.seed, position))


def _normalise(weights: Array) -> Array:
    return weights / weights.sum()


def _kth_largest(probs: Array, k: int) -> Array:
    """The k-th largest probability, by partial selection instead of a full sort."""
    if isinstance(probs, np.ndarray):
        return np.partition(probs, len(probs) - k)[len(probs) - k]
    return probs.topk(k).values[-1]


def _nucleus_threshold(probs: Array, top_p: float) -> Array:
    """The smallest probability in the smallest set of tokens that reaches `top_p`."""
    ordered = probs[(-probs).argsort()]
    kept = int((ordered.cumsum(0) - ordered < top_p).sum())
    return ordered[max(kept, 1) - 1]


def _keep_at_least(threshold: Array, probs: Array) -> Array:
    """Drop tokens below the threshold. Ties stay in, so that the order of a sort does not matter."""
    return _normalise(probs * (probs >= threshold))
