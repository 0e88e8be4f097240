"""The lean Llama answers as the transformers model it is made from."""

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from dsi.models.hf import Transformer
from dsi.models.llama_cpu import LlamaCpu, joined
from dsi.models.protocol import Cancelled, Never

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "num_attention_heads": 4, **changes})).float().eval()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Any:
    return llama(tie_word_embeddings=request.param)


asks = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@given(asks)
@settings(max_examples=40)
def test_rows_are_the_same_whatever_was_asked_before(model: Any, asks: list[tuple[list[int], int]]) -> None:
    lean, full = LlamaCpu(model), Transformer(model)
    for tokens, back in asks:
        start = max(1, len(tokens) - back)
        assert torch.allclose(lean.forward(tokens, start), full.forward(tokens, start), atol=1e-5)


class After(Never):
    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_cancelled_forward_stops_between_layers_and_leaves_no_trace(looks: int) -> None:
    lean, full = LlamaCpu(llama()), Transformer(llama())
    lean.forward([1, 2, 3], 3)
    with pytest.raises(Cancelled):
        lean.forward([1, 2, 3, 4, 5], 4, After(looks))
    assert torch.allclose(lean.forward([1, 2, 3, 4, 9], 3), full.forward([1, 2, 3, 4, 9], 3), atol=1e-5)


def test_the_context_and_empty_texts_are_checked() -> None:
    with pytest.raises(ValueError, match="the model's context is 64"):
        LlamaCpu(llama()).forward([1] * 65, 65)
    with pytest.raises(ValueError, match="an empty text"):
        LlamaCpu(llama()).forward([], 0)


def test_other_models_stay_as_they_are() -> None:
    assert LlamaCpu.supports(llama())
    assert not LlamaCpu.supports(llama(num_key_value_heads=2))
    assert not LlamaCpu.supports(llama(attention_bias=True))
    assert not LlamaCpu.supports(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    assert not LlamaCpu.supports(hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=97)))


def test_matrices_are_joined_where_they_lie() -> None:
    model = llama(num_key_value_heads=2)
    layer, ids = model.model.layers[0], torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before, parts = (
            model(ids).logits,
            [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        )
        rows = torch.cat([part.weight for part in parts])
        first, again = joined(layer), joined(layer)
        assert torch.equal(first.qkv, rows)
        assert torch.equal(again.qkv, rows)
        assert first.qkv.data_ptr() == again.qkv.data_ptr() == parts[0].weight.data_ptr()
        assert first.gate_up.data_ptr() == again.gate_up.data_ptr()
        assert torch.equal(model(ids).logits, before)


def test_a_model_whose_matrices_are_joined_can_still_be_trained() -> None:
    model = llama()
    with torch.inference_mode():
        joined(model.model.layers[0])
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None


def test_what_only_lies_as_if_it_were_one_is_copied() -> None:
    model = llama()
    attention, store = model.model.layers[0].self_attn, torch.rand(3, 32, 32)
    for part, weight in zip((attention.q_proj, attention.k_proj, attention.v_proj), store):
        part.weight.data = weight.T
    assert torch.equal(joined(model.model.layers[0]).qkv, torch.cat([weight.T for weight in store]))
