"""The rules with a request's seed: what a drafter guesses, and which tokens stand.

Every coin is keyed by the seed, the position, what it decides and, under `block`, where the block began:
never by a server, a try or the time. So the text is the same whoever judges it, and whenever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsi.core.messages import Guess, Sampling
from dsi.sampling.acceptance_rules import block, match, several
from dsi.sampling.logits import choose, noise, probabilities, race
from dsi.sampling.noise import ACCEPT, DRAFT, RESIDUAL, Array, coin, double, key, namespace


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The row that a guess was drawn from, as it travels: in float32, and only the tokens that can be."""

    size: int
    tokens: np.ndarray | None  # None: all
    shares: np.ndarray

    @classmethod
    def of(cls, row: np.ndarray) -> DraftProbs:
        [tokens] = row.nonzero()
        if 2 * len(tokens) > len(row):
            return cls(len(row), None, row.astype(np.float32))
        return cls(len(row), tokens.astype(np.int32), row[tokens].astype(np.float32))

    def row(self) -> np.ndarray:
        """As both ends compute with it: what was rounded away is no part of the draw either."""
        full = np.zeros(self.size)
        full[slice(None) if self.tokens is None else self.tokens] = self.shares
        return np.asarray(full / full.sum())


def guessed(scores: Array, sampling: Sampling, position: int, start: int = 0) -> tuple[list[int], DraftProbs]:
    """The guesses about a position, drawn independently, and the odds of each."""
    row = probabilities(scores, sampling)
    odds = DraftProbs.of(row if isinstance(row, np.ndarray) else row.cpu().numpy())
    row = odds.row()
    draws = [start + 1] if sampling.rule == "block" else range(sampling.guesses)
    return [race(row, noise(row, key(sampling.seed, position, DRAFT, draw))) for draw in draws], odds


def judged(rows: Array, sampling: Sampling, position: int, guesses: Sequence[Sequence[Guess]]) -> tuple[int, ...]:
    """The tokens that stand, the first of them at `position`."""
    if not sampling.needs_guess:
        return match(rows, sampling, position)
    if sampling.rule == "block":
        return _judged_together(rows, sampling, position, guesses)
    return tuple(_judged(row, sampling, position + i, each) for i, (row, each) in enumerate(zip(rows, guesses)))


def _judged(scores: Array, sampling: Sampling, position: int, guesses: Sequence[Guess]) -> int:
    if not guesses:
        return choose(scores, sampling, position)
    p, known = probabilities(scores, sampling), _rows_like(scores, guesses)
    if len(known) == 1:  # noise takes longer than all the rest: only if it is needed
        [token] = block([p], known, [_coin(sampling, position, 0)], lambda _: _residual(p, sampling, position, 0))
        return token
    coins = [_coin(sampling, position, i) for i in range(len(known))]
    return several(p, known, coins, _residual(p, sampling, position, 0))


def _judged_together(
    rows: Array, sampling: Sampling, position: int, guesses: Sequence[Sequence[Guess]]
) -> tuple[int, ...]:
    """A block of guesses, and after it perhaps a place about which there is none."""
    known = _rows_like(rows[0], [guess for [guess] in filter(None, guesses)])
    ps = [probabilities(row, sampling) for row in rows[: len(known)]]
    coins = [_coin(sampling, position + i, position + 1) for i in range(len(known))]
    drawn: Callable[[int], Array] = lambda i: _residual(ps[i], sampling, position + i, position + 1)  # noqa: E731
    found = block(ps, known, coins, drawn)
    stood = found == tuple(token for token, _ in known)
    free = rows[len(known) :] if stood else ()
    return (*found, *(choose(row, sampling, position + len(known) + i) for i, row in enumerate(free)))


def _rows_like(scores: Array, guesses: Sequence[Guess]) -> list[tuple[int, Array | None]]:
    """With the odds as rows of the same kind as the scores."""
    xp = namespace(scores)
    return [
        (token, None if odds is None else double(xp.asarray(odds.row(), device=scores.device)))
        for token, odds in guesses
    ]


def _coin(sampling: Sampling, position: int, draw: int) -> float:
    return coin(key(sampling.seed, position, ACCEPT, draw))


def _residual(row: Array, sampling: Sampling, position: int, draw: int) -> Array:
    return noise(row, key(sampling.seed, position, RESIDUAL, draw))
