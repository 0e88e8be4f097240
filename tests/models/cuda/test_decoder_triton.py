"""Which models are captured with the Triton kernels, and the tables their graphs read."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
import transformers as hf

from decoders import MAX_LENGTH, MODELS
from dsi.models.cuda import decoder_triton
from dsi.models.cuda.fused_ops import fused_forward
from dsi.models.cuda.graphs import capture_patches


def llama(**changes: Any) -> Any:
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape | {"vocab_size": 97, "num_key_value_heads": 2} | changes))


def test_supports_triton_takes_a_standard_llama() -> None:
    pytest.importorskip("triton")
    assert decoder_triton.supports_triton(llama())
    first, second, *_ = capture_patches(llama(), MAX_LENGTH)
    assert getattr(first, "func", None) is decoder_triton.triton_forward
    assert second is fused_forward


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"head_dim": 48},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_supports_triton_refuses_other_llamas(changes: dict[str, Any]) -> None:
    assert not decoder_triton.supports_triton(llama(**changes))
    assert capture_patches(llama(**changes), MAX_LENGTH)[0] is fused_forward


@pytest.mark.parametrize("name", MODELS)
def test_supports_triton_refuses_other_architectures_and_small_heads(name: str) -> None:
    assert not decoder_triton.supports_triton(MODELS[name]())


def phi3(**changes: Any) -> Any:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0}
    sizes = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 97}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**shape | sizes | changes))


def test_supports_triton_refuses_a_rotary_embedding_of_half_a_head() -> None:
    pytest.importorskip("triton")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert decoder_triton.supports_triton(phi3(rope_parameters=rope))
    assert not decoder_triton.supports_triton(phi3(rope_parameters={**rope, "partial_rotary_factor": 0.5}))


def test_supports_triton_refuses_a_bigcode_with_a_key_per_query() -> None:
    pytest.importorskip("triton")
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 97}
    multi_query, multi_head = (
        hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**shape, multi_query=multi_query)) for multi_query in (True, False)
    )
    assert decoder_triton.supports_triton(multi_query)
    assert not decoder_triton.supports_triton(multi_head)


def test_supports_triton_refuses_classes_of_others() -> None:
    class Changed(hf.LlamaForCausalLM):  # type: ignore[misc]
        """It may compute something else."""

    assert not decoder_triton.supports_triton(Changed(llama().config))


def test_supports_triton_refuses_adapters() -> None:
    class Adapted(torch.nn.Linear):
        """As an adapter would, it changes the output."""

    model = llama()
    model.model.layers[1].self_attn.q_proj = Adapted(128, 128, bias=False)
    assert not decoder_triton.supports_triton(model)


def test_supports_triton_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_triton, "find_spec", lambda _: None)
    assert not decoder_triton.supports_triton(llama())


def test_rotary_tables_live_as_long_as_the_model() -> None:
    """A captured graph holds only addresses: other tensors must never take their place."""
    pytest.importorskip("triton")
    model = llama()
    with torch.inference_mode(), decoder_triton.triton_forward(model, MAX_LENGTH):
        tables = [ref(table) for table in decoder_triton._tables(model, MAX_LENGTH)]
    gc.collect()
    with torch.inference_mode(), decoder_triton.triton_forward(model, MAX_LENGTH):
        assert [table() for table in tables] == list(decoder_triton._tables(model, MAX_LENGTH))
    del model
    gc.collect()
    assert [table() for table in tables] == [None, None]
