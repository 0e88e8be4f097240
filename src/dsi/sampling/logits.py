"""Logits processing and sampling: one row of logits -> a distribution -> a token, in numpy or torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np

from dsi.core.messages import Sampling, TopLogprobs
from dsi.sampling.noise import Array, array_namespace, float64, noise_key, race, race_of_rows


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
    return int(race(_in_numpy(probabilities(logits, sampling)), noise_key(sampling.seed, position))[0])


def sample_rows(logits: Array, sampling: Sampling, position: int) -> tuple[int, ...]:
    """Sample a token from each row, the first of which is for `position`; on a device all rows at once.

    No row's arithmetic depends on how many there are: nothing is added up over a row, but where top-p does.
    """
    if sampling.temperature == 0:
        return tuple(greedy_tokens([logits]))
    if not _is_on_device(logits) or sampling.top_p < 1:
        return tuple(sample(row, sampling, position + i) for i, row in enumerate(logits))
    return race_of_rows(
        weights_of_rows(logits, sampling), [noise_key(sampling.seed, position + i) for i in range(len(logits))]
    )


def samples_at_once(logits: Array, sampling: Sampling) -> bool:
    """Whether rows of several texts are sampled together: on a device, where each call takes long for one row."""
    return _is_on_device(logits) and sampling.temperature > 0 and sampling.top_p == 1


def sample_texts(
    logits: Sequence[Array], samplings: Sequence[Sampling], positions: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Sample a token for each of the positions of each text, on a device: rows with the same settings at once."""
    by_settings: dict[Sampling, list[int]] = {}
    for i, sampling in enumerate(samplings):
        settings = Sampling(sampling.temperature, sampling.top_k, min_p=sampling.min_p)
        by_settings.setdefault(settings, []).append(i)
    sampled: list[tuple[int, ...]] = [()] * len(logits)
    for settings, texts in by_settings.items():
        keys = [noise_key(samplings[i].seed, position) for i in texts for position in positions[i]]
        tokens = iter(race_of_rows(weights_of_rows(concatenated([logits[i] for i in texts]), settings), keys))
        for i in texts:
            sampled[i] = tuple(islice(tokens, len(positions[i])))
    return sampled


def weights_of_rows(logits: Array, sampling: Sampling) -> Array:
    """The probabilities of each row of a torch tensor up to a factor, by temperature, top-k and min-p."""
    weights = (float64(logits - logits.amax(-1, keepdim=True)) / sampling.temperature).exp()
    if 0 < sampling.top_k < weights.shape[-1]:
        weights = weights * (weights >= weights.topk(sampling.top_k).values[:, -1:])
    if sampling.min_p > 0:  # the largest weight is 1
        weights = weights * (weights >= sampling.min_p)
    return weights


def _is_on_device(logits: Array) -> bool:
    return bool(hasattr(logits, "is_cuda") and logits.is_cuda)


def _in_numpy(array: Array) -> np.ndarray:
    """The same numbers as an array of numpy, without a copy on CPUs."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def greedy_tokens(logits: Sequence[Array]) -> list[int]:
    """The likeliest token of each row, of several texts' rows at once."""
    if not any(map(len, logits)):
        return []
    rows = concatenated(logits)
    if not (isinstance(rows, np.ndarray) or _is_on_device(rows)):
        rows = rows.float().numpy()  # which is several times as fast for few rows, and takes the first of equals, too
    tokens: list[int] = rows.argmax(-1).tolist()
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
    if sampling.temperature == 0:
        row = _in_numpy(float64(logits))
        best = (-row).argsort(kind="stable")[:count]
        return tuple(best[row[best] > -math.inf].tolist())
    probs = _in_numpy(probabilities(logits, sampling))
    best = race(probs, noise_key(sampling.seed, position), min(count, len(probs)))
    return tuple(best[probs[best] > 0].tolist())


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
