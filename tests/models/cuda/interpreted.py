"""The Triton kernels in the interpreter: run by `test_triton_kernels.py` with TRITON_INTERPRET=1."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.models.cuda.graphs import static_cache
from dsi.models.cuda.llama_triton import triton_forward

MAX_LENGTH, VOCAB_SIZE = 160, 97


def llama(size: int, kv_heads: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=4 * size,
        head_dim=size,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_LENGTH,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    return model


def initialised_cache(model: Any) -> Any:
    """A static cache whose layers have their tensors."""
    cache, length = static_cache(model.config, MAX_LENGTH), torch.zeros(1, dtype=torch.int64)
    forward(model, cache, length[0], torch.tensor([1]))
    return cache


def forward(model: Any, cache: Any, length: Tensor, ids: Tensor) -> Tensor:
    positions = length + torch.arange(len(ids))
    for layer in cache.layers:
        layer.cumulative_length, layer.positions = length, positions
    logits: Tensor = model(
        input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True
    ).logits[0]
    return logits


@pytest.mark.parametrize(("size", "kv_heads", "dtype"), [(32, 2, torch.float32), (64, 4, torch.float16)])
@torch.inference_mode()
def test_triton_forward_keeps_logits_and_cache(size: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Over forwards of many widths: 70 new tokens are more than one tile."""
    model = llama(size, kv_heads, dtype)
    reference, by_triton, length = initialised_cache(model), initialised_cache(model), torch.tensor(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for new in (3, 1, 8, 1, 70):
        ids = torch.randint(VOCAB_SIZE, (new,))
        expected = forward(model, reference, length, ids)
        with triton_forward(model, MAX_LENGTH):
            actual = forward(model, by_triton, length, ids)
        assert torch.allclose(expected, actual, atol=tolerance)
        length = length + new
    for a, b in zip(reference.layers, by_triton.layers):
        assert torch.allclose(a.keys[:, :, :length], b.keys[:, :, :length], atol=tolerance)
        assert torch.allclose(a.values[:, :, :length], b.values[:, :, :length], atol=tolerance)


@torch.inference_mode()
def test_triton_forward_ignores_the_cache_beyond_the_text() -> None:
    """Rejected draft tokens and padding leave arbitrary values there."""
    model = llama(32, 2, torch.float32)
    cache, ids = initialised_cache(model), torch.arange(6)
    with triton_forward(model, MAX_LENGTH):
        expected = forward(model, cache, torch.tensor(0), ids)
        for layer in cache.layers:
            layer.keys[:, :, 2:], layer.values[:, :, 2:] = torch.nan, torch.nan
        assert torch.allclose(forward(model, cache, torch.tensor(2), ids[2:]), expected[2:], atol=1e-5)


@pytest.mark.parametrize(("size", "kv_heads", "dtype"), [(32, 2, torch.float32), (64, 4, torch.float16)])
@torch.inference_mode()
def test_exact_triton_forward_gives_the_same_bits_for_every_cut(
    size: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards are padded to one number of tokens; the text is longer than two tiles of keys."""
    # As on tensor cores, and unlike in numpy, a row's products must not depend on where in its tile it is.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, None] * b.T[None]).sum(-1, dtype=dtype))
    model, padded = llama(size, kv_heads, dtype), 16
    text = torch.randint(VOCAB_SIZE, (140,))

    def logits(cut: list[int]) -> Tensor:
        cache, rows, length = initialised_cache(model), list[Tensor](), 0
        with triton_forward(model, MAX_LENGTH, exact=True):
            for new in cut:
                ids = torch.nn.functional.pad(text[length : length + new], (0, padded - new))
                rows.append(forward(model, cache, torch.tensor(length), ids)[:new])
                length += new
        return torch.cat(rows)

    expected = logits([16] * 8 + [12])
    for cut in ([1] * 3 + [16] * 8 + [9], [11, 16] * 5 + [5]):
        assert torch.equal(logits(cut), expected)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    whole = forward(model, initialised_cache(model), torch.tensor(0), text)
    assert torch.allclose(expected, whole, atol=tolerance * float(whole.abs().max()))


@torch.inference_mode()
def test_triton_forward_restores_the_model() -> None:
    model = llama(32, 2, torch.float32)
    module = sys.modules[type(model).__module__]
    forwards, mask = [submodule.forward for submodule in model.modules()], module.create_causal_mask
    before = forward(model, initialised_cache(model), torch.tensor(0), torch.arange(5))
    with triton_forward(model, MAX_LENGTH):
        assert [submodule.forward for submodule in model.modules()] != forwards
    assert [submodule.forward for submodule in model.modules()] == forwards
    assert module.create_causal_mask is mask
    assert torch.equal(forward(model, initialised_cache(model), torch.tensor(0), torch.arange(5)), before)
