"""Tokens are shared if their contents are equal, whatever their format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import pre_tokenizers

from dsi.models.vocab.token_map import (
    BYTE_LEVEL_ALPHABET,
    TokenFormat,
    TokenMap,
    build_token_map,
    format_from_decoder,
    format_from_tokens,
    map_logits,
    shared_tokens,
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


@pytest.mark.parametrize(("decoder", "token", "expected"), DECODERS)
def test_format_from_decoder_decodes_tokens(decoder: dict[str, object] | None, token: str, expected: bytes) -> None:
    assert format_from_decoder(decoder).to_bytes(token) == expected


def test_format_from_tokens_infers_the_space() -> None:
    assert format_from_tokens(["a", "▁b"]) == TokenFormat(space="▁")
    assert format_from_tokens(["a", "Ġb"]) == TokenFormat(byte_level=True)
    assert format_from_tokens(["a", "b"]) == TokenFormat()


def test_byte_level_alphabet_is_that_of_tokenizers() -> None:
    assert set(BYTE_LEVEL_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_LEVEL_ALPHABET.values()) == list(range(256))


def test_build_token_map_prefers_regular_tokens_to_byte_fallback() -> None:
    for vocab in ({"<0x41>": 0, "A": 1}, {"A": 0, "<0x41>": 1}):
        assert build_token_map(vocab, TokenFormat(), {}, 2).ids == {b"A": vocab["A"]}


def test_build_token_map_is_limited_to_the_models_vocabulary() -> None:
    token_map = build_token_map({"a": 0, "b": 1, "<pad>": 2}, TokenFormat(), {2: "pad"}, 2)
    assert token_map == TokenMap((b"a", b"b"), {b"a": 0, b"b": 1})
    assert build_token_map({"a": 0}, TokenFormat(), {}, 3).contents == (b"a", "", "")


def test_shared_tokens_match_special_tokens_by_role() -> None:
    own = build_token_map({"</s>": 0, "x": 1, "<|im|>": 2}, TokenFormat(), {0: "eos", 2: "<|im|>"}, 3)
    other = build_token_map({"</s>": 0, "<end>": 1, "<|im|>": 2}, TokenFormat(), {1: "eos", 2: "<|im|>"}, 3)
    assert shared_tokens(own, other).to_drafter() == {1: 0, 2: 2}


formats = st.sampled_from(
    [TokenFormat(byte_level=True), TokenFormat(space="▁"), TokenFormat(separate_words=True, continuation="##")]
)
vocabularies = st.builds(
    lambda tokens, form, names: build_token_map(
        {token: i for i, token in enumerate(tokens)},
        form,
        {i: name for i, name in names.items() if i < len(tokens)},
        len(tokens),
    ),
    st.lists(st.text("aĠ▁#b", max_size=4) | st.sampled_from(["<0x61>", "<0x20>"]), unique=True, max_size=30),
    formats,
    st.dictionaries(st.integers(0, 9), st.sampled_from(["eos", "bos", "<x>"]), max_size=3),
)


@given(vocabularies, vocabularies)
def test_shared_tokens_have_equal_contents_and_one_partner(drafter: TokenMap, target: TokenMap) -> None:
    shared = shared_tokens(drafter, target)
    for own, other in zip(shared.drafter, shared.target):
        assert drafter.contents[own] == target.contents[other] != ""
    assert len(set(shared.drafter)) == len(set(shared.target)) == len(shared)
    assert len(shared) == len({*drafter.contents} & {*target.contents} - {"", b""})


@given(vocabularies, vocabularies, st.integers(1, 3))
def test_map_logits_agrees_in_numpy_and_torch(drafter: TokenMap, target: TokenMap, count: int) -> None:
    shared, width = shared_tokens(drafter, target), len(drafter.contents) + 2  # logits can be wider than the vocabulary
    logits = np.arange(count * width, dtype=np.float32).reshape(count, width)
    mapped = map_logits(logits, shared, len(target.contents))
    assert mapped.shape == (count, len(target.contents))
    assert np.array_equal(mapped[:, shared.target], logits[:, shared.drafter])
    others = np.delete(mapped, shared.target, axis=1)
    assert np.isneginf(others).all()
    assert np.array_equal(map_logits(torch.from_numpy(logits), shared, len(target.contents)).numpy(), mapped)
