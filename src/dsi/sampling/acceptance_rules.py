"""Acceptance rules as pure functions: which tokens a verification outputs, given the draft tokens.

`match` takes logits. The other rules take probabilities, the target's `p` and the drafter's `q`, normalised
and in float64, together with their random numbers: seeds and positions are handled in `verify.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsi.core.messages import Sampling
from dsi.sampling.logits import gumbel_argmax, sample_rows
from dsi.sampling.noise import Array, array_namespace

# A draft token and the distribution it was drawn from; None for a deterministic drafter (a point mass).
DrawnToken = tuple[int, Array | None]


def match(logits: Array, sampling: Sampling, position: int) -> tuple[int, ...]:
    """Seed-coupled exact match (Daliri, Musco and Suresh, 2024): sample each row with its position's noise.

    The first row is for `position`. A drafter that samples with the same noise is accepted wherever it gives
    the same token; the output is the target's own whatever the draft tokens are.
    """
    return sample_rows(logits, sampling, position)


def reject(p: Array, token: int, q: Array | None, uniform: float, noise: Array) -> int:
    """Rejection sampling (Leviathan et al., 2023; Chen et al., 2023): the draft token, or a correction."""
    return specinfer(p, [(token, q)], [uniform], noise)


def specinfer(p: Array, guesses: Sequence[DrawnToken], uniforms: Sequence[float], noise: Array) -> int:
    """Multi-round rejection over several draft tokens for one position (SpecInfer, Miao et al., 2024).

    Return the first token accepted, or a sample of the final residual. The order of the guesses must not
    depend on their tokens. Guesses drawn without replacement each come with the distribution they were drawn
    from: without the tokens before them, and renormalised.
    """
    for (token, q), u in zip(guesses, uniforms, strict=True):
        if u < acceptance_probability(p, token, q):
            return token
        p = residual(p, *residual_weights(p, token, q))
    return gumbel_argmax(p, noise)


def block(
    ps: Sequence[Array], guesses: Sequence[DrawnToken], uniforms: Sequence[float], noise: Callable[[int], Array]
) -> tuple[int, ...]:
    """Block verification (Sun et al., 2025): the longest accepted prefix of the draft, then a correction.

    Row i of `ps` is the target's distribution after the first i guesses. When all are accepted no further
    token is drawn: the next block starts there. `noise(i)` is called only if the i-th token is drawn.
    """
    tokens, accepted = tuple(token for token, _ in guesses), prefix_acceptance(ps, guesses)
    if not tokens or uniforms[len(tokens) - 1] < accepted[-1]:
        return tokens
    # From the longest down: rejecting a shorter prefix does not imply rejecting a longer one.
    for length in reversed(range(len(tokens))):
        weights, mass = residual_weights(ps[length], *guesses[length], accepted[length])
        if length == 0 or uniforms[length - 1] < backoff_acceptance(accepted[length], mass):
            break
    return *tokens[:length], gumbel_argmax(residual(ps[length], weights, mass), noise(length))


def acceptance_probability(p: Array, token: int, q: Array | None, prefix: float = 1.0) -> float:
    """The probability of accepting a draft token, if its prefix is accepted with probability `prefix`."""
    draft_probability = 1.0 if q is None else float(q[token])
    if draft_probability == 0:
        raise ValueError(f"token {token} was guessed, but the row it was drawn from gives it probability 0")
    return min(1.0, prefix * float(p[token]) / draft_probability)


def prefix_acceptance(ps: Sequence[Array], guesses: Sequence[DrawnToken]) -> list[float]:
    """The acceptance probability of every prefix of a block, from the empty to the whole one: P of Sun et al."""
    accepted = [1.0]
    for p, (token, q) in zip(ps, guesses, strict=True):
        accepted.append(acceptance_probability(p, token, q, accepted[-1]))
    return accepted


def backoff_acceptance(prefix: float, mass: float) -> float:
    """The probability of accepting a prefix once all longer ones were rejected: h of Sun et al."""
    rejected = 1 - prefix
    return mass / (mass + rejected) if mass + rejected > 0 else 1.0


def residual_weights(p: Array, token: int, q: Array | None, prefix: float = 1.0) -> tuple[Array, float]:
    """Return the positive part of `prefix * p - q`, and its sum."""
    weights = prefix * p  # a copy, modified in place
    if q is None:
        weights[token] = 0.0
    else:
        weights -= q
        weights = weights.clip(0.0)
    return weights, float(weights.sum())


def residual(p: Array, weights: Array, mass: float) -> Array:
    """Normalise the residual weights; `p` itself if rounding left no mass."""
    return weights / mass if mass > 0 else p


def rejection_acceptance_rate(p: Array, q: Array) -> float:
    """The probability that `reject` accepts a token drawn from `q`: 1 - TV(p, q)."""
    return min(1.0, float(array_namespace(p).minimum(p, q).sum()))


def match_acceptance_rate(p: Array, q: Array) -> float:
    """The probability that `match` accepts: the sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i).

    The maximum is p_j/p_i for the tokens j whose p/q is no less than that of i, and q_j/q_i for the others:
    sorted by p/q, both sums are cumulative sums.
    """
    possible = p + q > 0
    p, q = p[possible], q[possible]
    order = (q / (p + q)).argsort()  # descending in p/q, without division by zero
    p, q = p[order], q[order]
    agreement = p * q / (q * p.cumsum(0) + p * (q.sum() - q.cumsum(0)))
    return min(1.0, float(agreement.sum()))
