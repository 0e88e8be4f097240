"""The tokenizer, incremental detokenization and stop strings."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as RawTokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsi.models.names import model_path
from dsi.models.tokenizer import Detokenizer, StopStrings, TextOutput, Tokenizer
from sample_tokenizers import MAKERS, sample_tokenizer


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
def test_detokenizer_shows_whole_characters(words: str, tokenizer: Tokenizer, size: int) -> None:
    tokens = tokenizer.tokenizer(words, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) + detokenizer.finish() == words


@st.composite
def cut_tokens(draw: st.DrawFn) -> tuple[Any, list[list[int]]]:
    """A tokenizer, and tokens in parts: of texts in any script, special ones, and any others."""
    tokenizer = sample_tokenizer(draw(st.sampled_from(list(MAKERS))))
    encoded = WORDS.map(lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    special = st.sampled_from(tokenizer.all_special_ids or [0]).map(lambda token: [token])
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=3)
    tokens = [token for part in draw(st.lists(encoded | special | anything, max_size=6)) for token in part]
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)))))
    return tokenizer, [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)])]


@settings(max_examples=200)
@given(cut_tokens())
def test_detokenizer_parts_join_to_what_transformers_decodes(case: tuple[Any, list[list[int]]]) -> None:
    tokenizer, parts = case
    detokenizer = Detokenizer(Tokenizer(tokenizer))
    joined = "".join(detokenizer.push(part) for part in parts) + detokenizer.finish()
    assert joined == tokenizer.decode([id for part in parts for id in part], skip_special_tokens=True)


@settings(max_examples=200)
@given(cut_tokens())
def test_detokenizer_continues_a_prompt(case: tuple[Any, list[list[int]]]) -> None:
    tokenizer, (prompt, *parts) = case
    detokenizer = Detokenizer(Tokenizer(tokenizer), prompt)
    joined = "".join(detokenizer.push(part) for part in parts) + detokenizer.finish()
    whole = tokenizer.decode([*prompt, *(id for part in parts for id in part)], skip_special_tokens=True)
    assert whole.endswith(joined)
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    if whole.startswith(before):  # it does not end within a character
        assert before + joined == whole


def test_detokenizer_keeps_a_space_after_a_special_token() -> None:
    tokenizer = sample_tokenizer("byte_fallback")
    sentence = tokenizer("the sea.", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(Tokenizer(tokenizer))
    parts = [detokenizer.push([token]) for token in [*sentence, tokenizer.bos_token_id, *sentence]]
    assert "".join(parts) + detokenizer.finish() == "the sea. the sea."


def test_detokenizer_reads_whole_characters_of_a_prompt() -> None:
    """A context cut inside a run of byte tokens would make all of them invalid."""
    tokenizer = sample_tokenizer("byte_fallback")
    prompt = tokenizer("一" * 8, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(Tokenizer(tokenizer), prompt)
    more = tokenizer("二二", add_special_tokens=False)["input_ids"][1:]  # without the space before a text
    assert "".join(detokenizer.push([token]) for token in more) + detokenizer.finish() == "二二"


@given(st.integers(1, 6))
def test_text_output_counts_the_tokens_up_to_a_stop_string(size: int) -> None:
    """However many tokens arrive at once."""
    tokens = PAIR.encode("Once upon a time there was a little girl")
    output, shown = TextOutput(PAIR, (), ["time"]), ""
    for i in range(0, len(tokens), size):
        shown += output.push(tokens[i : i + size])[1]
    assert (shown, output.stopped) == ("Once upon a ", True)
    assert "time" in PAIR.decode(tokens[: output.num_tokens])
    assert "time" not in PAIR.decode(tokens[: output.num_tokens - 1])


def test_detokenizer_finish_shows_an_incomplete_character() -> None:
    tokens = BYTES.encode("a雪")[:-1]
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(tokens) == ""
    assert detokenizer.finish().startswith("a")


@given(
    st.text("ab.", max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.integers(1, 4),
)
def test_stop_strings_end_a_text_at_any_token_boundary(words: str, stops: list[str], size: int) -> None:
    expected = min((words.find(stop) for stop in stops if stop in words), default=len(words))
    stop_strings, shown = StopStrings(stops), ""
    for i in range(0, len(words), size):
        shown += stop_strings.push(words[i : i + size])
        if stop_strings.stopped:
            break
    shown += "" if stop_strings.stopped else stop_strings.finish()
    first = min((words.find(stop) + len(stop) for stop in stops if stop in words), default=None)
    # A stop string that ends earlier can hide one that begins earlier: then the text is cut at the former.
    assert shown == words[:expected] or (first is not None and words.startswith(shown))
    assert stop_strings.stopped == any(stop in words for stop in stops)


def test_tokenizer_joins_messages_without_a_chat_template() -> None:
    assert not PAIR.has_chat_template
    messages = [{"role": "user", "content": "Once upon"}, {"role": "user", "content": "a time"}]
    assert PAIR.apply_chat_template(messages) == PAIR.encode("Once upon a time")


def test_tokenizer_applies_a_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    text = Tokenizer(tokenizer)
    assert text.decode(text.apply_chat_template([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"


def test_tokenizer_encodes_an_empty_prompt_as_bos() -> None:
    assert PAIR.encode("") == (1,)
    with pytest.raises(ValueError, match="an empty prompt"):
        BYTES.encode("")


def test_tokenizer_hides_special_tokens() -> None:
    assert PAIR.eos_token_ids == {0}
    assert Tokenizer(PAIR.tokenizer, [5, 6]).eos_token_ids == {5, 6}  # as in transformers, not its own as well
    assert PAIR.decode([*PAIR.encode("Hello"), 0]) == "Hello"


def test_tokenizer_compares_vocabularies() -> None:
    assert PAIR.same_vocabulary(Tokenizer(PreTrainedTokenizerFast.from_pretrained(model_path("builtin", "drafter"))))
    assert not PAIR.same_vocabulary(BYTES)


def test_builtin_pair_is_small() -> None:
    sizes = [file.stat().st_size for file in Path(model_path("builtin", "target")).parent.rglob("*") if file.is_file()]
    assert sum(sizes) < 40e6
    assert max(sizes) < 16e6


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"ab\xff".decode(errors="surrogateescape"), "a text with the byte 0xff at position 2: is not valid UTF-8"),
        ("\ud800", "a text with the lone surrogate U+D800 at position 0: is not valid UTF-8"),
    ],
)
def test_tokenizer_refuses_invalid_utf8(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        PAIR.encode(text)
