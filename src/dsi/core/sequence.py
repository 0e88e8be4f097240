"""A text that grows by sharing: each longer text holds the one it grew from.

Extending costs the same at any length, and so does handing a text to a server; only what two texts do
not share is ever walked. Nothing here knows what the tokens mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import takewhile

Tokens = tuple[int, ...]


def _extended(key: int, token: int) -> int:
    return hash((key, token))


class TokenSequence:
    """One text: a prompt, or a token after another text. Immutable, so that threads may share it."""

    __slots__ = ("key", "length", "origin", "parent", "prompt", "token")

    prompt: Tokens  # the whole prompt, at the origin only
    token: int
    parent: TokenSequence | None
    origin: TokenSequence  # the prompt this text grew from: its identity is the request's
    length: int
    key: int  # equal texts have equal keys

    @classmethod
    def of(cls, prompt: Iterable[int]) -> TokenSequence:
        """The beginning of a request."""
        self = cls()
        self.prompt = tuple(prompt)
        self.token, self.parent, self.origin = -1, None, self
        self.length, self.key = len(self.prompt), reduce(_extended, self.prompt, 0)
        return self

    def then(self, token: int) -> TokenSequence:
        """This text and one more token."""
        text = TokenSequence()
        text.prompt = ()
        text.token, text.parent, text.origin = token, self, self.origin
        text.length, text.key = self.length + 1, _extended(self.key, token)
        return text

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.since(0))

    def since(self, length: int) -> list[int]:
        """The tokens after the first `length`."""
        tail: list[int] = []
        text = self
        while text.length > length and text.parent is not None:
            tail.append(text.token)
            text = text.parent
        if text.parent is None:
            tail.extend(reversed(text.prompt[length:]))
        tail.reverse()
        return tail

    def shared(self, other: TokenSequence) -> int:
        """How many tokens the two texts have in common before they part."""
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
        return f"Context{tuple(self)}"
