"""Acceptance rules as pure functions of rows. A rule says what the target's text is.

`match` reads rows of scores. The other rules read rows of probabilities, the target's `p` and the drafter's
`q`, both normalised and in float64, and are handed their coins and noise: they know no seed and no position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsi.core.messages import Sampling
from dsi.sampling.logits import choose, race
from dsi.sampling.noise import Array, namespace

Guess = tuple[int, Array | None]  # a token and the row it was drawn from; None if it could be no other token


def match(rows: Array, sampling: Sampling, position: int) -> tuple[int, ...]:
    """Seed-coupled exact match (Daliri, Musco and Suresh, 2024): each row's own token.

    The first row is about `position`. A drafter that draws with the same noise is right wherever its
    token is the same, and the text is the target's own whatever the drafter says.
    """
    return tuple(choose(row, sampling, position + i) for i, row in enumerate(rows))


def reject(p: Array, token: int, q: Array | None, coin: float, noise: Array) -> int:
    """Rejection sampling (Leviathan et al., 2023; Chen et al., 2023): the guess, or a correction."""
    return several(p, [(token, q)], [coin], noise)


def several(p: Array, guesses: Sequence[Guess], coins: Sequence[float], noise: Array) -> int:
    """Several guesses for one place (Miao et al., 2024): the first that stands, or what they leave over.

    Their order may not depend on their tokens. Of guesses drawn without replacement, each comes with the
    row it was drawn from: without the tokens before it, and renormalised.
    """
    for (token, q), coin in zip(guesses, coins, strict=True):
        if coin < chance(p, token, q):
            return token
        p = residual(p, *excess(p, token, q))
    return race(p, noise)


def block(
    ps: Sequence[Array], guesses: Sequence[Guess], coins: Sequence[float], noise: Callable[[int], Array]
) -> tuple[int, ...]:
    """Block verification (Sun et al., 2025): the longest start of the guesses that stands, then a correction.

    Each row of `ps` is the target's after the guesses before it. When all stand nothing more is drawn, and
    the next block begins afresh. `noise(i)` is asked for only if the i-th token has to be drawn.
    """
    tokens, chances = tuple(token for token, _ in guesses), standing(ps, guesses)
    if not tokens or coins[len(tokens) - 1] < chances[-1]:
        return tokens
    # From the longest down: that a shorter start falls is no reason for a longer one to fall.
    for length in reversed(range(len(tokens))):
        left, mass = excess(ps[length], *guesses[length], chances[length])
        if length == 0 or coins[length - 1] < holds(chances[length], mass):
            break
    return *tokens[:length], race(residual(ps[length], left, mass), noise(length))


def chance(p: Array, token: int, q: Array | None, before: float = 1.0) -> float:
    """How likely a guess is to stand, if what came before it stands with chance `before`."""
    drawn = 1.0 if q is None else float(q[token])
    if drawn == 0:
        raise ValueError(f"token {token} was guessed, but the row it was drawn from gives it probability 0")
    return min(1.0, before * float(p[token]) / drawn)


def standing(ps: Sequence[Array], guesses: Sequence[Guess]) -> list[float]:
    """The chance of each start of a block, from the empty one to the whole: P of Sun et al."""
    chances = [1.0]
    for p, (token, q) in zip(ps, guesses, strict=True):
        chances.append(chance(p, token, q, chances[-1]))
    return chances


def holds(standing: float, mass: float) -> float:
    """How likely a start of a block is to stand once every longer one has fallen: h of Sun et al."""
    fallen = 1 - standing
    return mass / (mass + fallen) if mass + fallen > 0 else 1.0


def excess(p: Array, token: int, q: Array | None, before: float = 1.0) -> tuple[Array, float]:
    """Where the target wants more than the drafter gave, (before p - q)+, and how much in all."""
    left = before * p  # a row of our own, to write into
    if q is None:
        left[token] = 0.0
    else:
        left -= q
        left = left.clip(0.0)
    return left, float(left.sum())


def residual(p: Array, left: Array, mass: float) -> Array:
    """What is left over, as a distribution; `p` itself if rounding left nothing."""
    return left / mass if mass > 0 else p


def accepts(p: Array, q: Array) -> float:
    """How often `reject` accepts a guess drawn from `q`: 1 - TV(p, q)."""
    return min(1.0, float(namespace(p).minimum(p, q).sum()))


def coupled(p: Array, q: Array) -> float:
    """How often `match` accepts: the sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i).

    The maximum is p_j/p_i for the tokens whose p/q is no less than that of i, and q_j/q_i for the others:
    in the order of p/q both sums are running totals.
    """
    possible = p + q > 0
    p, q = p[possible], q[possible]
    order = (q / (p + q)).argsort()  # as p/q falls, and no division by zero
    p, q = p[order], q[order]
    shares = p * q / (q * p.cumsum(0) + p * (q.sum() - q.cumsum(0)))
    return min(1.0, float(shares.sum()))
