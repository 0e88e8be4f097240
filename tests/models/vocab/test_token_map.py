"""Tokens are shared if they mean the same, however they are spelled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from dsi.models.vocab.token_map import (
    LETTERS,
    TokenFormat,
    TokenMap,
    carried,
    declared,
    guessed,
    lexicon,
    shared,
)

LLAMA: dict[str, object] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
DECODERS: list[tuple[dict[str, object] | None, str, bytes]] = [
    ({"type": "ByteLevel"}, "Ġhello", b" hello"),
    ({"type": "ByteLevel"}, "éĽª", "雪".encode()),
    ({"type": "ByteLevel"}, "éĽ", "雪".encode()[:2]),
    ({"type": "ByteLevel"}, "by hand", b"by hand"),
    ({"type": "Metaspace", "replacement": "▁"}, "▁hello", b" hello"),
    (LLAMA, "▁hello", b" hello"),
    (LLAMA, "<0x0A>", b"\n"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "hello", b" hello"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "##ing", b"ing"),
    ({"type": "BPEDecoder", "suffix": "</w>"}, "hello</w>", b"hello "),
    ({"type": "BPEDecoder", "suffix": "</w>"}, "hel", b"hel"),
    ({"type": "Fuse"}, "hello", b"hello"),
    (None, "hello", b" hello"),
]


@pytest.mark.parametrize(("decoder", "token", "meaning"), DECODERS)
def test_a_token_means_what_its_decoder_writes(decoder: dict[str, object] | None, token: str, meaning: bytes) -> None:
    assert declared(decoder).meaning(token) == meaning


def test_without_a_decoder_the_space_gives_it_away() -> None:
    assert guessed(["a", "▁b"]) == TokenFormat(space="▁")
    assert guessed(["a", "Ġb"]) == TokenFormat(letters=True)
    assert guessed(["a", "b"]) == TokenFormat()


def test_the_alphabet_of_bytes_is_everybodys() -> None:
    assert set(LETTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(LETTERS.values()) == list(range(256))


def test_a_byte_that_has_a_token_of_its_own_is_said_by_that() -> None:
    for vocab in ({"<0x41>": 0, "A": 1}, {"A": 0, "<0x41>": 1}):
        assert lexicon(vocab, TokenFormat(), {}, 2).ids == {b"A": vocab["A"]}


def test_what_the_model_has_no_row_for_is_not_in_it() -> None:
    found = lexicon({"a": 0, "b": 1, "<pad>": 2}, TokenFormat(), {2: "pad"}, 2)
    assert found == TokenMap((b"a", b"b"), {b"a": 0, b"b": 1})
    assert lexicon({"a": 0}, TokenFormat(), {}, 3).meanings == (b"a", "", "")


def test_special_tokens_are_shared_by_their_roles_and_never_with_text() -> None:
    ours = lexicon({"</s>": 0, "x": 1, "<|im|>": 2}, TokenFormat(), {0: "eos", 2: "<|im|>"}, 3)
    theirs = lexicon({"</s>": 0, "<end>": 1, "<|im|>": 2}, TokenFormat(), {1: "eos", 2: "<|im|>"}, 3)
    assert shared(ours, theirs).to_drafter() == {1: 0, 2: 2}


spellings = st.sampled_from([TokenFormat(letters=True), TokenFormat(space="▁"), TokenFormat(apart=True, inside="##")])
vocabularies = st.builds(
    lambda tokens, spelling, names: lexicon(
        {token: i for i, token in enumerate(tokens)},
        spelling,
        {i: name for i, name in names.items() if i < len(tokens)},
        len(tokens),
    ),
    st.lists(st.text("aĠ▁#b", max_size=4) | st.sampled_from(["<0x61>", "<0x20>"]), unique=True, max_size=30),
    spellings,
    st.dictionaries(st.integers(0, 9), st.sampled_from(["eos", "bos", "<x>"]), max_size=3),
)


@given(vocabularies, vocabularies)
def test_every_shared_token_means_the_same_and_has_one_partner(drafter: TokenMap, target: TokenMap) -> None:
    found = shared(drafter, target)
    for ours, theirs in zip(found.drafter, found.target):
        assert drafter.meanings[ours] == target.meanings[theirs] != ""
    assert len(set(found.drafter)) == len(set(found.target)) == len(found)
    assert len(found) == len({*drafter.meanings} & {*target.meanings} - {"", b""})


@given(vocabularies, vocabularies, st.integers(1, 3))
def test_rows_are_carried_alike_in_numpy_and_torch(drafter: TokenMap, target: TokenMap, count: int) -> None:
    found, width = shared(drafter, target), len(drafter.meanings) + 2  # a model's rows may be wider
    rows = np.arange(count * width, dtype=np.float32).reshape(count, width)
    moved = carried(rows, found, len(target.meanings))
    assert moved.shape == (count, len(target.meanings))
    assert np.array_equal(moved[:, found.target], rows[:, found.drafter])
    others = np.delete(moved, found.target, axis=1)
    assert np.isneginf(others).all()
    assert np.array_equal(carried(torch.from_numpy(rows), found, len(target.meanings)).numpy(), moved)
