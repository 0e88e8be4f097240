"""Which tokens two vocabularies share, and rows of scores carried from one to the other.

A token is known by its meaning: the bytes it writes or, if it writes nothing, its name. Nothing here
knows a tokenizer; a vocabulary is spellings and ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsi.sampling.noise import Array, array_namespace

Meaning = bytes | str  # what a token writes, or the name of one that writes nothing
NOTHING = ""  # the name of an id that no token has
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece spells a byte that it has no token for


def _letters() -> dict[str, int]:
    """GPT-2's alphabet: a visible letter for each byte, itself where it is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


LETTERS = _letters()


@dataclass(frozen=True)
class TokenFormat:
    """How a tokenizer spells its tokens."""

    letters: bool = False  # a letter for each byte, a space is Ġ: byte-level BPE
    space: str = ""  # what stands for a space: SentencePiece's ▁
    apart: bool = False  # tokens are words, with a space before each...
    inside: str = ""  # ...except those that begin with this: WordPiece's ##
    last: str = ""  # ends a word, and stands for the space after it: </w>

    def meaning(self, token: str) -> bytes:
        if self.letters:
            return _from_letters(token)
        if byte := BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        if self.inside and token.startswith(self.inside):
            return token.removeprefix(self.inside).encode()
        token = token.replace(self.space, " ") if self.space else token
        token = token.removesuffix(self.last) + " " if self.last and token.endswith(self.last) else token
        return (" " * self.apart + token).encode()


def _from_letters(token: str) -> bytes:
    """A token that was added by hand need not be in the alphabet; then it means what it says."""
    found = [LETTERS.get(letter) for letter in token]
    return token.encode() if None in found else bytes(byte for byte in found if byte is not None)


def declared(decoder: Mapping[str, Any] | None) -> TokenFormat:
    """The spelling that a decoder of the `tokenizers` library undoes; without one, words are put apart."""
    if decoder is None:
        return TokenFormat(apart=True)
    match decoder.get("type"):
        case "Sequence":
            return _first(declared(part) for part in decoder["decoders"])
        case "ByteLevel":
            return TokenFormat(letters=True)
        case "Metaspace":
            return TokenFormat(space=decoder["replacement"])
        case "Replace" if decoder["content"] == " ":
            return TokenFormat(space=decoder["pattern"].get("String", ""))
        case "WordPiece":
            return TokenFormat(apart=True, inside=decoder["prefix"])
        case "BPEDecoder":
            return TokenFormat(last=decoder["suffix"])
    return TokenFormat()


def _first(found: Any) -> TokenFormat:
    """Of a sequence of decoders one is about spaces; the others trim and glue."""
    return next((spelling for spelling in found if spelling != TokenFormat()), TokenFormat())


def guessed(tokens: Sequence[str]) -> TokenFormat:
    """The spelling of a vocabulary that declares none, from the space that it begins its words with."""
    for space, spelling in (("▁", TokenFormat(space="▁")), ("Ġ", TokenFormat(letters=True))):
        if any(token.startswith(space) for token in tokens):
            return spelling
    return TokenFormat()


@dataclass(frozen=True)
class TokenMap:
    """What each id means, and which id says it."""

    meanings: tuple[Meaning, ...]  # by id
    ids: Mapping[Meaning, int]


def lexicon(vocab: Mapping[str, int], spelling: TokenFormat, names: Mapping[int, str], size: int) -> TokenMap:
    """Of the ids below `size`: a model need not know all that its tokenizer does.

    Where a byte has a token of its own as well, that one says it: a tokenizer spells bytes as a last resort.
    """
    known = [(token, id) for token, id in vocab.items() if id < size]
    meanings: list[Meaning] = [NOTHING] * size
    for token, id in known:
        meanings[id] = names[id] if id in names else spelling.meaning(token)
    known.sort(key=lambda pair: (BYTE.fullmatch(pair[0]) is None, -pair[1]))  # what says it best comes last
    ids = {meanings[id]: id for _, id in known}
    return TokenMap(tuple(meanings), {meaning: id for meaning, id in ids.items() if meaning})


@dataclass(frozen=True)
class Shared:
    """The tokens that two vocabularies share, in pairs."""

    drafter: Array  # ids, ascending
    target: Array  # the id of the same meaning

    def __len__(self) -> int:
        return len(self.drafter)

    def to_drafter(self) -> dict[int, int]:
        return dict(zip(self.target.tolist(), self.drafter.tolist()))


def shared(drafter: TokenMap, target: TokenMap) -> Shared:
    pairs = sorted((id, target.ids[what]) for what, id in drafter.ids.items() if what in target.ids)
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Shared(found[:, 0].copy(), found[:, 1].copy())


def carried(rows: Array, tokens: Shared, size: int) -> Array:
    """Rows over the drafter's vocabulary as rows over the target's; what is not shared cannot win."""
    xp = array_namespace(rows)
    found = xp.full((len(rows), size), -float("inf"), dtype=rows.dtype, device=rows.device)
    here, there = (xp.asarray(ids, device=rows.device) for ids in (tokens.drafter, tokens.target))
    found[:, there] = rows[:, here]
    return found
