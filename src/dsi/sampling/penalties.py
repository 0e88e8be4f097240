"""What a request asks of the logits before sampling: penalties, biases, and tokens that are not allowed.

A row is a function of the text before it, the length of the prompt and the sampling, so that every server and
every algorithm gives one text. The order is vLLM's. A ban that would leave no token is not applied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsi.core.messages import Sampling
from dsi.sampling.noise import Array, array_namespace


def apply_penalties(logits: Array, sampling: Sampling, tokens: Sequence[int], start: int, prompt_length: int) -> Array:
    """Process the logits after tokens[:i] for each i from `start` to len(tokens)."""
    # In numpy, whose operations on few elements take a tenth of torch's time.
    rows = np.array(logits if isinstance(logits, np.ndarray) else logits.cpu().numpy())
    ids = np.asarray(tokens, dtype=np.int64)
    for i, row in enumerate(rows, start):
        _ban(row, sampling, tokens[prompt_length:i])
        _add_bias(row, sampling)
        _penalise(row, sampling, ids[:i], ids[prompt_length:i])
    return array_namespace(logits).asarray(rows, device=logits.device)


def _ban(row: np.ndarray, sampling: Sampling, output: Sequence[int]) -> None:
    if sampling.allowed_token_ids:
        _keep_only(row, sampling.allowed_token_ids)
    if sampling.bad_words:
        _remove(row, [last for *before, last in sampling.bad_words if _ends_with(output, before)])
    if len(output) < sampling.min_tokens:
        _remove(row, sampling.end_token_ids)


def _ends_with(output: Sequence[int], before: Sequence[int]) -> bool:
    return not before or list(output[-len(before) :]) == list(before)


def _keep_only(row: np.ndarray, tokens: Sequence[int]) -> None:
    allowed = _within(row, tokens)
    kept = row[allowed]
    if _has_token(kept):
        row[:] = -np.inf
        row[allowed] = kept


def _remove(row: np.ndarray, tokens: Sequence[int]) -> None:
    banned = _within(row, tokens)
    kept = row[banned]
    row[banned] = -np.inf
    if not _has_token(row):
        row[banned] = kept


def _within(row: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """These tokens as an array, without those beyond the vocabulary of a drafter whose embedding is smaller."""
    ids = np.asarray(tokens, dtype=np.int64)
    return ids[ids < len(row)]


def _has_token(logits: np.ndarray) -> bool:
    return len(logits) > 0 and bool(logits.max() > -np.inf)


def _add_bias(row: np.ndarray, sampling: Sampling) -> None:
    pairs = [pair for pair in sampling.logit_bias if pair[0] < len(row)]
    if pairs:
        tokens, biases = zip(*pairs)
        row[list(tokens)] += np.asarray(biases, dtype=row.dtype)


def _penalise(row: np.ndarray, sampling: Sampling, text: np.ndarray, output: np.ndarray) -> None:
    """The repetition penalty counts prompt and output, the others the output only."""
    size, penalty = len(row), sampling.repetition_penalty
    if penalty != 1:
        seen = text[text < size]
        row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = np.unique(output[output < size], return_counts=True)
        row[seen] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(row.dtype)
