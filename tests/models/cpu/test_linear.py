"""Compiled linear layers, alone and inside any transformers model."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from dsi.engine.build import cpu_model
from dsi.engine.profile_linear import kept_max_rows
from dsi.models.cpu.linear import CompiledLinear, Int8Linear, quantize_int8
from dsi.models.cpu.transformer import CompiledTransformer, compilable_layers, measure_max_rows, shape_of
from dsi.models.hf import Transformer
from models.cpu.shapes import random_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def linear(dtype: torch.dtype = torch.float32, bias: bool = True, sizes: tuple[int, int] = (70, 37)) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*sizes, bias=bias).to(dtype)


def gpt_neox(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.GPTNeoXConfig(**{**sizes, "intermediate_size": 64, "max_position_embeddings": 64, **changes})
    return hf.GPTNeoXForCausalLM(config).eval()


@pytest.mark.parametrize("sizes", [(70, 37), (16, 1), (3, 5), (64, 64)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_compiled_linear_gives_the_products_of_torch(sizes: tuple[int, int], bias: bool) -> None:
    layer, x = linear(bias=bias, sizes=sizes), torch.randn(2, 13, sizes[0])
    torch.testing.assert_close(CompiledLinear(layer)(x), layer(x), rtol=1e-5, atol=1e-5)


ROW_CASES = [linear(), linear(torch.bfloat16), Int8Linear(linear(torch.bfloat16)), linear(sizes=(600, 70))]


@pytest.mark.parametrize("layer", ROW_CASES, ids=["float32", "bfloat16", "int8", "wide"])
@torch.inference_mode()
def test_compiled_linear_gives_the_same_bits_for_every_number_of_rows(layer: Any) -> None:
    compiled = CompiledLinear(layer)
    dtype = torch.float32 if layer.weight.dtype == torch.float32 else torch.bfloat16
    x = torch.randn(200, layer.in_features).to(dtype)
    whole = compiled(x)
    for rows in (*range(1, 33), 64, 65, 127):
        assert torch.equal(compiled(x[50 : 50 + rows]), whole[50 : 50 + rows])


@torch.inference_mode()
def test_int8_linear_is_close_to_its_weights_and_compiled_the_same() -> None:
    layer, x = linear(torch.bfloat16), torch.randn(9, 70).bfloat16()
    quantized = Int8Linear(layer)
    largest = float(layer(x).abs().max())
    torch.testing.assert_close(quantized(x), layer(x), rtol=0, atol=0.02 * largest)
    torch.testing.assert_close(CompiledLinear(quantized)(x), quantized(x), rtol=0, atol=0.01 * largest)
    assert quantized.weight.dtype == torch.int8


def test_quantize_int8_replaces_linear_layers_and_leaves_embeddings() -> None:
    model = quantize_int8(random_model("llama tied", torch.bfloat16))
    kinds = {type(module) for module in model.modules() if hasattr(module, "weight")}
    assert kinds >= {Int8Linear, nn.Embedding}
    assert nn.Linear not in kinds
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_transformer_gives_the_logits_of_transformers(dtype: torch.dtype) -> None:
    plain, compiled = Transformer(gpt_neox().to(dtype)), cpu_model(gpt_neox().to(dtype))
    assert isinstance(compiled, CompiledTransformer)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for tokens, start in ((TOKENS, 1), ([*TOKENS[:5], 7, 7], 6)):
        expected = plain.forward(tokens, start)
        torch.testing.assert_close(compiled.forward(tokens, start), expected, rtol=0, atol=tolerance)


def test_compiled_transformer_computes_many_rows_and_gradients_as_before() -> None:
    model = gpt_neox()
    limits = {shape_of(layer): 4.0 for layer in compilable_layers(model)}
    compiled = CompiledTransformer(model, max_rows=limits)
    assert torch.equal(compiled.forward(TOKENS, 1), Transformer(gpt_neox()).forward(TOKENS, 1))
    model(torch.tensor([TOKENS[:3]])).logits.sum().backward()
    assert model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.grad is not None


def test_compiled_transformer_gives_the_model_back() -> None:
    model = gpt_neox()
    compiled = CompiledTransformer(model)
    assert not any(True for _ in compilable_layers(model))  # they are swapped already
    compiled.release()
    assert {type(module) for module in model.modules() if hasattr(module, "in_features")} == {nn.Linear}


def test_compiled_transformer_computes_with_weights_that_were_moved_or_copied() -> None:
    model = gpt_neox()
    compiled = CompiledTransformer(model)
    before = compiled.forward(TOKENS, 1)
    other = copy.deepcopy(model)
    for changed in (model, other):
        changed.get_output_embeddings().weight.data = 2 * changed.get_output_embeddings().weight.data
    compiled.clear_cache()
    torch.testing.assert_close(compiled.forward(TOKENS, 1), 2 * before)
    with torch.inference_mode():
        torch.testing.assert_close(other(torch.tensor([TOKENS])).logits[0], 2 * before)


def test_max_rows_are_measured_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt_neox(hidden_size=48)
    measured = kept_max_rows(model)
    assert set(measured) == {shape_of(layer) for layer in compilable_layers(model)}
    assert all(rows >= 0 for rows in measured.values())
    monkeypatch.setattr("dsi.engine.profile_linear.measure_max_rows", None)
    assert kept_max_rows(model) == measured


def test_max_rows_of_slow_kernels_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2.0, 1.0])  # compiled, torch
    monkeypatch.setattr("dsi.models.cpu.transformer.seconds", lambda *_: next(times))
    assert measure_max_rows([linear()]) == 0
