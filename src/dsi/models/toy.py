"""Exact little models, whose drafter agrees with the target at a chosen rate.

The true token after a text is a hash of its length and last two tokens, and always even. A drafter that
errs names the odd token beside it, which is never true; so it agrees at exactly its rate, independently
at every place, greedy or with any temperature. So does its second guess, where the first is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsi.core.sequence import Tokens
from dsi.models.protocol import CancelFlag, ForwardRequest
from dsi.sampling.acceptance_rules import match
from dsi.sampling.noise import UINT64_MAX, Array, splitmix64

VOCABULARY = 64
HALF = VOCABULARY // 2
TRUTH, ERROR, SECOND, SURE = range(4)  # what a hash is about


def place(about: int, seed: int, tokens: Sequence[int], i: int) -> int:
    """64 bits for what comes after tokens[:i]. Python's hash of small numbers is equal on every machine."""
    last = tokens[i - 1] if i > 0 else VOCABULARY
    before = tokens[i - 2] if i > 1 else VOCABULARY
    return splitmix64(hash((about, seed < 0, abs(seed), i, last, before)) & UINT64_MAX)


@dataclass(frozen=True)
class ToyTarget:
    seed: int = 0

    def answer(self, request: ForwardRequest) -> Tokens:
        """Greedy answers come straight from the hash: the same as the largest score, and much faster."""
        if request.sampling.temperature:
            return match(
                self.forward(request.tokens, request.start, request.cancelled), request.sampling, request.start
            )
        return tuple(self.truth(request.tokens, i) for i in range(request.start, len(request.tokens) + 1))

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:  # noqa: ARG002
        return np.stack([self.scores(tokens, i) for i in range(start, len(tokens) + 1)])

    def truth(self, tokens: Sequence[int], i: int) -> int:
        return (place(TRUTH, self.seed, tokens, i) >> 40) % HALF * 2

    def scores(self, tokens: Sequence[int], i: int) -> Array:
        """Even tokens by distance from the true one; odd tokens are impossible."""
        row = np.full(VOCABULARY, -np.inf, dtype=np.float32)
        row[::2] = -((np.arange(HALF) - self.truth(tokens, i) // 2) % HALF)
        return row


@dataclass(frozen=True)
class ToyDrafter:
    target: ToyTarget
    acceptance: float
    seed: int = 1
    runner_up_acceptance: float = 0.0  # where the first guess is wrong: how often the second is right
    no_runner_up_rate: float = 0.0  # where the first guess is right: how often there is no second
    acceptance_from: tuple[int, float] | None = None  # from this place of a text on, another acceptance
    wrong_positions: frozenset[int] = frozenset()  # places of a text at which it errs whatever its luck

    def __post_init__(self) -> None:
        for name in ("acceptance", "runner_up_acceptance", "no_runner_up_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be between 0 and 1")

    def answer(self, request: ForwardRequest) -> Tokens:
        truths = self.target.answer(request)
        errs = (self.errs(request.tokens, i) for i in range(request.start, len(request.tokens) + 1))
        return tuple(truth + err for truth, err in zip(truths, errs))

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:  # noqa: ARG002
        """A second guess beside the first; further ones are never right, and left out."""
        [truth], [guess] = self.target.answer(request), self.answer(request)
        if count < 2 or (guess == truth and self.luck(SURE, request.tokens, request.start) < self.no_runner_up_rate):
            return (guess,)
        if guess == truth:
            return guess, truth + 1
        right = self.luck(SECOND, request.tokens, request.start) < self.runner_up_acceptance
        return guess, truth if right else (truth + 3) % VOCABULARY

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        rows = self.target.forward(tokens, start, cancelled)
        return np.stack([np.roll(row, self.errs(tokens, start + i)) for i, row in enumerate(rows)])

    def errs(self, tokens: Sequence[int], i: int) -> bool:
        if i in self.wrong_positions:
            return True
        changed = self.acceptance_from is not None and i >= self.acceptance_from[0]
        acceptance = self.acceptance_from[1] if changed and self.acceptance_from else self.acceptance
        return (place(ERROR, self.seed, tokens, i) >> 11) * 2.0**-53 >= acceptance

    def luck(self, about: int, tokens: Sequence[int], i: int) -> float:
        """A number between 0 and 1, of its own for each place."""
        return (place(about, self.seed, tokens, i) >> 11) * 2.0**-53
