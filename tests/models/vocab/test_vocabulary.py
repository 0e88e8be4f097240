"""A tokenizer as bytes: nothing is lost on the way to tokens and back, wherever a text begins."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.token_map import shared
from dsi.models.vocab.vocabulary import PIECE, Vocabulary, Written, fitting, pieces, unfinished
from tongues import MAKERS, tongue, vocabulary

FAITHFUL = ("byte_level", "bytes_as_a_last_resort")  # the others do not know every character
TEXTS = ("Once upon a time", "\tx = 1\n\n  y", "雪が降る", "🙂🎉 hello 🙂", "naïve café", " two  spaces ")
words = st.text(
    st.sampled_from("ab é雪🙂\n\t.") | st.characters(codec="utf-8", exclude_characters="\x00▁"), max_size=20
)


@given(words, st.sampled_from(FAITHFUL))
def test_what_is_encoded_is_written_again(text: str, name: str) -> None:
    ours = vocabulary(name)
    written = ours.written(ours.encode(text))
    assert written == b" " * (ours.leads and bool(text)) + text.encode()


@given(words, words, st.sampled_from(FAITHFUL))
def test_a_text_inside_another_has_no_space_that_is_not_its_own(before: str, text: str, name: str) -> None:
    ours = vocabulary(name)
    assert ours.written(ours.inside(text.encode())) == text.encode()
    found = ours.after(before.encode(), text.encode())
    at_start = b" " * (ours.leads and not before and bool(text))
    assert found is None or ours.written(found) == at_start + text.encode()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_after_its_own_beginning_has_the_tokens_of_the_whole(name: str, text: str) -> None:
    ours = vocabulary(name)
    tokens = ours.encode(text)
    for i in range(1, len(tokens)):
        before, after = ours.written(tokens[:i]), ours.written(tokens[i:])
        whole = not unfinished(before) and b"\xef\xbf\xbd" not in before
        if whole and before + after == b" " * ours.leads + text.encode():
            assert ours.after(before, after) in (tuple(tokens[i:]), None)


def decoded(tokenizer: Any, token: int) -> str:
    """What a token adds to a text that has begun."""
    [begun] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    return str(tokenizer.decode([begun, token])[len(tokenizer.decode([begun])) :])


@pytest.mark.parametrize(("drafter", "target"), list(permutations(MAKERS, 2)))
def test_shared_tokens_are_decoded_alike(drafter: str, target: str) -> None:
    found = shared(vocabulary(drafter).lexicon, vocabulary(target).lexicon)
    assert len(found) > 0
    special = set(tongue(drafter).all_special_ids)
    for ours, theirs in zip(found.drafter.tolist(), found.target.tolist()):
        if ours not in special:
            assert decoded(tongue(drafter), ours) == decoded(tongue(target), theirs)


def test_special_tokens_are_known_by_their_roles() -> None:
    found = shared(vocabulary("metaspace").lexicon, vocabulary("byte_level").lexicon).to_drafter()
    ours, theirs = tongue("byte_level"), tongue("metaspace")
    assert found[ours.bos_token_id] == theirs.bos_token_id
    assert found[ours.eos_token_id] == theirs.eos_token_id
    assert vocabulary("byte_level").opening == (ours.bos_token_id,)
    assert (vocabulary("whole_words").opening, vocabulary("whole_words").beginning) == ((), (1,))
    assert vocabulary("characters").beginning == (0,)


def test_a_tokenizer_without_a_decoder_of_its_own_is_read_by_its_spaces() -> None:
    class Plain:
        """As much of a tokenizer written in Python as is looked at."""

        bos_token_id = unk_token_id = pad_token_id = None
        eos_token_id = 2
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

        def get_vocab(self) -> dict[str, int]:
            return {"▁a": 0, "b": 1, "</s>": 2}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * text.count("a") + [2] * add_special_tokens

    assert Vocabulary(Tokenizer(Plain()), 3).lexicon.meanings == (b" a", b"b", "eos")


@given(st.text("ab \n雪é🙂", max_size=900), st.integers(0, 900))
@settings(max_examples=50)
def test_pieces_add_up_and_those_of_a_longer_text_begin_alike(text: str, cut: int) -> None:
    whole, part = text.encode(), text[:cut].encode()
    assert b"".join(pieces(whole)) == whole
    assert pieces(whole)[: len(pieces(part)) - 1] == pieces(part)[:-1]
    assert all(len(piece) >= PIECE for piece in pieces(whole)[:-1])


@given(st.text("aé雪🙂", min_size=1, max_size=3), st.integers(0, 3))
def test_half_a_character_is_noticed(text: str, cut: int) -> None:
    last = len(text[-1].encode())
    missing = min(cut, last)
    kept = text.encode()[: len(text.encode()) - missing]
    assert unfinished(kept) == (last - missing if missing else 0)


@given(st.lists(st.lists(st.integers(0, 399), max_size=9), max_size=6))
def test_the_bytes_of_a_text_do_not_depend_on_the_last_one(texts: list[list[int]]) -> None:
    written = Written(vocabulary("byte_level"))
    for tokens in texts:
        assert written.of(tokens) == vocabulary("byte_level").written(tokens)


@given(st.integers(0, 200), st.integers(0, 20))
def test_the_end_of_a_text_fits_and_begins_rarely_anew(length: int, context: int) -> None:
    found = fitting(range(length), context)
    assert list(found) == list(range(length))[length - len(found) :]
    if context:
        assert min(length, context // 2) <= len(found) <= context
    longer = fitting(range(length + 1), context)
    assert not context or longer[:1] == found[:1] or len(longer) - 1 <= max(1, context - context // 2)
