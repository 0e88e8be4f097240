"""A vocabulary encodes and decodes bytes without loss, wherever a text begins."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.token_map import shared_tokens
from dsi.models.vocab.vocabulary import (
    CHUNK_BYTES,
    IncrementalDecoder,
    Vocabulary,
    fit_context,
    incomplete_bytes,
    split_text,
)
from sample_tokenizers import MAKERS, sample_tokenizer, vocabulary

FAITHFUL = ("byte_level", "byte_fallback")  # the others cannot encode every character
TEXTS = ("Once upon a time", "\tx = 1\n\n  y", "雪が降る", "🙂🎉 hello 🙂", "naïve café", " two  spaces ")
words = st.text(
    st.sampled_from("ab é雪🙂\n\t.") | st.characters(codec="utf-8", exclude_characters="\x00▁"), max_size=20
)


@given(words, st.sampled_from(FAITHFUL))
def test_vocabulary_decodes_what_it_encodes(text: str, name: str) -> None:
    own = vocabulary(name)
    written = own.decode(own.encode(text))
    assert written == b" " * (own.adds_space and bool(text)) + text.encode()


@given(words, words, st.sampled_from(FAITHFUL))
def test_encode_inside_adds_no_space(before: str, text: str, name: str) -> None:
    own = vocabulary(name)
    assert own.decode(own.encode_inside(text.encode())) == text.encode()
    tokens = own.encode_after(before.encode(), text.encode())
    at_start = b" " * (own.adds_space and not before and bool(text))
    assert tokens is None or own.decode(tokens) == at_start + text.encode()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
def test_encode_after_gives_the_tokens_of_the_whole_text(name: str, text: str) -> None:
    own = vocabulary(name)
    tokens = own.encode(text)
    for i in range(1, len(tokens)):
        before, after = own.decode(tokens[:i]), own.decode(tokens[i:])
        whole = not incomplete_bytes(before) and b"\xef\xbf\xbd" not in before
        if whole and before + after == b" " * own.adds_space + text.encode():
            assert own.encode_after(before, after) in (tuple(tokens[i:]), None)


def decoded(tokenizer: Any, token: int) -> str:
    """What a token adds to a text that is not empty."""
    [first] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    return str(tokenizer.decode([first, token])[len(tokenizer.decode([first])) :])


@pytest.mark.parametrize(("drafter", "target"), list(permutations(MAKERS, 2)))
def test_shared_tokens_decode_alike(drafter: str, target: str) -> None:
    shared = shared_tokens(vocabulary(drafter).token_map, vocabulary(target).token_map)
    assert len(shared) > 0
    special = set(sample_tokenizer(drafter).all_special_ids)
    for own, other in zip(shared.drafter.tolist(), shared.target.tolist()):
        if own not in special:
            assert decoded(sample_tokenizer(drafter), own) == decoded(sample_tokenizer(target), other)


def test_vocabulary_names_special_tokens_by_role() -> None:
    shared = shared_tokens(vocabulary("metaspace").token_map, vocabulary("byte_level").token_map).to_drafter()
    own, other = sample_tokenizer("byte_level"), sample_tokenizer("metaspace")
    assert shared[own.bos_token_id] == other.bos_token_id
    assert shared[own.eos_token_id] == other.eos_token_id
    assert vocabulary("byte_level").prefix == (own.bos_token_id,)
    assert (vocabulary("whole_words").prefix, vocabulary("whole_words").empty_prompt) == ((), (1,))
    assert vocabulary("characters").empty_prompt == (0,)


def test_vocabulary_of_a_tokenizer_without_a_decoder() -> None:
    class Plain:
        """The part of a Python tokenizer that is used."""

        bos_token_id = unk_token_id = pad_token_id = None
        eos_token_id = 2
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

        def get_vocab(self) -> dict[str, int]:
            return {"▁a": 0, "b": 1, "</s>": 2}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * text.count("a") + [2] * add_special_tokens

    assert Vocabulary(Tokenizer(Plain()), 3).token_map.contents == (b" a", b"b", "eos")


@given(st.text("ab \n雪é🙂", max_size=900), st.integers(0, 900))
@settings(max_examples=50)
def test_split_text_of_a_longer_text_begins_alike(text: str, cut: int) -> None:
    whole, part = text.encode(), text[:cut].encode()
    assert b"".join(split_text(whole)) == whole
    assert split_text(whole)[: len(split_text(part)) - 1] == split_text(part)[:-1]
    assert all(len(chunk) >= CHUNK_BYTES for chunk in split_text(whole)[:-1])


@given(st.text("aé雪🙂", min_size=1, max_size=3), st.integers(0, 3))
def test_incomplete_bytes_counts_partial_characters(text: str, cut: int) -> None:
    last = len(text[-1].encode())
    missing = min(cut, last)
    cut_text = text.encode()[: len(text.encode()) - missing]
    assert incomplete_bytes(cut_text) == (last - missing if missing else 0)


@given(st.lists(st.lists(st.integers(0, 399), max_size=9), max_size=6))
def test_incremental_decoder_is_stateless(texts: list[list[int]]) -> None:
    decoder = IncrementalDecoder(vocabulary("byte_level"))
    for tokens in texts:
        assert decoder.decode(tokens) == vocabulary("byte_level").decode(tokens)


@given(st.integers(0, 200), st.integers(0, 20))
def test_fit_context_truncates_rarely(length: int, context: int) -> None:
    fitted = fit_context(range(length), context)
    assert list(fitted) == list(range(length))[length - len(fitted) :]
    if context:
        assert min(length, context // 2) <= len(fitted) <= context
    longer = fit_context(range(length + 1), context)
    assert not context or longer[:1] == fitted[:1] or len(longer) - 1 <= max(1, context - context // 2)
