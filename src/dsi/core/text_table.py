"""Texts that come back longer, each as a whole: a sequence for them that extends the one before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from dsi.core.sequence import Tokens, TokenSequence

MAX_GROWTH = 4096  # tokens after what a text began with: each takes more memory than one of a prompt


@dataclass
class TextTable:
    """The last sequence of each text, by its prompt and what else tells it from others; the least recently used go.

    Sequences of one text have one origin, by which servers find its KV cache.
    """

    capacity: int = 128
    _texts: OrderedDict[Hashable, tuple[Tokens, TokenSequence]] = field(default_factory=OrderedDict)

    def sequence(self, tokens: Tokens, prompt_length: int, key: Hashable = None) -> TokenSequence:
        """Return the sequence of these tokens, of which the first `prompt_length` never change."""
        prompt = tokens[:prompt_length]
        previous, sequence = self._texts.get((prompt, key)) or (prompt, TokenSequence.of(prompt))
        shared = _common_prefix(previous, tokens)
        while sequence.length > shared and sequence.parent is not None:
            sequence = sequence.parent
        for token in tokens[sequence.length :]:
            sequence = sequence.then(token)
        self._texts[prompt, key] = tokens, sequence
        self._texts.move_to_end((prompt, key))
        if len(self._texts) > self.capacity:
            self._texts.popitem(last=False)
        return sequence


def _common_prefix(a: Tokens, b: Tokens) -> int:
    if a == b[: len(a)]:  # a text that has only grown
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
