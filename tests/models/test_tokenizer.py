"""Characters are shown whole, and a text ends before its stop string."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsi.models.names import model_path
from dsi.models.tokenizer import Detokenizer, StopStrings, Tokenizer


def byte_tokenizer() -> Any:
    """One token for each byte: every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)} | {"<end>": 256}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


BYTES = Tokenizer(byte_tokenizer())
PAIR = Tokenizer(PreTrainedTokenizerFast.from_pretrained(model_path("builtin", "target")))
WORDS = st.text(st.sampled_from("ab é雪🙂\n.") | st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20)


@given(WORDS, st.sampled_from([BYTES, PAIR]), st.integers(1, 5))
def test_pieces_add_up_and_never_show_half_a_character(words: str, text: Tokenizer, size: int) -> None:
    tokens = text.tokenizer(words, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == words


def test_half_a_character_at_the_very_end_is_shown_as_what_it_is() -> None:
    tokens = BYTES.encode("a雪")[:-1]
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(tokens) == ""
    assert detokenizer.finish().startswith("a")


@given(
    st.text("ab.", max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.integers(1, 4),
)
def test_a_text_ends_before_its_first_stop_wherever_the_borders_are(words: str, stops: list[str], size: int) -> None:
    expected = min((words.find(stop) for stop in stops if stop in words), default=len(words))
    guard, shown = StopStrings(stops), ""
    for i in range(0, len(words), size):
        shown += guard.push(words[i : i + size])
        if guard.stopped:
            break
    shown += "" if guard.stopped else guard.finish()
    first = min((words.find(stop) + len(stop) for stop in stops if stop in words), default=None)
    # A stop that ends earlier can hide one that begins earlier: then the text is cut where it was noticed.
    assert shown == words[:expected] or (first is not None and words.startswith(shown))
    assert guard.stopped == any(stop in words for stop in stops)


def test_a_conversation_without_a_template_is_one_running_text() -> None:
    assert not PAIR.has_chat_template
    talk = [{"role": "user", "content": "Once upon"}, {"role": "user", "content": "a time"}]
    assert PAIR.apply_chat_template(talk) == PAIR.encode("Once upon a time")


def test_a_chat_template_is_used_where_there_is_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    text = Tokenizer(tokenizer)
    assert text.decode(text.apply_chat_template([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"


def test_an_empty_prompt_begins_with_the_start_token() -> None:
    assert PAIR.encode("") == (1,)
    with pytest.raises(ValueError, match="an empty prompt"):
        BYTES.encode("")


def test_special_tokens_end_a_text_and_are_not_shown() -> None:
    assert PAIR.eos_token_ids == {0}
    assert PAIR.decode([*PAIR.encode("Hello"), 0]) == "Hello"


def test_vocabularies_are_compared() -> None:
    assert PAIR.same_vocabulary(Tokenizer(PreTrainedTokenizerFast.from_pretrained(model_path("builtin", "drafter"))))
    assert not PAIR.same_vocabulary(BYTES)


def test_the_pair_is_in_the_package() -> None:
    sizes = [file.stat().st_size for file in Path(model_path("builtin", "target")).parent.rglob("*") if file.is_file()]
    assert sum(sizes) < 40e6
    assert max(sizes) < 16e6
