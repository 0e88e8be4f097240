"""Guesses by shared tokens: the target's ids in, rows over the target's vocabulary out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsi.core.messages import Sampling
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest, SamplingModel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.tli import TLI, Retokenizer
from dsi.models.vocab.token_map import shared
from dsi.models.vocab.vocabulary import Vocabulary
from tongues import MAKERS, llama, tongue, vocabulary


class Echo:
    """A backend that remembers what it was asked, and scores its first tokens highest."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, [[0]]

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        self.asked.append(list(tokens))
        return -np.tile(np.arange(self.size, dtype=np.float32), (max(0, len(tokens) + 1 - start), 1))


def retold(drafter: str, target: str, text: str, **options: bool) -> tuple[list[int], list[str]]:
    """A text of the target, and what the drafter is asked about for it."""
    echo = Echo(vocabulary(drafter).size)
    tokens = tongue(target).encode(text, **options)
    TLI(echo, vocabulary(drafter), vocabulary(target)).forward(tokens, len(tokens), NEVER)
    return tokens, tongue(drafter).convert_ids_to_tokens(echo.asked[-1])


def test_shared_tokens_stand_for_themselves_and_others_are_written_anew() -> None:
    tokens, read = retold("characters", "byte_level", "The sea 雪")
    assert tongue("byte_level").convert_ids_to_tokens(tokens) == ["<s>", "The", "Ġsea", "Ġ", "éĽ", "ª"]
    assert read == ["T", "h", "e", " ", "s", "e", "a", " ", "雪"]


def test_a_beginning_is_a_beginning_and_what_is_unknown_is_unknown() -> None:
    _, read = retold("metaspace", "byte_level", "a 🙂zq")
    assert read == ["<begin>", "a", "▁🙂", "<unk>"]
    _, read = retold("metaspace", "characters", "a")
    assert read == ["<begin>", "a"]
    _, read = retold("whole_words", "byte_level", "", add_special_tokens=False)
    assert read == ["[END]"]  # there must be something to read


def test_half_a_character_waits_for_the_other_half() -> None:
    target, drafter = vocabulary("byte_level"), vocabulary("characters")
    text = Retokenizer(target, drafter, shared(drafter.lexicon, target.lexicon).to_drafter())
    tokens = target.encode("a雪b")
    read = [tongue("characters").convert_ids_to_tokens(text.of(tokens[:i])) for i in range(len(tokens) + 1)]
    assert read == [[], ["a"], ["a"], ["a", "雪"], ["a", "雪", "b"]]


@pytest.mark.parametrize("drafter", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
@given(texts=st.lists(st.lists(st.integers(0, 47), max_size=12) | st.just([300] * 70), max_size=5))
@settings(max_examples=15)
def test_the_same_text_is_retold_the_same_whatever_was_asked_before(
    drafter: str, target: str, texts: list[list[int]]
) -> None:
    ours, theirs = vocabulary(drafter), vocabulary(target)
    to_drafter = shared(ours.lexicon, theirs.lexicon).to_drafter()
    memory = Retokenizer(theirs, ours, to_drafter)
    for tokens in texts:
        size = theirs.size
        tokens = [token * 7 % size for token in tokens]
        found = memory.of(tokens)
        assert found == Retokenizer(theirs, ours, to_drafter).of(tokens)
        assert all(token < ours.size for token in found)


def test_only_shared_tokens_can_be_guessed() -> None:
    drafter, target = vocabulary("metaspace"), vocabulary("byte_level")
    tli = TLI(LlamaCpu(llama("metaspace")), drafter, target, 256)
    rows = tli.forward([0, 60, 61], 2, NEVER)
    assert rows.shape == (2, target.size)
    finite = set(torch.isfinite(rows[0]).nonzero().flatten().tolist())
    assert finite == set(tli.shared.target.tolist())
    assert tli.forward([0, 60], 3, NEVER).shape[0] == 0
    alone = tli.forward([0, 60, 61], 3, NEVER)
    assert torch.allclose(alone[0][list(finite)], rows[1][list(finite)], atol=1e-5)


def test_a_short_context_reads_the_end_of_a_long_text() -> None:
    drafter, target = vocabulary("characters"), vocabulary("byte_level")
    tli = TLI(LlamaCpu(llama("characters", context=16)), drafter, target, 16)
    tokens = tongue("byte_level").encode("Once upon a time there was a little girl")
    assert len(tli.forward(tokens, 1, NEVER)) == len(tokens)


def permuted(name: str) -> tuple[Any, Vocabulary]:
    """The same model and tokenizer under other ids."""
    order = torch.randperm(len(tongue(name)), generator=torch.Generator().manual_seed(7))
    twin = copy.deepcopy(llama(name))
    with torch.no_grad():
        for weight in (twin.model.embed_tokens.weight, twin.lm_head.weight):
            weight[order] = weight[: len(order)].clone()
    return twin, Vocabulary(Tokenizer(Renamed(tongue(name), order.tolist())), vocabulary(name).size)


class Renamed:
    """A tokenizer whose ids have been dealt anew."""

    def __init__(self, tokenizer: Any, order: list[int]) -> None:
        self._tokenizer, self._order = tokenizer, order
        self.backend_tokenizer = tokenizer.backend_tokenizer
        self.bos_token_id, self.eos_token_id = order[tokenizer.bos_token_id], order[tokenizer.eos_token_id]
        self.unk_token_id = self.pad_token_id = None
        self.added_tokens_decoder = {order[i]: token for i, token in tokenizer.added_tokens_decoder.items()}

    def get_vocab(self) -> dict[str, int]:
        return {token: self._order[i] for token, i in self._tokenizer.get_vocab().items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [self._order[token] for token in found]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)])
def test_a_drafter_that_differs_in_its_ids_alone_is_always_right(sampling: Sampling) -> None:
    """Tokens that are parts of characters, too, and noise that is keyed by the target's ids."""
    twin, other = permuted("byte_level")
    drafter = SamplingModel(TLI(LlamaCpu(twin), other, vocabulary("byte_level"), 256))
    target = SamplingModel(LlamaCpu(llama("byte_level")))
    tokens = list(tongue("byte_level").encode("北京 \t🙂 once"))
    for _ in range(60):
        request = ForwardRequest(tokens, len(tokens), sampling=sampling)
        [truth] = target.answer(request)
        if truth < len(tongue("byte_level")):  # rows beyond the tokenizer mean nothing to anybody
            assert drafter.answer(request) == (truth,)
        tokens.append(truth)
