"""Guesses through text: what the drafter would write, in the target's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsi.core.messages import GREEDY, Sampling
from dsi.engine.build import load_tokenizer
from dsi.models.hf import load_model
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import model_path
from dsi.models.protocol import CancelFlag, Cancelled, ForwardRequest, Never, SamplingModel
from dsi.models.vocab.slem import SLEM, last_seam
from dsi.models.vocab.vocabulary import Vocabulary, unfinished
from tongues import MAKERS, llama, tongue, vocabulary


class Reciter:
    """A drafter that knows one text by heart, and goes on from wherever it is told to begin, or ends."""

    def __init__(self, name: str, text: str) -> None:
        self.own, self.text, self.forwards = vocabulary(name), text.encode(), 0

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        self.forwards += 1
        rows = np.zeros((max(0, len(tokens) + 1 - start), self.own.size), dtype=np.float32)
        rows[:, self.follows(tokens)] = 1.0
        return rows

    def follows(self, tokens: Sequence[int]) -> int:
        written = self.own.written(tokens)
        said = written.removeprefix(b" ") if self.own.leads else written
        rest = self.text[len(said) :]
        if not rest or not self.text.startswith(said):
            return self.own.end or 0
        if unfinished(said):  # a character that is begun is ended byte by byte
            return self.own.lexicon.ids[rest[:1]]
        return (self.own.after(written, rest) or self.own.inside(rest))[0]


def reciting(drafter: str, target: str, text: str) -> tuple[SLEM, Reciter, list[int]]:
    reciter = Reciter(drafter, text)
    return SLEM(reciter, vocabulary(drafter), vocabulary(target)), reciter, tongue(target).encode(text)


def guesses(slem: SLEM, tokens: Sequence[int], places: Iterable[int]) -> list[int]:
    return [slem.answer(ForwardRequest(tokens[:i], i))[0] for i in places]


TEXTS = ("Once upon a time there was a little girl", "The cat\n\tsat; 雪が降る。", "🙂🎉 hello 北京 world 🙂")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("target", ["byte_level", "bytes_as_a_last_resort", "metaspace"])
@pytest.mark.parametrize("drafter", ["byte_level", "bytes_as_a_last_resort", "metaspace"])
def test_a_drafter_that_knows_the_text_is_right_whatever_its_tokens_are(drafter: str, target: str, text: str) -> None:
    slem, _, tokens = reciting(drafter, target, text)
    first = 1 if tokens[0] == tongue(target).bos_token_id else 0
    assert guesses(slem, tokens, range(first, len(tokens))) == tokens[first:]
    assert guesses(slem, tokens, [len(tokens)]) == [vocabulary(target).end]


def test_a_guess_further_on_needs_few_new_forwards() -> None:
    slem, reciter, tokens = reciting("byte_level", "bytes_as_a_last_resort", TEXTS[0])
    guesses(slem, tokens, range(len(tokens)))
    assert reciter.forwards <= len(tongue("byte_level").encode(TEXTS[0])) + 3


@pytest.mark.parametrize("drafter", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
@given(
    texts=st.lists(st.lists(st.integers(0, 10**6), max_size=10), min_size=1, max_size=3),
    sampling=st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3)]),
)
@settings(max_examples=3)
def test_a_guess_is_a_token_of_the_target_and_depends_on_the_text_alone(
    drafter: str, target: str, texts: list[list[int]], sampling: Sampling
) -> None:
    """Any tokens at all: bytes that are no characters, special tokens in the middle, unknown ones."""
    pair = vocabulary(drafter), vocabulary(target)
    backend = LlamaCpu(llama(drafter, context=64))
    slem = SLEM(backend, *pair, 64)
    for text in texts:
        tokens = [token % pair[1].size for token in text]
        found = slem.answer(ForwardRequest(tokens, max(0, len(tokens) - 1), sampling=sampling))
        fresh = SLEM(backend, *pair, 64)
        assert fresh.answer(ForwardRequest(tokens, len(tokens), sampling=sampling)) == found[-1:]
        assert all(0 <= token < pair[1].size for token in found)
        assert slem.answer(ForwardRequest(tokens, len(tokens) + 1, sampling=sampling)) == ()


def test_what_was_cancelled_is_not_remembered() -> None:
    class Once(Never):
        wanted = False

        def is_set(self) -> bool:
            return not self.wanted

    flag = Once()
    slem = SLEM(LlamaCpu(llama("characters")), vocabulary("characters"), vocabulary("byte_level"))
    with pytest.raises(Cancelled):
        slem.answer(ForwardRequest([60, 61], 2, cancelled=flag))
    flag.wanted = True
    fresh = SLEM(LlamaCpu(llama("characters")), vocabulary("characters"), vocabulary("byte_level"))
    assert slem.answer(ForwardRequest([60, 61], 2, cancelled=flag)) == fresh.answer(ForwardRequest([60, 61], 2))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)])
def test_through_text_and_back_a_model_agrees_with_itself(sampling: Sampling) -> None:
    """With one tokenizer its noise is that of the same places: when last seen, 400 of 400 were right."""
    where = model_path("builtin", "target")
    model = load_model(where)
    text = load_tokenizer(where, model)
    own = Vocabulary(text, 4096)
    slem, target = SLEM(LlamaCpu(model), own, own, 512), SamplingModel(LlamaCpu(model))
    tokens, right = list(text.encode("Tom and his dog")), 0
    for _ in range(32):
        request = ForwardRequest(tokens, len(tokens), sampling=sampling)
        [truth] = target.answer(request)
        right += slem.answer(request) == (truth,)
        tokens.append(truth)
    assert right >= 30


@pytest.mark.parametrize(
    ("text", "word"),
    [("Once upon a ti", " ti"), ("a\n\n\tb", "\n\n\tb"), ("北京雪", "雪"), ("one", "one"), ("o" * 60, "")],
)
def test_the_last_word_begins_at_a_seam(text: str, word: str) -> None:
    raw = text.encode()
    assert raw[last_seam(raw, len(raw)) :] == word.encode()
