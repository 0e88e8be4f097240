"""A tokenizer in terms of bytes: what each token decodes to, and which tokens encode a text.

Bytes, because a token can be part of a character. A text may have to be encoded in the middle of another one,
while tokenizers treat the beginning of a text specially: so it is encoded after an anchor, whose tokens are
then cut off.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from dsi.core.sequence import Tokens
from dsi.models.kv_sequence import common_prefix_length
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.token_map import TokenFormat, build_token_map, format_from_decoder, format_from_tokens

ROLES = ("pad", "unk", "bos", "eos")  # a token with several roles gets the last
ANCHORS = (b"\n", b".", b"a")  # what a text is encoded after if it does not begin the whole
PROBES = ("a", "the", "1", ".")
CHUNK_BYTES = 128  # of a text that are encoded together, and cached
CACHED_CHUNKS = 4096
# Where a text can be split, mostly without changing its tokens: before a space, before a character of a script
# without spaces, before an emoji.
BOUNDARY = re.compile(rb"(?<=\S)\s|[\xe3-\xf4]")


class Vocabulary:
    """A tokenizer's vocabulary, limited to the `size` ids that the model has logits for."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self.size = tokenizer.tokenizer, size
        self.eos_token_ids = tokenizer.eos_token_ids
        vocab, names = self._tokenizer.get_vocab(), _special_tokens(self._tokenizer)
        self.token_map = build_token_map(vocab, _token_format(self._tokenizer, list(vocab)), names, size)
        self._bytes = [content if isinstance(content, bytes) else b"" for content in self.token_map.contents]
        self._sorted = sorted(self._bytes)
        # Whether it puts a space before a text, as SentencePiece does.
        self.adds_space = any(self.decode(self.encode(probe)).startswith(b" ") for probe in PROBES)
        self.prefix = _prefix(self._tokenizer, size)
        self.encode_inside = lru_cache(CACHED_CHUNKS)(self._encode_inside)

    @property
    def eos(self) -> int | None:
        return self.token_map.ids.get("eos")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token: none, if it is special or unknown."""
        return self._bytes[token] if token < self.size else b""

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def has_longer_token(self, text: bytes) -> bool:
        """Whether some token begins with this text and is longer."""
        i = bisect_right(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens; return no tokens if part of it cannot be encoded."""
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # raised by a vocabulary without an unknown token
            return []
        return [token for token in tokens if token < self.size]

    def encode_after(self, before: bytes, text: bytes) -> Tokens | None:
        """Encode a text that follows another; return None if a token would cross the boundary."""
        visible = before.removeprefix(b" ") if self.adds_space else before
        tokens = self.encode((visible + text).decode(errors="replace"))
        so_far = b""
        for i, token in enumerate(tokens):
            if so_far in (before, b" " + before):
                return tuple(tokens[i:])
            so_far += self.token_bytes(token)
        return None if text else ()

    def _encode_inside(self, text: bytes) -> Tokens:
        """Encode a text that is not the beginning of the whole."""
        for anchor in ANCHORS:
            tokens = self.encode_after(anchor, text)
            if tokens is not None:
                return tokens
        return tuple(self.encode(text.decode(errors="replace")))

    def encode_prompt(self, text: bytes) -> Tokens:
        """Encode a whole text chunk by chunk: a longer text begins with the same chunks."""
        first, *others = split_text(text)
        tokens = [*self.prefix, *(self.encode(first.decode(errors="replace")) if first else ())]
        for chunk in others:
            tokens += self.encode_inside(chunk)
        return tuple(tokens) or self.empty_prompt

    @property
    def empty_prompt(self) -> Tokens:
        """The encoding of an empty text: models need at least one token."""
        ids = self.token_map.ids
        return self.prefix or (ids.get("bos", ids.get("eos", 0)),)


def split_text(text: bytes) -> list[bytes]:
    chunks, at = [], 0
    while boundary := BOUNDARY.search(text, at + CHUNK_BYTES):
        chunks.append(text[at : boundary.start()])
        at = boundary.start()
    return [*chunks, text[at:]]


def incomplete_bytes(text: bytes) -> int:
    """Return how many bytes at the end of a text are the beginning of an incomplete character."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return back if back < (2 + (byte >= 0xE0) + (byte >= 0xF0)) else 0
        if byte < 0x80:
            return 0
    return 0


class IncrementalDecoder:
    """Decode a growing text to bytes, reusing the common prefix."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._lengths = [0]
        self._bytes = bytearray()

    def decode(self, tokens: Sequence[int]) -> bytes:
        shared = common_prefix_length(self._tokens, tokens)
        del self._tokens[shared:], self._lengths[shared + 1 :], self._bytes[self._lengths[shared] :]
        for token in tokens[shared:]:
            self._tokens.append(token)
            self._bytes += self._vocabulary.token_bytes(token)
            self._lengths.append(len(self._bytes))
        return bytes(self._bytes)


def fit_context(tokens: Sequence[int], context: int) -> Sequence[int]:
    """Truncate a text from the left to fit a model's context; 0 means unlimited.

    It begins at a multiple of half the context, so that most steps only extend what is cached.
    """
    if not context or len(tokens) <= context:
        return tokens
    half = max(1, context // 2)
    return tokens[-(-(len(tokens) - context) // half) * half :]


def _token_format(tokenizer: Any, tokens: Sequence[str]) -> TokenFormat:
    raw = getattr(tokenizer, "backend_tokenizer", None)
    if raw is None:
        return format_from_tokens(tokens)
    return format_from_decoder(None if raw.decoder is None else json.loads(raw.decoder.__getstate__()))


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Name the special tokens: by their role where they have one, whatever they are called."""
    names = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = {getattr(tokenizer, f"{role}_token_id"): role for role in ROLES}
    return names | {id: role for id, role in roles.items() if id is not None}


def _prefix(tokenizer: Any, size: int) -> Tokens:
    """The special token before every text; one after it would not fit a text that continues."""
    start = tokenizer.bos_token_id
    return (start,) if start is not None and start < size and start in tokenizer.encode("") else ()
