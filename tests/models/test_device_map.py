"""One model over several devices. There may be no two here, so the second is one that computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.device_map import assign_layers, split_layers
from dsi.models.hf import Transformer, decoder_layers
from dsi.models.protocol import ForwardRequest

SMALL = {"vocab_size": 97, "num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 4}
BIG = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0}
TEXT = [5, 17, 3, 88, 41]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BIG)),
    "tied embeddings": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**BIG, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_layer=4, n_head=4, n_embd=32)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BIG)),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().float().eval()


@pytest.mark.parametrize(
    ("sizes", "outside", "count", "expected"),
    [
        ([10] * 4, 0, 2, [0, 0, 1, 1]),
        ([10] * 4, 20, 2, [0, 1, 1, 1]),  # weights outside the layers count
        ([10] * 4, 100, 2, [1, 1, 1, 1]),
        ([10] * 7, 4, 3, [0, 0, 1, 1, 1, 2, 2]),
        ([10] * 3, 5, 3, [0, 1, 2]),
        ([30, 10, 10, 10], 0, 2, [0, 1, 1, 1]),
    ],
)
def test_assign_layers_balances_bytes(sizes: list[int], outside: int, count: int, expected: list[int]) -> None:
    assert assign_layers(sizes, outside, count) == expected


@pytest.mark.parametrize("name", MODELS)
def test_split_layers_moves_inputs_to_each_layer(name: str) -> None:
    model = split_layers(make(name), ["cpu", "meta"])
    layers = list(decoder_layers(model))
    placed = [{weight.device.type for weight in layer.parameters()} for layer in layers]
    assert placed[0] == {"cpu"}
    assert placed[-1] == {"meta"}
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    assert {weight.device.type for weight in model.parameters() if id(weight) not in inside} == {"cpu"}
    inputs: list[set[str]] = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append({tensor.device.type for tensor in tensors((args, kwargs))}),
            with_kwargs=True,
        )
    with pytest.raises(NotImplementedError, match="out of meta"):  # the last output cannot be moved back
        model(input_ids=torch.tensor([TEXT]), use_cache=True)
    assert inputs == placed


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors(item)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_split_layers_keeps_the_logits(name: str, count: int) -> None:
    whole, split = Transformer(make(name)), Transformer(split_layers(make(name), ["cpu"] * count))
    for text in (TEXT, [*TEXT, 9, 12], [*TEXT[:2], 7]):
        torch.testing.assert_close(split.forward(text, 2), whole.forward(text, 2))


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_split_layers_keeps_the_logits_on_real_devices(devices: tuple[str, ...]) -> None:
    if any(device.startswith("cuda") and int(device[5:]) >= torch.cuda.device_count() for device in devices):
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs here")
    whole, model = Transformer(make("llama")), split_layers(make("llama"), devices)
    split, static = Transformer(model), CudaGraphModel(model, 64)
    for text in (TEXT, [*TEXT, 9, 12], [*TEXT[:2], 7]):
        expected = whole.forward(text, 2)
        torch.testing.assert_close(split.forward(text, 2).cpu(), expected, atol=1e-4, rtol=1e-4)
        assert static.answer(ForwardRequest(text, 2)) == tuple(expected.argmax(-1).tolist())


def test_split_layers_refuses_more_devices_than_layers() -> None:
    with pytest.raises(ValueError, match=r"^cpu\+.*: are 5 devices, and the model has 4 layers to share$"):
        split_layers(make("llama"), ["cpu"] * 5)


def test_cuda_graph_model_is_eager_over_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphModel, "_create_cache", lambda *_: None)
    model = split_layers(make("llama"), ["cpu", "meta"])
    assert CudaGraphModel(model, 64).eager_reason == "forwards on cpu and meta are not captured"
