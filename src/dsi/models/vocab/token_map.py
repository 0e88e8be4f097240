"""Which tokens two vocabularies share, and how logits over one are mapped to the other.

A token is identified by its content: the bytes it decodes to or, for a special token, its name. This module
does not depend on a tokenizer; a vocabulary is a mapping from strings to ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsi.sampling.noise import Array, array_namespace

Content = bytes | str  # the bytes of a token, or the name of a special token
UNUSED = ""  # the content of an id without a token
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback of SentencePiece


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a visible character for each byte, itself where it is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True)
class TokenFormat:
    """How a tokenizer represents bytes and spaces in its token strings."""

    byte_level: bool = False  # one character for each byte, a space is Ġ: byte-level BPE
    space: str = ""  # the character for a space: SentencePiece's ▁
    separate_words: bool = False  # tokens are words, with a space before each...
    continuation: str = ""  # ...except those with this prefix: WordPiece's ##
    word_end: str = ""  # a suffix that ends a word and stands for the space after it: </w>

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            return _from_byte_level(token)
        if byte := BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        if self.continuation and token.startswith(self.continuation):
            return token.removeprefix(self.continuation).encode()
        token = token.replace(self.space, " ") if self.space else token
        token = token.removesuffix(self.word_end) + " " if self.word_end and token.endswith(self.word_end) else token
        return (" " * self.separate_words + token).encode()


def _from_byte_level(token: str) -> bytes:
    """Decode a byte-level token; one that was added by hand need not be in the alphabet."""
    decoded = [BYTE_LEVEL_ALPHABET.get(character) for character in token]
    return token.encode() if None in decoded else bytes(byte for byte in decoded if byte is not None)


def format_from_decoder(decoder: Mapping[str, Any] | None) -> TokenFormat:
    """Return the format that a decoder of the `tokenizers` library reverses; without one, tokens are words."""
    if decoder is None:
        return TokenFormat(separate_words=True)
    match decoder.get("type"):
        case "Sequence":
            formats = map(format_from_decoder, decoder["decoders"])  # one handles spaces; the others strip and join
            return next((form for form in formats if form != TokenFormat()), TokenFormat())
        case "ByteLevel":
            return TokenFormat(byte_level=True)
        case "Metaspace":
            return TokenFormat(space=decoder["replacement"])
        case "Replace" if decoder["content"] == " ":
            return TokenFormat(space=decoder["pattern"].get("String", ""))
        case "WordPiece":
            return TokenFormat(separate_words=True, continuation=decoder["prefix"])
        case "BPEDecoder":
            return TokenFormat(word_end=decoder["suffix"])
    return TokenFormat()


def format_from_tokens(tokens: Sequence[str]) -> TokenFormat:
    """Infer the format of a tokenizer without a decoder from the character that begins its words."""
    for space, form in (("▁", TokenFormat(space="▁")), ("Ġ", TokenFormat(byte_level=True))):
        if any(token.startswith(space) for token in tokens):
            return form
    return TokenFormat()


@dataclass(frozen=True)
class TokenMap:
    """The content of each id, and the id of each content."""

    contents: tuple[Content, ...]  # by id
    ids: Mapping[Content, int]


def build_token_map(vocab: Mapping[str, int], form: TokenFormat, names: Mapping[int, str], size: int) -> TokenMap:
    """Map the ids below `size`: a model's vocabulary can be smaller than its tokenizer's.

    Where a byte has a regular token too, that one is its id: tokenizers use byte fallback as a last resort.
    """
    tokens = [(token, id) for token, id in vocab.items() if id < size]
    contents: list[Content] = [UNUSED] * size
    for token, id in tokens:
        contents[id] = names[id] if id in names else form.to_bytes(token)
    tokens.sort(key=lambda pair: (BYTE.fullmatch(pair[0]) is None, -pair[1]))  # the preferred id comes last
    ids = {contents[id]: id for _, id in tokens}
    return TokenMap(tuple(contents), {content: id for content, id in ids.items() if content})


@dataclass(frozen=True)
class SharedTokens:
    """The tokens that two vocabularies share, in pairs."""

    drafter: Array  # ids, ascending
    target: Array  # the ids of the same contents

    def __len__(self) -> int:
        return len(self.drafter)

    def to_drafter(self) -> dict[int, int]:
        return dict(zip(self.target.tolist(), self.drafter.tolist()))


def shared_tokens(drafter: TokenMap, target: TokenMap) -> SharedTokens:
    pairs = sorted((id, target.ids[content]) for content, id in drafter.ids.items() if content in target.ids)
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return SharedTokens(columns[:, 0].copy(), columns[:, 1].copy())


def map_logits(logits: Array, tokens: SharedTokens, size: int) -> Array:
    """Map logits over the drafter's vocabulary to the target's; tokens that are not shared get -inf."""
    xp = array_namespace(logits)
    mapped = xp.full((len(logits), size), -float("inf"), dtype=logits.dtype, device=logits.device)
    drafter_ids, target_ids = (xp.asarray(ids, device=logits.device) for ids in (tokens.drafter, tokens.target))
    mapped[:, target_ids] = logits[:, drafter_ids]
    return mapped
