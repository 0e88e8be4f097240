"""Drafting and verification under a request's seed: which tokens a drafter guesses and which a target outputs.

Every random number is keyed by the seed, the position, its purpose and, under `block`, the start of the block;
never by the server, the attempt or the time. The output is the same whichever server verifies it, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsi.core.messages import DraftToken, Sampling
from dsi.sampling.acceptance_rules import block, match, specinfer
from dsi.sampling.logits import gumbel_argmax, probabilities, sample
from dsi.sampling.noise import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    Array,
    array_namespace,
    exponential_noise,
    noise_key,
    uniform,
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The distribution a draft token was drawn from, as it is sent: float32, without impossible tokens."""

    size: int
    tokens: np.ndarray | None  # None: all
    probs: np.ndarray

    @classmethod
    def from_dense(cls, probs: np.ndarray) -> DraftProbs:
        [tokens] = probs.nonzero()
        if 2 * len(tokens) > len(probs):
            return cls(len(probs), None, probs.astype(np.float32))
        return cls(len(probs), tokens.astype(np.int32), probs[tokens].astype(np.float32))

    def dense(self) -> np.ndarray:
        """The distribution that drafter and target both compute with, renormalised after the rounding."""
        full = np.zeros(self.size)
        full[slice(None) if self.tokens is None else self.tokens] = self.probs
        return np.asarray(full / full.sum())


def draw_guesses(
    logits: Array, sampling: Sampling, position: int, block_start: int = 0
) -> tuple[list[int], DraftProbs]:
    """Draw the draft tokens for a position independently, and return them with their distribution."""
    probs = probabilities(logits, sampling)
    draft_probs = DraftProbs.from_dense(probs if isinstance(probs, np.ndarray) else probs.cpu().numpy())
    q = draft_probs.dense()
    draws = [block_start + 1] if sampling.rule == "block" else range(sampling.num_candidates)
    keys = [noise_key(sampling.seed, position, DRAFT, draw) for draw in draws]
    return [gumbel_argmax(q, exponential_noise(q, key)) for key in keys], draft_probs


def verify_block(
    logits: Array, sampling: Sampling, position: int, guesses: Sequence[Sequence[DraftToken]]
) -> tuple[int, ...]:
    """Apply the sampling's acceptance rule: the output tokens, the first of them at `position`."""
    if not sampling.needs_draft:
        return match(logits, sampling, position)
    if sampling.rule == "block":
        return _verify_jointly(logits, sampling, position, guesses)
    rows = enumerate(zip(logits, guesses))
    return tuple(_verify_position(row, sampling, position + i, candidates) for i, (row, candidates) in rows)


def _verify_position(logits: Array, sampling: Sampling, position: int, guesses: Sequence[DraftToken]) -> int:
    if not guesses:
        return sample(logits, sampling, position)
    p, candidates = probabilities(logits, sampling), _with_dense_probs(logits, guesses)
    if len(candidates) == 1:  # the noise costs more than everything else: `block` draws it only if needed
        u = _acceptance_uniform(sampling, position, 0)
        [token] = block([p], candidates, [u], lambda _: _residual_noise(p, sampling, position, 0))
        return token
    uniforms = [_acceptance_uniform(sampling, position, i) for i in range(len(candidates))]
    return specinfer(p, candidates, uniforms, _residual_noise(p, sampling, position, 0))


def _verify_jointly(
    logits: Array, sampling: Sampling, position: int, guesses: Sequence[Sequence[DraftToken]]
) -> tuple[int, ...]:
    """Verify a block of guesses, and sample the position after it, which may have no guess."""
    draft = _with_dense_probs(logits[0], [guess for [guess] in filter(None, guesses)])
    ps = [probabilities(row, sampling) for row in logits[: len(draft)]]
    uniforms = [_acceptance_uniform(sampling, position + i, position + 1) for i in range(len(draft))]

    def noise(i: int) -> Array:
        return _residual_noise(ps[i], sampling, position + i, position + 1)

    tokens = block(ps, draft, uniforms, noise)
    all_accepted = tokens == tuple(token for token, _ in draft)
    unguessed = logits[len(draft) :] if all_accepted else ()
    return *tokens, *(sample(row, sampling, position + len(draft) + i) for i, row in enumerate(unguessed))


def _with_dense_probs(logits: Array, guesses: Sequence[DraftToken]) -> list[tuple[int, Array | None]]:
    """Pair each draft token with its dense distribution, of the logits' array type and device."""
    xp = array_namespace(logits)
    return [(token, probs and xp.asarray(probs.dense(), device=logits.device)) for token, probs in guesses]


def _acceptance_uniform(sampling: Sampling, position: int, draw: int) -> float:
    return uniform(noise_key(sampling.seed, position, ACCEPT, draw))


def _residual_noise(probs: Array, sampling: Sampling, position: int, draw: int) -> Array:
    return exponential_noise(probs, noise_key(sampling.seed, position, RESIDUAL, draw))
