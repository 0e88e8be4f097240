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
from dsi.core.tree_shape import END
from dsi.models.protocol import Answer, CancelFlag, ForwardRequest, answer_text_by_text
from dsi.sampling.acceptance_rules import match
from dsi.sampling.noise import UINT64_MAX, Array, splitmix64

VOCAB_SIZE = 64
HALF = VOCAB_SIZE // 2
TARGET_TOKEN, ERROR, RUNNER_UP = range(3)  # what a hash decides


def position_hash(purpose: int, seed: int, tokens: Sequence[int], i: int) -> int:
    """Return 64 bits for the position after tokens[:i]. Python's hash of integers is equal on every machine."""
    return _hash(purpose, seed, *text_end(tokens, i))


TextEnd = tuple[int, int, int]  # the length of a text and its last two tokens, which decide all that follows


def text_end(tokens: Sequence[int], i: int) -> TextEnd:
    """The end of tokens[:i]."""
    return i, tokens[i - 1] if i > 0 else VOCAB_SIZE, tokens[i - 2] if i > 1 else VOCAB_SIZE


def text_ends(request: ForwardRequest) -> list[TextEnd]:
    """The ends of the texts that a request asks about: its own from `start` on, then those of a tree's nodes."""
    length = len(request.tokens)
    own = [text_end(request.tokens, i) for i in range(request.start, length + 1)]
    nodes: list[TextEnd] = []
    last = text_end(request.tokens, length)
    for parent, token in request.tree:
        before = last if parent == END else nodes[parent]
        nodes.append((before[0] + 1, token, before[1]))
    return own + [nodes[node] for node in request.asked]


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

    def answer_tree(self, request: ForwardRequest) -> Answer:
        tokens = self.tokens_after(request)
        return Answer(children=tuple((token,) for token in tokens)) if request.num_children else Answer(tokens)

    def tokens_after(self, request: ForwardRequest) -> Tokens:
        """The greedy tokens after all positions and nodes that are asked for."""
        if request.sampling.temperature:
            return tuple(token for text in request.texts() for token in self.answer(text))
        return tuple(self.token_after(*end) for end in text_ends(request))

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:  # noqa: ARG002
        return np.stack([self.logits(tokens, i) for i in range(start, len(tokens) + 1)])

    def target_token(self, tokens: Sequence[int], i: int) -> int:
        return self.token_after(*text_end(tokens, i))

    def token_after(self, length: int, last: int, before: int) -> int:
        """The target's token after a text that ends so."""
        return (_hash(TARGET_TOKEN, self.seed, length, last, before) >> 40) % HALF * 2

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
        [target_token] = self.target.answer(request)
        return self._choices(target_token, text_end(request.tokens, request.start), count)

    def answer_tree(self, request: ForwardRequest) -> Answer:
        if not request.num_children:
            return answer_text_by_text(self, request)
        ends = text_ends(request)
        return Answer(children=tuple(map(self._choices, self.target.tokens_after(request), ends, request.num_children)))

    def _choices(self, target_token: int, end: TextEnd, count: int) -> Tokens:
        rank = self._rank(end, count) if self._errs(*end) else 0
        wrong = (target_token + 1 + 2 * i for i in range(count))  # odd tokens, which the target never outputs
        return tuple(target_token if i == rank else (next(wrong) % VOCAB_SIZE) for i in range(count))

    def _rank(self, end: TextEnd, count: int) -> int:
        """Which choice is right, given that the first is not; `count` if none of those before is."""
        chance = (_hash(RUNNER_UP, self.seed, *end) >> 11) * 2.0**-53
        for rank in range(1, count):
            if chance < self.runner_up_acceptance:
                return rank
            chance = (chance - self.runner_up_acceptance) / (1 - self.runner_up_acceptance)  # uniform again
        return count

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        logits = self.target.forward(tokens, start, cancelled)
        return np.stack([np.roll(row, self.errs(tokens, start + i)) for i, row in enumerate(logits)])

    def errs(self, tokens: Sequence[int], i: int) -> bool:
        return self._errs(*text_end(tokens, i))

    def _errs(self, length: int, last: int, before: int) -> bool:
        if length in self.wrong_positions:
            return True
        changed = self.acceptance_from is not None and length >= self.acceptance_from[0]
        acceptance = self.acceptance_from[1] if changed and self.acceptance_from else self.acceptance
        return (_hash(ERROR, self.seed, length, last, before) >> 11) * 2.0**-53 >= acceptance
