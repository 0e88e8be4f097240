"""Which models are captured with the Triton kernels, and the tables their graphs read."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoders import MAX_LENGTH, MODELS
from dsi.models.cuda import llama_triton
from dsi.models.cuda.fused_ops import fused_forward
from dsi.models.cuda.graphs import capture_patches


def llama(**changes: Any) -> Any:
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape | {"vocab_size": 97, "num_key_value_heads": 2} | changes))


def test_supports_triton_takes_a_standard_llama() -> None:
    pytest.importorskip("triton")
    assert llama_triton.supports_triton(llama())
    first, second, *_ = capture_patches(llama(), MAX_LENGTH)
    assert getattr(first, "func", None) is llama_triton.triton_forward
    assert second is fused_forward


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 48},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_supports_triton_refuses_other_llamas(changes: dict[str, Any]) -> None:
    assert not llama_triton.supports_triton(llama(**changes))
    assert capture_patches(llama(**changes), MAX_LENGTH)[0] is fused_forward


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_supports_triton_refuses_other_architectures(name: str) -> None:
    assert not llama_triton.supports_triton(MODELS[name]())


def test_supports_triton_refuses_adapters() -> None:
    class Adapted(torch.nn.Linear):
        """As an adapter would, it changes the output."""

    model = llama()
    model.model.layers[1].self_attn.q_proj = Adapted(128, 128, bias=False)
    assert not llama_triton.supports_triton(model)


def test_supports_triton_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_triton, "find_spec", lambda _: None)
    assert not llama_triton.supports_triton(llama())


def test_rotary_tables_live_as_long_as_the_model() -> None:
    """A captured graph holds only addresses: other tensors must never take their place."""
    pytest.importorskip("triton")
    model = llama()
    with torch.inference_mode(), llama_triton.triton_forward(model, MAX_LENGTH):
        tables = [ref(table) for table in llama_triton._tables(model, MAX_LENGTH)]
    gc.collect()
    with torch.inference_mode(), llama_triton.triton_forward(model, MAX_LENGTH):
        assert [table() for table in tables] == list(llama_triton._tables(model, MAX_LENGTH))
    del model
    gc.collect()
    assert [table() for table in tables] == [None, None]
