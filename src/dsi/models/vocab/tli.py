"""A drafter of another vocabulary, token by token (Timor et al., 2025: token-level intersection, TLI).

It reads the target's text in its own tokens and gives rows over the target's vocabulary, in which only
the tokens that both have can win. So the noise of a seed is the target's own, and guesses stay coupled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.models.hf import common_prefix_length
from dsi.models.protocol import Backend, CancelFlag
from dsi.models.vocab.token_map import carried, shared
from dsi.models.vocab.vocabulary import Vocabulary, fitting, unfinished
from dsi.sampling.noise import array_namespace

LONGEST = 64  # tokens that are written anew together: so much is done again for each token more


class Retokenizer:
    """A text of the target in the drafter's tokens, extended as it grows.

    Shared tokens stand for themselves. What lies between them is decoded and encoded anew, together; so is
    a character of several tokens if one of them is not shared. `_at` says, for each length of the text,
    how much of the result is settled and where the rest begins, so that a text can be cut back anywhere.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, to_drafter: dict[int, int]) -> None:
        self._target, self._drafter, self._to_drafter = target, drafter, to_drafter
        self._tokens: list[int] = []
        self._settled: list[int] = []
        self._at = [(0, 0)]

    def of(self, tokens: Sequence[int]) -> list[int]:
        kept = common_prefix_length(self._tokens, tokens)
        del self._tokens[kept:], self._at[kept + 1 :]
        del self._settled[self._at[kept][0] :]
        for token in tokens[kept:]:
            self._add(token)
        found = self._settled + self._retold(self._open)
        opening = list(self._drafter.opening)
        return found if found and found[: len(opening)] == opening else [*opening, *found]

    @property
    def _open(self) -> list[int]:
        return self._tokens[self._at[-1][1] :]

    def _add(self, token: int) -> None:
        """Settle what this token makes certain."""
        waiting = self._open
        whole = not unfinished(self._target.written(waiting))
        if waiting and whole and self._stands_alone(token):
            self._settled += self._retold(waiting)
            waiting = []
        waiting = [*waiting, token]
        self._tokens.append(token)
        if self._is_certain(waiting):
            self._settled += self._retold(waiting)
            waiting = []
        self._at.append((len(self._settled), len(self._tokens) - len(waiting)))

    def _stands_alone(self, token: int) -> bool:
        """Shared, or special: what comes before it is not written together with it."""
        return token in self._to_drafter or not self._target.piece(token)

    def _is_certain(self, waiting: list[int]) -> bool:
        if len(waiting) >= LONGEST:
            return True
        return all(map(self._stands_alone, waiting)) and not unfinished(self._target.written(waiting))

    def _retold(self, tokens: list[int]) -> list[int]:
        if all(token in self._to_drafter for token in tokens):
            return [self._to_drafter[token] for token in tokens]
        text = self._target.written(tokens)
        return list(self._drafter.inside(text[: len(text) - unfinished(text)]))


class TLI:
    """`context` is the drafter's own; of a longer text it reads the end. 0: without bounds."""

    def __init__(self, backend: Backend, drafter: Vocabulary, target: Vocabulary, context: int = 0) -> None:
        self._backend, self._size, self._context = backend, target.size, context
        self._beginning = list(drafter.beginning)
        self.shared = shared(drafter.lexicon, target.lexicon)
        self._retold = Retokenizer(target, drafter, self.shared.to_drafter())

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:
        """One forward for each place: a longer text need not begin as a shorter one does."""
        if start > len(tokens):
            read = self._read(tokens)
            return self._backend.forward(read, len(read) + 1, cancelled)
        rows = [self._row(tokens[:i], cancelled) for i in range(start, len(tokens) + 1)]
        found = rows[0] if len(rows) == 1 else array_namespace(rows[0]).concatenate(rows)
        return carried(found, self.shared, self._size)

    def _row(self, tokens: Sequence[int], cancelled: CancelFlag) -> Any:
        read = self._read(tokens)
        return self._backend.forward(read, len(read), cancelled)

    def _read(self, tokens: Sequence[int]) -> Sequence[int]:
        return fitting(self._retold.of(tokens) or self._beginning, self._context)
