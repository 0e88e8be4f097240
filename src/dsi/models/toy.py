"""Hash-based toy models, whose drafter agrees with the target at an exact rate.

The target's token after a text is a hash of its length and last two tokens, and always even. A drafter that
errs gives the odd token after it, which the target never outputs; so it agrees at exactly its acceptance
rate, independently at every position, greedy or at any temperature. So does its runner-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dsi.core.sequence import Tokens
from dsi.models.protocol import CancelFlag, ForwardRequest
from dsi.sampling.acceptance_rules import match
from dsi.sampling.noise import UINT64_MAX, Array, splitmix64

VOCAB_SIZE = 64
HALF = VOCAB_SIZE // 2
TARGET_TOKEN, ERROR, RUNNER_UP = range(3)  # what a hash decides


def position_hash(purpose: int, seed: int, tokens: Sequence[int], i: int) -> int:
    """Return 64 bits for the position after tokens[:i]. Python's hash of integers is equal on every machine."""
    last = tokens[i - 1] if i > 0 else VOCAB_SIZE
    before = tokens[i - 2] if i > 1 else VOCAB_SIZE
    return _hash(purpose, seed, i, last, before)


@lru_cache(1 << 16)  # the same texts are simulated under many algorithms
def _hash(purpose: int, seed: int, i: int, last: int, before: int) -> int:
    return splitmix64(hash((purpose, seed < 0, abs(seed), i, last, before)) & UINT64_MAX)


@dataclass(frozen=True)
class ToyTarget:
    seed: int = 0

    def answer(self, request: ForwardRequest) -> Tokens:
        """Take greedy tokens straight from the hash: equal to the argmax of the logits, and much faster."""
        if request.sampling.temperature:
            logits = self.forward(request.tokens, request.start, request.cancelled)
            return match(logits, request.sampling, request.start)
        return tuple(self.target_token(request.tokens, i) for i in range(request.start, len(request.tokens) + 1))

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:  # noqa: ARG002
        return np.stack([self.logits(tokens, i) for i in range(start, len(tokens) + 1)])

    def target_token(self, tokens: Sequence[int], i: int) -> int:
        return (position_hash(TARGET_TOKEN, self.seed, tokens, i) >> 40) % HALF * 2

    def logits(self, tokens: Sequence[int], i: int) -> Array:
        """Even tokens by their distance from the target token; odd tokens are impossible."""
        row = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
        row[::2] = -((np.arange(HALF) - self.target_token(tokens, i) // 2) % HALF)
        return row


@dataclass(frozen=True)
class ToyDrafter:
    target: ToyTarget
    acceptance: float
    seed: int = 1
    runner_up_acceptance: float = 0.0  # where the first guess is wrong: how often the runner-up is right
    acceptance_from: tuple[int, float] | None = None  # from this position of a text on, another acceptance
    wrong_positions: frozenset[int] = frozenset()  # positions at which it errs whatever its acceptance

    def __post_init__(self) -> None:
        for name in ("acceptance", "runner_up_acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be between 0 and 1")

    def answer(self, request: ForwardRequest) -> Tokens:
        target_tokens = self.target.answer(request)
        errors = (self.errs(request.tokens, i) for i in range(request.start, len(request.tokens) + 1))
        return tuple(token + error for token, error in zip(target_tokens, errors))

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        """Return the guess and runners-up, each of which is right as often where all before it are wrong."""
        [target_token], [guess] = self.target.answer(request), self.answer(request)
        correct = guess == target_token
        if count < 2:
            return (guess,)
        rank = 0 if correct else self._rank(request, count)
        wrong = (target_token + 1 + 2 * i for i in range(count))  # odd tokens, which the target never outputs
        return tuple(target_token if i == rank else (next(wrong) % VOCAB_SIZE) for i in range(count))

    def _rank(self, request: ForwardRequest, count: int) -> int:
        """Which choice is right, given that the first is not; `count` if none of those before is."""
        chance = self._uniform(RUNNER_UP, request)
        for rank in range(1, count):
            if chance < self.runner_up_acceptance:
                return rank
            chance = (chance - self.runner_up_acceptance) / (1 - self.runner_up_acceptance)  # uniform again
        return count

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        logits = self.target.forward(tokens, start, cancelled)
        return np.stack([np.roll(row, self.errs(tokens, start + i)) for i, row in enumerate(logits)])

    def errs(self, tokens: Sequence[int], i: int) -> bool:
        if i in self.wrong_positions:
            return True
        changed = self.acceptance_from is not None and i >= self.acceptance_from[0]
        acceptance = self.acceptance_from[1] if changed and self.acceptance_from else self.acceptance
        return (position_hash(ERROR, self.seed, tokens, i) >> 11) * 2.0**-53 >= acceptance

    def _uniform(self, purpose: int, request: ForwardRequest) -> float:
        """A number in [0, 1) for this purpose at the position after the text."""
        return (position_hash(purpose, self.seed, request.tokens, request.start) >> 11) * 2.0**-53
