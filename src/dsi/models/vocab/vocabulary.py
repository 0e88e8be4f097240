"""A tokenizer as bytes: what each of its tokens writes, and which tokens write a text.

Bytes, because a token can be a part of a character. A text may have to be written in the middle of
another one, and tokenizers treat the beginning of a text in ways of their own: so it is written after
something, and what that took is cut off.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from dsi.core.sequence import Tokens
from dsi.models.hf import common_prefix_length
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.token_map import TokenFormat, TokenMap, declared, guessed, lexicon

ROLES = ("pad", "unk", "bos", "eos")  # a token with several of them is known by the last
ANCHORS = (b"\n", b".", b"a")  # what a piece is written after, if it is known not to begin a text
PROBES = ("a", "the", "1", ".")
PIECE = 128  # bytes of a text that are encoded together, and remembered
PIECES = 4096  # that are remembered
# Where a text can be cut without changing its tokens, more or less: before a space, before a character of
# a script without spaces, before an emoji.
SEAM = re.compile(rb"(?<=\S)\s|[\xe3-\xf4]")


class Vocabulary:
    """`size` is how many ids the model has rows for; what its tokenizer knows beyond that is not used."""

    def __init__(self, text: Tokenizer, size: int) -> None:
        self._tokenizer, self.size = text.tokenizer, size
        self.eos_token_ids = text.eos_token_ids
        self.lexicon = _lexicon(text.tokenizer, size)
        self._pieces = [what if isinstance(what, bytes) else b"" for what in self.lexicon.meanings]
        self._sorted = sorted(self._pieces)
        # Whether it puts a space before a text, as SentencePiece does.
        self.leads = any(self.written(self.encode(probe)).startswith(b" ") for probe in PROBES)
        self.opening = _opening(text.tokenizer, size)
        self.inside = lru_cache(PIECES)(self._inside)

    @property
    def end(self) -> int | None:
        return self.lexicon.ids.get("eos")

    def piece(self, token: int) -> bytes:
        """What a token writes: nothing, if it is a special one or none at all."""
        return self._pieces[token] if token < self.size else b""

    def written(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.piece, tokens))

    def can_go_on(self, text: bytes) -> bool:
        """Whether some token writes all of this and more."""
        i = bisect_right(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text by itself, and no others; none, if there are none for some part of it."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # so says a vocabulary that has no token for what it does not know
            return []
        return [token for token in found if token < self.size]

    def after(self, before: bytes, text: bytes) -> Tokens | None:
        """The tokens of a text that follows another, or None if one of them would begin before it."""
        visible = before.removeprefix(b" ") if self.leads else before
        tokens = self.encode((visible + text).decode(errors="replace"))
        so_far = b""
        for i, token in enumerate(tokens):
            if so_far in (before, b" " + before):
                return tuple(tokens[i:])
            so_far += self.piece(token)
        return None if text else ()

    def _inside(self, text: bytes) -> Tokens:
        """The tokens of a text that does not begin one."""
        for anchor in ANCHORS:
            found = self.after(anchor, text)
            if found is not None:
                return found
        return tuple(self.encode(text.decode(errors="replace")))

    def read(self, text: bytes) -> Tokens:
        """A whole text as this model reads it, piece by piece: the pieces of a longer text are the same."""
        first, *others = pieces(text)
        found = [*self.opening, *self._first(first)]
        for piece in others:
            found += self.inside(piece)
        return tuple(found) or self.beginning

    def _first(self, text: bytes) -> Sequence[int]:
        return self.encode(text.decode(errors="replace")) if text else ()

    @property
    def beginning(self) -> Tokens:
        """What an empty text is to a model that needs at least one token."""
        ids = self.lexicon.ids
        return self.opening or (ids.get("bos", ids.get("eos", 0)),)


def pieces(text: bytes) -> list[bytes]:
    found, at = [], 0
    while seam := SEAM.search(text, at + PIECE):
        found.append(text[at : seam.start()])
        at = seam.start()
    return [*found, text[at:]]


def unfinished(text: bytes) -> int:
    """How many bytes at the end of a text are the beginning of a character."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return back if back < (2 + (byte >= 0xE0) + (byte >= 0xF0)) else 0
        if byte < 0x80:
            return 0
    return 0


class Written:
    """The bytes of a text in a vocabulary, which grow as it grows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._lengths = [0]
        self._bytes = bytearray()

    def of(self, tokens: Sequence[int]) -> bytes:
        kept = common_prefix_length(self._tokens, tokens)
        del self._tokens[kept:], self._lengths[kept + 1 :], self._bytes[self._lengths[kept] :]
        for token in tokens[kept:]:
            self._tokens.append(token)
            self._bytes += self._vocabulary.piece(token)
            self._lengths.append(len(self._bytes))
        return bytes(self._bytes)


def fitting(tokens: Sequence[int], context: int) -> Sequence[int]:
    """What a model of this context can read of a text: its end.

    It begins at a multiple of half the context, so that most steps only add to what has been read.
    """
    if not context or len(tokens) <= context:
        return tokens
    half = max(1, context // 2)
    return tokens[-(-(len(tokens) - context) // half) * half :]


def _lexicon(tokenizer: Any, size: int) -> TokenMap:
    vocab = tokenizer.get_vocab()
    return lexicon(vocab, _spelling(tokenizer, list(vocab)), _names(tokenizer), size)


def _spelling(tokenizer: Any, tokens: Sequence[str]) -> TokenFormat:
    raw = getattr(tokenizer, "backend_tokenizer", None)
    if raw is None:
        return guessed(tokens)
    return declared(None if raw.decoder is None else json.loads(raw.decoder.__getstate__()))


def _names(tokenizer: Any) -> dict[int, str]:
    """Special tokens: those with a role are known by it, whatever they are called."""
    names = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = {getattr(tokenizer, f"{role}_token_id"): role for role in ROLES}
    return names | {id: role for id, role in roles.items() if id is not None}


def _opening(tokenizer: Any, size: int) -> Tokens:
    """What it puts before every text; what it puts after one is not for a text that goes on."""
    start = tokenizer.bos_token_id
    return (start,) if start is not None and start < size and start in tokenizer.encode("") else ()
