"""The kernels, computed here as a GPU would: run by `test_kernels.py`, with TRITON_INTERPRET=1."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.models.cuda.graphs import static_cache
from dsi.models.cuda.llama_triton import swift

ROOM, WORDS = 160, 97


def llama(size: int, shared: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=4 * size,
        head_dim=size,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=shared,
        max_position_embeddings=ROOM,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    return model


def begun(model: Any) -> Any:
    """A cache whose layers have their tensors."""
    cache, place = static_cache(model.config, ROOM), torch.zeros(1, dtype=torch.int64)
    rows(model, cache, place[0], torch.tensor([1]))
    return cache


def rows(model: Any, cache: Any, length: Tensor, ids: Tensor) -> Tensor:
    places = length + torch.arange(len(ids))
    for layer in cache.layers:
        layer.cumulative_length, layer.places = length, places
    found: Tensor = model(input_ids=ids[None], position_ids=places[None], past_key_values=cache, use_cache=True).logits[
        0
    ]
    return found


@pytest.mark.parametrize(("size", "shared", "dtype"), [(32, 2, torch.float32), (64, 4, torch.float16)])
@torch.inference_mode()
def test_rows_and_the_cache_are_the_same(size: int, shared: int, dtype: torch.dtype) -> None:
    """Of a text that is read in forwards of many widths: 70 tokens are more than are looked at in one go."""
    model = llama(size, shared, dtype)
    plainly, swiftly, length = begun(model), begun(model), torch.tensor(0)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for new in (3, 1, 8, 1, 70):
        ids = torch.randint(WORDS, (new,))
        expected = rows(model, plainly, length, ids)
        with swift(model, ROOM):
            found = rows(model, swiftly, length, ids)
        assert torch.allclose(expected, found, atol=near)
        length = length + new
    for a, b in zip(plainly.layers, swiftly.layers):
        assert torch.allclose(a.keys[:, :, :length], b.keys[:, :, :length], atol=near)
        assert torch.allclose(a.values[:, :, :length], b.values[:, :, :length], atol=near)


@torch.inference_mode()
def test_what_lies_beyond_the_text_is_not_seen() -> None:
    """A guess that was rejected, or padding, may have left anything there."""
    model = llama(32, 2, torch.float32)
    cache, ids = begun(model), torch.arange(6)
    with swift(model, ROOM):
        expected = rows(model, cache, torch.tensor(0), ids)
        for layer in cache.layers:
            layer.keys[:, :, 2:], layer.values[:, :, 2:] = torch.nan, torch.nan
        assert torch.allclose(rows(model, cache, torch.tensor(2), ids[2:]), expected[2:], atol=1e-5)


@torch.inference_mode()
def test_the_model_is_as_before() -> None:
    model = llama(32, 2, torch.float32)
    module = sys.modules[type(model).__module__]
    forwards, mask = [part.forward for part in model.modules()], module.create_causal_mask
    before = rows(model, begun(model), torch.tensor(0), torch.arange(5))
    with swift(model, ROOM):
        assert [part.forward for part in model.modules()] != forwards
    assert [part.forward for part in model.modules()] == forwards
    assert module.create_causal_mask is mask
    assert torch.equal(rows(model, begun(model), torch.tensor(0), torch.arange(5)), before)
