"""One model over several devices. There may be no two here, so the second is one that computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.device_map import split_layers, stretches
from dsi.models.hf import Transformer, decoder_layers
from dsi.models.protocol import ForwardRequest

SMALL = {"vocab_size": 97, "num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 4}
BIG = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0}
TEXT = [5, 17, 3, 88, 41]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BIG)),
    "tied words": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**BIG, num_key_value_heads=2, tie_word_embeddings=True)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_layer=4, n_head=4, n_embd=32)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BIG)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().float().eval()


@pytest.mark.parametrize(
    ("sizes", "around", "count", "found"),
    [
        ([10] * 4, 0, 2, [0, 0, 1, 1]),
        ([10] * 4, 20, 2, [0, 1, 1, 1]),  # what is around the layers counts
        ([10] * 4, 100, 2, [1, 1, 1, 1]),
        ([10] * 7, 4, 3, [0, 0, 1, 1, 1, 2, 2]),
        ([10] * 3, 5, 3, [0, 1, 2]),
        ([30, 10, 10, 10], 0, 2, [0, 1, 1, 1]),
    ],
)
def test_each_device_has_its_share(sizes: list[int], around: int, count: int, found: list[int]) -> None:
    assert stretches(sizes, around, count) == found


@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_reads_is_where_the_layer_is(name: str) -> None:
    model = split_layers(made(name), ["cpu", "meta"])
    deep = list(decoder_layers(model))
    held = [{weight.device.type for weight in layer.parameters()} for layer in deep]
    assert held[0] == {"cpu"}
    assert held[-1] == {"meta"}
    inside = {id(weight) for layer in deep for weight in layer.parameters()}
    assert {weight.device.type for weight in model.parameters() if id(weight) not in inside} == {"cpu"}
    read: list[set[str]] = []
    for layer in deep:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: read.append({each.device.type for each in tensors((args, kwargs))}),
            with_kwargs=True,
        )
    with pytest.raises(NotImplementedError, match="out of meta"):  # what it computes does not come home
        model(input_ids=torch.tensor([TEXT]), use_cache=True)
    assert read == held


def tensors(what: Any) -> list[torch.Tensor]:
    if isinstance(what, torch.Tensor):
        return [what]
    parts = what.values() if isinstance(what, dict) else what if isinstance(what, tuple | list) else ()
    return [each for part in parts for each in tensors(part)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_are_those_of_the_model_on_one_device(name: str, count: int) -> None:
    whole, apart = Transformer(made(name)), Transformer(split_layers(made(name), ["cpu"] * count))
    for text in (TEXT, [*TEXT, 9, 12], [*TEXT[:2], 7]):
        torch.testing.assert_close(apart.forward(text, 2), whole.forward(text, 2))


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_the_rows_are_the_same_over_real_devices(devices: tuple[str, ...]) -> None:
    if any(device.startswith("cuda") and int(device[5:]) >= torch.cuda.device_count() for device in devices):
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs here")
    whole, model = Transformer(made("llama")), split_layers(made("llama"), devices)
    apart, static = Transformer(model), CudaGraphModel(model, 64)
    for text in (TEXT, [*TEXT, 9, 12], [*TEXT[:2], 7]):
        expected = whole.forward(text, 2)
        torch.testing.assert_close(apart.forward(text, 2).cpu(), expected, atol=1e-4, rtol=1e-4)
        assert static.answer(ForwardRequest(text, 2)) == tuple(expected.argmax(-1).tolist())


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cpu\+.*: are 5 devices, and the model has 4 layers to share$"):
        split_layers(made("llama"), ["cpu"] * 5)


def test_forwards_over_several_devices_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphModel, "_take_cache", lambda *_: None)
    model = split_layers(made("llama"), ["cpu", "meta"])
    assert CudaGraphModel(model, 64).eager_reason == "forwards on cpu and meta are not recorded"
