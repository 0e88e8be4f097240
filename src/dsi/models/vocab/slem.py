"""A drafter of another vocabulary, through text (Timor et al., 2025: string-level exact match, SLEM).

The drafter reads the text in its own tokens and writes on; what it writes is put into the target's
tokens, and the first of them is the guess, as soon as more text would not change it.

A guess is a function of the text and the sampling: each is derived anew from the text, as if nothing had
been asked before. Only single steps of the drafter are remembered, each under the whole of what it had
read. So the next guess, one token further, finds most of its steps taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import Backend, ForwardRequest
from dsi.models.vocab.vocabulary import SEAM, Vocabulary, Written, fitting, unfinished
from dsi.sampling.logits import sample

REACH = 24  # tokens that the drafter writes at most for one guess
BEHIND = 8  # tokens before the new ones that are encoded with them, so that they divide as they would
WORD = 48  # bytes that the last word is taken to have at most
STEPS = 256  # of the drafter that are remembered


class SLEM:
    """`context` is the drafter's own; of a longer text it reads the end. 0: without bounds."""

    def __init__(self, backend: Backend, drafter: Vocabulary, target: Vocabulary, context: int = 0) -> None:
        self._backend, self._drafter, self._target, self._context = backend, drafter, target, context
        self._written = Written(target)
        self._steps: OrderedDict[tuple[Tokens, Sampling], int] = OrderedDict()

    def answer(self, request: ForwardRequest) -> Tokens:
        if request.start > len(request.tokens):
            read = fitting(self._drafter.read(self._text(request.tokens)), self._context)
            self._backend.forward(read, len(read) + 1, request.cancelled)
        return tuple(self._guess(request.tokens[:i], request) for i in range(request.start, len(request.tokens) + 1))

    def _guess(self, tokens: Sequence[int], request: ForwardRequest) -> int:
        """What the drafter writes from the beginning of the last word, if it agrees with the word so far.

        For the target may have written half of it, and the drafter may have no token that begins there. If
        it does not agree, or means another division of the word, it goes on from the end of the text.
        """
        text, before = self._text(tokens), self._behind(tokens)
        end = len(text) - unfinished(text)
        start = last_seam(text, end)
        found = None
        if start < end:
            found = self._continued(text, start, before, request, strict=True)
        if found is None:
            found = self._continued(text, end, before, request, strict=False)
        if found is None:
            return tokens[-1] if tokens else 0  # nothing sensible: as good a token as any
        return found

    def _continued(self, text: bytes, start: int, before: bytes, request: ForwardRequest, strict: bool) -> int | None:
        """The token that follows `text` if the drafter writes on after its first `start` bytes."""
        read, rest, written = self._drafter.read(text[:start]), text[start:], b""
        space = b" " if self._drafter.leads and not start else b""  # which it puts before every text
        found: Tokens | None = ()
        for _ in range(REACH):
            token, said = self._step(read, request), written.removeprefix(space)
            if token in self._drafter.eos_token_ids:
                return found[0] if found else self._target.end if said.startswith(rest) else None
            piece = self._drafter.piece(token)
            read, written = (*read, token), written + piece
            said = written.removeprefix(space)
            if not piece or not agree(said, rest):
                break
            new = said[len(rest) :]
            found = self._told(before, new, strict)
            if found is None or (found and self._is_settled(before, new)):
                break
        return found[0] if found else None

    def _told(self, before: bytes, new: bytes, strict: bool) -> Tokens | None:
        """What is new in the target's tokens; None if it would divide the text before it differently."""
        text = before + new
        whole = text[len(before) : len(text) - unfinished(text)]
        if not whole:
            return ()
        found = self._target.after(before, whole)
        return self._target.inside(whole) if found is None and not strict else found

    def _is_settled(self, before: bytes, new: bytes) -> bool:
        """No token of the target begins with all that is new and goes on: more text makes no longer one."""
        return not self._target.can_go_on(b" " * (self._target.leads and not before) + new)

    def _step(self, read: Tokens, request: ForwardRequest) -> int:
        """The drafter's own next token; its noise is that of its own place and vocabulary."""
        key = (read, request.sampling)
        if key not in self._steps:
            fits = fitting(read, self._context)
            row = self._backend.forward(fits, len(fits), request.cancelled)[0]
            self._steps[key] = sample(row, request.sampling, len(read))
            if len(self._steps) > STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _text(self, tokens: Sequence[int]) -> bytes:
        """As a reader sees it: without the space that the target's tokenizer puts before every text."""
        text = self._written.of(tokens)
        return text.removeprefix(b" ") if self._target.leads else text

    def _behind(self, tokens: Sequence[int]) -> bytes:
        """The last few tokens, from a whole character on, back to a special token at most."""
        found: list[bytes] = []
        for token in reversed(tokens):
            piece = self._target.piece(token)
            if not piece:
                break
            found.append(piece)
            if len(found) >= BEHIND and piece[0] & 0xC0 != 0x80:
                break
        return b"".join(reversed(found))


def agree(said: bytes, rest: bytes) -> bool:
    return said.startswith(rest) or rest.startswith(said)


def last_seam(text: bytes, end: int) -> int:
    """Where the last word begins; where there is none, the end."""
    found = [seam.start() for seam in SEAM.finditer(text, max(0, end - WORD), end)]
    return found[-1] if found else 0 if end <= WORD else end
