"""Which models are recorded in few kernels, and what their recordings read."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoders import MODELS, ROOM
from dsi.models.cuda import llama_triton as swift
from dsi.models.cuda.fused_ops import fused
from dsi.models.cuda.graphs import ways


def llama(**changes: Any) -> Any:
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape | {"vocab_size": 97, "num_key_value_heads": 2} | changes))


def test_a_plain_llama_is() -> None:
    pytest.importorskip("triton")
    assert swift.fits(llama())
    first, second, *_ = ways(llama(), ROOM)
    assert getattr(first, "func", None) is swift.swift
    assert second is fused


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 48},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_another_is_not(changes: dict[str, Any]) -> None:
    assert not swift.fits(llama(**changes))
    assert ways(llama(**changes), ROOM)[0] is fused


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_other_makes_are_not(name: str) -> None:
    assert not swift.fits(MODELS[name]())


def test_an_adapter_is_not_overlooked() -> None:
    class Adapted(torch.nn.Linear):
        """Adds to what its weights give."""

    model = llama()
    model.model.layers[1].self_attn.q_proj = Adapted(128, 128, bias=False)
    assert not swift.fits(model)


def test_without_triton_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift, "find_spec", lambda _: None)
    assert not swift.fits(llama())


def test_what_recordings_read_stays_for_as_long_as_the_model() -> None:
    """A recording knows only where its tensors were, and must never find others in their place."""
    pytest.importorskip("triton")
    model = llama()
    with torch.inference_mode(), swift.swift(model, ROOM):
        tables = [ref(table) for table in swift._turned(model, ROOM)]
    gc.collect()
    with torch.inference_mode(), swift.swift(model, ROOM):
        assert [table() for table in tables] == list(swift._turned(model, ROOM))
    del model
    gc.collect()
    assert [table() for table in tables] == [None, None]
