"""TLI: the target's ids in, logits over the target's vocabulary out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dsi.core.messages import Sampling
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest, SamplingModel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.tli import TLI, Retokenizer
from dsi.models.vocab.token_map import shared_tokens
from dsi.models.vocab.vocabulary import Vocabulary
from sample_tokenizers import MAKERS, llama, sample_tokenizer, vocabulary


class RecordingBackend:
    """A backend that records its inputs, and gives its first tokens the largest logits."""

    def __init__(self, size: int) -> None:
        self.size, self.inputs = size, [[0]]

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        self.inputs.append(list(tokens))
        return -np.tile(np.arange(self.size, dtype=np.float32), (max(0, len(tokens) + 1 - start), 1))


def retokenized(drafter: str, target: str, text: str, **options: bool) -> tuple[list[int], list[str]]:
    """A text of the target, and what the drafter is inputs about for it."""
    backend = RecordingBackend(vocabulary(drafter).size)
    tokens = sample_tokenizer(target).encode(text, **options)
    TLI(backend, vocabulary(drafter), vocabulary(target)).forward(tokens, len(tokens), NEVER)
    return tokens, sample_tokenizer(drafter).convert_ids_to_tokens(backend.inputs[-1])


def test_retokenizer_maps_shared_tokens_and_reencodes_others() -> None:
    tokens, own_tokens = retokenized("characters", "byte_level", "The sea 雪")
    assert sample_tokenizer("byte_level").convert_ids_to_tokens(tokens) == ["<s>", "The", "Ġsea", "Ġ", "éĽ", "ª"]
    assert own_tokens == ["T", "h", "e", " ", "s", "e", "a", " ", "雪"]


def test_retokenizer_handles_beginnings_and_unknown_text() -> None:
    _, own_tokens = retokenized("metaspace", "byte_level", "a 🙂zq")
    assert own_tokens == ["<begin>", "a", "▁🙂", "<unk>"]
    _, own_tokens = retokenized("metaspace", "characters", "a")
    assert own_tokens == ["<begin>", "a"]
    _, own_tokens = retokenized("whole_words", "byte_level", "", add_special_tokens=False)
    assert own_tokens == ["[END]"]  # a model needs at least one token


def test_retokenizer_waits_for_complete_characters() -> None:
    target, drafter = vocabulary("byte_level"), vocabulary("characters")
    retokenizer = Retokenizer(target, drafter, shared_tokens(drafter.token_map, target.token_map).to_drafter())
    tokens = target.encode("a雪b")
    own_tokens = [
        sample_tokenizer("characters").convert_ids_to_tokens(retokenizer.retokenize(tokens[:i]))
        for i in range(len(tokens) + 1)
    ]
    assert own_tokens == [[], ["a"], ["a"], ["a", "雪"], ["a", "雪", "b"]]


@pytest.mark.parametrize("drafter", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
@given(texts=st.lists(st.lists(st.integers(0, 47), max_size=12) | st.just([300] * 70), max_size=5))
@settings(max_examples=15)
def test_retokenizer_is_stateless(drafter: str, target: str, texts: list[list[int]]) -> None:
    own, other = vocabulary(drafter), vocabulary(target)
    to_drafter = shared_tokens(own.token_map, other.token_map).to_drafter()
    retokenizer = Retokenizer(other, own, to_drafter)
    for tokens in texts:
        size = other.size
        tokens = [token * 7 % size for token in tokens]
        converted = retokenizer.retokenize(tokens)
        assert converted == Retokenizer(other, own, to_drafter).retokenize(tokens)
        assert all(token < own.size for token in converted)


def test_tli_drafts_only_shared_tokens() -> None:
    drafter, target = vocabulary("metaspace"), vocabulary("byte_level")
    tli = TLI(LlamaCpu(llama("metaspace")), drafter, target, 256)
    logits = tli.forward([0, 60, 61], 2, NEVER)
    assert logits.shape == (2, target.size)
    finite = set(torch.isfinite(logits[0]).nonzero().flatten().tolist())
    assert finite == set(tli.shared.target.tolist())
    assert tli.forward([0, 60], 3, NEVER).shape[0] == 0
    alone = tli.forward([0, 60, 61], 3, NEVER)
    assert torch.allclose(alone[0][list(finite)], logits[1][list(finite)], atol=1e-5)


def test_tli_truncates_a_text_to_the_context() -> None:
    drafter, target = vocabulary("characters"), vocabulary("byte_level")
    tli = TLI(LlamaCpu(llama("characters", context=16)), drafter, target, 16)
    tokens = sample_tokenizer("byte_level").encode("Once upon a time there was a little girl")
    assert len(tli.forward(tokens, 1, NEVER)) == len(tokens)


def permuted(name: str) -> tuple[Any, Vocabulary]:
    """The same model and tokenizer under other ids."""
    order = torch.randperm(len(sample_tokenizer(name)), generator=torch.Generator().manual_seed(7))
    twin = copy.deepcopy(llama(name))
    with torch.no_grad():
        for weight in (twin.model.embed_tokens.weight, twin.lm_head.weight):
            weight[order] = weight[: len(order)].clone()
    return twin, Vocabulary(Tokenizer(Renamed(sample_tokenizer(name), order.tolist())), vocabulary(name).size)


class Renamed:
    """A tokenizer with permuted ids."""

    def __init__(self, tokenizer: Any, order: list[int]) -> None:
        self._tokenizer, self._order = tokenizer, order
        self.backend_tokenizer = tokenizer.backend_tokenizer
        self.bos_token_id, self.eos_token_id = order[tokenizer.bos_token_id], order[tokenizer.eos_token_id]
        self.unk_token_id = self.pad_token_id = None
        self.added_tokens_decoder = {order[i]: token for i, token in tokenizer.added_tokens_decoder.items()}

    def get_vocab(self) -> dict[str, int]:
        return {token: self._order[i] for token, i in self._tokenizer.get_vocab().items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [self._order[token] for token in tokens]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)])
def test_tli_with_permuted_ids_is_always_accepted(sampling: Sampling) -> None:
    """Even for tokens that are parts of characters, and with noise keyed by the target's ids."""
    twin, other = permuted("byte_level")
    drafter = SamplingModel(TLI(LlamaCpu(twin), other, vocabulary("byte_level"), 256))
    target = SamplingModel(LlamaCpu(llama("byte_level")))
    tokens = list(sample_tokenizer("byte_level").encode("北京 \t🙂 once"))
    for _ in range(60):
        request = ForwardRequest(tokens, len(tokens), sampling=sampling)
        [target_token] = target.answer(request)
        if target_token < len(sample_tokenizer("byte_level")):  # logits beyond the tokenizer belong to no token
            assert drafter.answer(request) == (target_token,)
        tokens.append(target_token)
