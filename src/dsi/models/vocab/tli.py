"""Token-level intersection (TLI; Timor et al., 2025): drafting by tokens that both vocabularies share.

The drafter reads the target's text in its own tokens, and its logits are mapped to the target's vocabulary,
with -inf for tokens that are not shared. The keyed noise is then the target's own, and guesses stay coupled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.models.kv_sequence import common_prefix_length
from dsi.models.protocol import Backend, CancelFlag
from dsi.models.vocab.token_map import map_logits, shared_tokens
from dsi.models.vocab.vocabulary import Vocabulary, fit_context, incomplete_bytes
from dsi.sampling.noise import array_namespace

MAX_PENDING = 64  # tokens that are retokenized together: they are redone for every further token


class Retokenizer:
    """Convert a growing text from the target's tokens to the drafter's, incrementally.

    Shared tokens are mapped directly. Runs of others are decoded and encoded again together, as is a character
    of several tokens of which one is not shared. `_state` has, for each length of the text, how much of the
    result is final and where the pending tokens begin, so that the text can be truncated anywhere.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, to_drafter: dict[int, int]) -> None:
        self._target, self._drafter, self._to_drafter = target, drafter, to_drafter
        self._tokens: list[int] = []
        self._final: list[int] = []
        self._state = [(0, 0)]

    def retokenize(self, tokens: Sequence[int]) -> list[int]:
        shared = common_prefix_length(self._tokens, tokens)
        del self._tokens[shared:], self._state[shared + 1 :]
        del self._final[self._state[shared][0] :]
        for token in tokens[shared:]:
            self._add(token)
        converted = self._final + self._convert(self._pending)
        prefix = list(self._drafter.prefix)
        return converted if converted and converted[: len(prefix)] == prefix else [*prefix, *converted]

    @property
    def _pending(self) -> list[int]:
        return self._tokens[self._state[-1][1] :]

    def _add(self, token: int) -> None:
        """Append a token, and convert the pending tokens whose conversion it makes final."""
        pending = self._pending
        complete = not incomplete_bytes(self._target.decode(pending))
        if pending and complete and self._is_separate(token):
            self._final += self._convert(pending)
            pending = []
        pending = [*pending, token]
        self._tokens.append(token)
        if self._is_final(pending):
            self._final += self._convert(pending)
            pending = []
        self._state.append((len(self._final), len(self._tokens) - len(pending)))

    def _is_separate(self, token: int) -> bool:
        """Whether a token is shared or special, and so is not encoded together with the text before it."""
        return token in self._to_drafter or not self._target.token_bytes(token)

    def _is_final(self, pending: list[int]) -> bool:
        if len(pending) >= MAX_PENDING:
            return True
        return all(map(self._is_separate, pending)) and not incomplete_bytes(self._target.decode(pending))

    def _convert(self, tokens: list[int]) -> list[int]:
        if all(token in self._to_drafter for token in tokens):
            return [self._to_drafter[token] for token in tokens]
        text = self._target.decode(tokens)
        return list(self._drafter.encode_inside(text[: len(text) - incomplete_bytes(text)]))


class TLI:
    """`context` is the drafter's own; a longer text is truncated from the left. 0: unlimited."""

    def __init__(self, backend: Backend, drafter: Vocabulary, target: Vocabulary, context: int = 0) -> None:
        self._backend, self._size, self._context = backend, target.size, context
        self._empty_prompt = list(drafter.empty_prompt)
        self.shared = shared_tokens(drafter.token_map, target.token_map)
        self._retokenizer = Retokenizer(target, drafter, self.shared.to_drafter())

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:
        """Run one forward per position: a longer text need not extend the drafter's tokens of a shorter one."""
        if start > len(tokens):
            own_tokens = self._own_tokens(tokens)
            return self._backend.forward(own_tokens, len(own_tokens) + 1, cancelled)
        rows = [self._next_logits(tokens[:i], cancelled) for i in range(start, len(tokens) + 1)]
        logits = rows[0] if len(rows) == 1 else array_namespace(rows[0]).concatenate(rows)
        return map_logits(logits, self.shared, self._size)

    def _next_logits(self, tokens: Sequence[int], cancelled: CancelFlag) -> Any:
        own_tokens = self._own_tokens(tokens)
        return self._backend.forward(own_tokens, len(own_tokens), cancelled)

    def _own_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        return fit_context(self._retokenizer.retokenize(tokens) or self._empty_prompt, self._context)
