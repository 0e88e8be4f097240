"""LlamaCpu gives the logits of the transformers model it is made from."""

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

from cancel_flags import CancelAfter
from dsi.models.hf import Transformer
from dsi.models.llama_cpu import LlamaCpu, fuse_projections
from dsi.models.protocol import Cancelled

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


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@given(requests)
@settings(max_examples=40)
def test_llama_cpu_logits_are_those_of_transformers(model: Any, requests: list[tuple[list[int], int]]) -> None:
    fused, reference = LlamaCpu(model), Transformer(model)
    for tokens, back in requests:
        start = max(1, len(tokens) - back)
        assert torch.allclose(fused.forward(tokens, start), reference.forward(tokens, start), atol=1e-5)


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_llama_cpu_cancels_between_layers_and_restores_the_cache(checks: int) -> None:
    fused, reference = LlamaCpu(llama()), Transformer(llama())
    fused.forward([1, 2, 3], 3)
    with pytest.raises(Cancelled):
        fused.forward([1, 2, 3, 4, 5], 4, CancelAfter(checks))
    assert torch.allclose(fused.forward([1, 2, 3, 4, 9], 3), reference.forward([1, 2, 3, 4, 9], 3), atol=1e-5)


def test_llama_cpu_checks_context_and_empty_texts() -> None:
    with pytest.raises(ValueError, match="the model's context is 64"):
        LlamaCpu(llama()).forward([1] * 65, 65)
    with pytest.raises(ValueError, match="an empty text"):
        LlamaCpu(llama()).forward([], 0)


def test_llama_cpu_supports_standard_llamas_only() -> None:
    assert LlamaCpu.supports(llama())
    assert not LlamaCpu.supports(llama(num_key_value_heads=2))
    assert not LlamaCpu.supports(llama(attention_bias=True))
    assert not LlamaCpu.supports(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    assert not LlamaCpu.supports(hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=97)))


def test_fuse_projections_keeps_adjacent_weights() -> None:
    model = llama(num_key_value_heads=2)
    layer, ids = model.model.layers[0], torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before, parts = (
            model(ids).logits,
            [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        )
        rows = torch.cat([part.weight for part in parts])
        first, again = fuse_projections(layer), fuse_projections(layer)
        assert torch.equal(first.qkv, rows)
        assert torch.equal(again.qkv, rows)
        assert first.qkv.data_ptr() == again.qkv.data_ptr() == parts[0].weight.data_ptr()
        assert first.gate_up.data_ptr() == again.gate_up.data_ptr()
        assert torch.equal(model(ids).logits, before)


def test_fuse_projections_leaves_the_model_trainable() -> None:
    model = llama()
    with torch.inference_mode():
        fuse_projections(model.model.layers[0])
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None


def test_fuse_projections_copies_transposed_weights() -> None:
    model = llama()
    attention, store = model.model.layers[0].self_attn, torch.rand(3, 32, 32)
    for part, weight in zip((attention.q_proj, attention.k_proj, attention.v_proj), store):
        part.weight.data = weight.T
    assert torch.equal(fuse_projections(model.model.layers[0]).qkv, torch.cat([weight.T for weight in store]))
