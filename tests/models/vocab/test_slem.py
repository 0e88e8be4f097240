"""SLEM: what the drafter would generate, in the target's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.messages import GREEDY, Sampling
from dsi.engine.build import load_tokenizer
from dsi.models.hf import load_model
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import model_path
from dsi.models.protocol import CancelFlag, Cancelled, ForwardRequest, Never, SamplingModel
from dsi.models.vocab.slem import SLEM, last_word_start
from dsi.models.vocab.vocabulary import Vocabulary, incomplete_bytes
from sample_tokenizers import MAKERS, llama, sample_tokenizer, vocabulary


class FixedTextBackend:
    """A drafter that continues one fixed text from any prefix of it, and otherwise ends."""

    def __init__(self, name: str, text: str) -> None:
        self.own, self.text, self.forwards = vocabulary(name), text.encode(), 0

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        self.forwards += 1
        logits = np.zeros((max(0, len(tokens) + 1 - start), self.own.size), dtype=np.float32)
        logits[:, self.next_token(tokens)] = 1.0
        return logits

    def next_token(self, tokens: Sequence[int]) -> int:
        decoded = self.own.decode(tokens)
        text = decoded.removeprefix(b" ") if self.own.adds_space else decoded
        rest = self.text[len(text) :]
        if not rest or not self.text.startswith(text):
            return self.own.eos or 0
        if incomplete_bytes(text):  # an incomplete character is completed byte by byte
            return self.own.token_map.ids[rest[:1]]
        return (self.own.encode_after(decoded, rest) or self.own.encode_inside(rest))[0]


def slem_of_text(drafter: str, target: str, text: str) -> tuple[SLEM, FixedTextBackend, list[int]]:
    backend = FixedTextBackend(drafter, text)
    return SLEM(backend, vocabulary(drafter), vocabulary(target)), backend, sample_tokenizer(target).encode(text)


def guesses(slem: SLEM, tokens: Sequence[int], positions: Iterable[int]) -> list[int]:
    return [slem.answer(ForwardRequest(tokens[:i], i))[0] for i in positions]


TEXTS = ("Once upon a time there was a little girl", "The cat\n\tsat; 雪が降る。", "🙂🎉 hello 北京 world 🙂")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("target", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("drafter", ["byte_level", "byte_fallback", "metaspace"])
def test_slem_of_a_known_text_is_always_accepted(drafter: str, target: str, text: str) -> None:
    slem, _, tokens = slem_of_text(drafter, target, text)
    first = 1 if tokens[0] == sample_tokenizer(target).bos_token_id else 0
    assert guesses(slem, tokens, range(first, len(tokens))) == tokens[first:]
    assert guesses(slem, tokens, [len(tokens)]) == [vocabulary(target).eos]


def test_slem_caches_drafter_steps() -> None:
    slem, backend, tokens = slem_of_text("byte_level", "byte_fallback", TEXTS[0])
    guesses(slem, tokens, range(len(tokens)))
    assert backend.forwards <= len(sample_tokenizer("byte_level").encode(TEXTS[0])) + 3


@pytest.mark.parametrize("drafter", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
@given(
    texts=st.lists(st.lists(st.integers(0, 10**6), max_size=10), min_size=1, max_size=3),
    sampling=st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3)]),
)
@settings(max_examples=3)
def test_slem_is_stateless_and_drafts_target_tokens(
    drafter: str, target: str, texts: list[list[int]], sampling: Sampling
) -> None:
    """For any tokens: invalid UTF-8, special tokens in the middle, unknown ones."""
    pair = vocabulary(drafter), vocabulary(target)
    backend = LlamaCpu(llama(drafter, context=64))
    slem = SLEM(backend, *pair, 64)
    for text in texts:
        tokens = [token % pair[1].size for token in text]
        drafted = slem.answer(ForwardRequest(tokens, max(0, len(tokens) - 1), sampling=sampling))
        fresh = SLEM(backend, *pair, 64)
        assert fresh.answer(ForwardRequest(tokens, len(tokens), sampling=sampling)) == drafted[-1:]
        assert all(0 <= token < pair[1].size for token in drafted)
        assert slem.answer(ForwardRequest(tokens, len(tokens) + 1, sampling=sampling)) == ()


def test_slem_does_not_cache_cancelled_steps() -> None:
    class Flag(Never):
        wanted = False

        def is_set(self) -> bool:
            return not self.wanted

    flag = Flag()
    slem = SLEM(LlamaCpu(llama("characters")), vocabulary("characters"), vocabulary("byte_level"))
    with pytest.raises(Cancelled):
        slem.answer(ForwardRequest([60, 61], 2, cancelled=flag))
    flag.wanted = True
    fresh = SLEM(LlamaCpu(llama("characters")), vocabulary("characters"), vocabulary("byte_level"))
    assert slem.answer(ForwardRequest([60, 61], 2, cancelled=flag)) == fresh.answer(ForwardRequest([60, 61], 2))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)])
def test_slem_of_the_target_itself_is_accepted(sampling: Sampling) -> None:
    """With one tokenizer the noise is that of the same positions: 400 of 400 agreed when last measured."""
    where = model_path("builtin", "target")
    model = load_model(where)
    text = load_tokenizer(where, model)
    own = Vocabulary(text, 4096)
    slem, target = SLEM(LlamaCpu(model), own, own, 512), SamplingModel(LlamaCpu(model))
    tokens, right = list(text.encode("Tom and his dog")), 0
    for _ in range(32):
        request = ForwardRequest(tokens, len(tokens), sampling=sampling)
        [target_token] = target.answer(request)
        right += slem.answer(request) == (target_token,)
        tokens.append(target_token)
    assert right >= 30


@pytest.mark.parametrize(
    ("text", "word"),
    [("Once upon a ti", " ti"), ("a\n\n\tb", "\n\n\tb"), ("北京雪", "雪"), ("one", "one"), ("o" * 60, "")],
)
def test_last_word_start_is_at_a_boundary(text: str, word: str) -> None:
    raw = text.encode()
    assert raw[last_word_start(raw, len(raw)) :] == word.encode()
