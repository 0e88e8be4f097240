"""Token sequences that share their prefixes: each holds the sequence it extends.

Extending a sequence costs the same at any length, and so does passing it to a server; only what two sequences
do not share is ever walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import takewhile

Tokens = tuple[int, ...]


def _extended(key: int, token: int) -> int:
    return hash((key, token))


class TokenSequence:
    """A prompt, or one token after another sequence. Immutable, so threads may share it."""

    __slots__ = ("key", "length", "origin", "parent", "prompt", "token")

    prompt: Tokens  # the whole prompt, at the origin only
    token: int
    parent: TokenSequence | None
    origin: TokenSequence  # the prompt that this sequence extends: its identity is the request's
    length: int
    key: int  # equal sequences have equal keys

    @classmethod
    def of(cls, prompt: Iterable[int]) -> TokenSequence:
        """The prompt of a request."""
        self = cls()
        self.prompt = tuple(prompt)
        self.token, self.parent, self.origin = -1, None, self
        self.length, self.key = len(self.prompt), reduce(_extended, self.prompt, 0)
        return self

    def then(self, token: int) -> TokenSequence:
        """This sequence and one more token."""
        sequence = TokenSequence()
        sequence.prompt = ()
        sequence.token, sequence.parent, sequence.origin = token, self, self.origin
        sequence.length, sequence.key = self.length + 1, _extended(self.key, token)
        return sequence

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.since(0))

    def since(self, length: int) -> list[int]:
        """The tokens after the first `length`."""
        tail: list[int] = []
        sequence = self
        while sequence.length > length and sequence.parent is not None:
            tail.append(sequence.token)
            sequence = sequence.parent
        if sequence.parent is None:
            tail.extend(reversed(sequence.prompt[length:]))
        tail.reverse()
        return tail

    def common_prefix(self, other: TokenSequence) -> int:
        """The length of the longest common prefix of the two sequences."""
        a, b = self, other
        while a.length != b.length or a.key != b.key:
            if a.length >= b.length and a.parent is not None:
                a = a.parent
            elif b.length >= a.length and b.parent is not None:
                b = b.parent
            else:
                return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
        return a.length

    def __repr__(self) -> str:
        return f"TokenSequence{tuple(self)}"
