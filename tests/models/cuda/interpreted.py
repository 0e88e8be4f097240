"""The Triton kernels in the interpreter: run by `test_triton_kernels.py` with TRITON_INTERPRET=1."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from dsi.core.messages import Sampling
from dsi.models.cuda import graphs, token_sampling
from dsi.models.cuda.decoder_triton import GELU, linear_by_torch, supports_triton, triton_forward
from dsi.models.cuda.graphs import static_cache
from dsi.models.cuda.linear import GATED, Tiling, linear
from dsi.models.cuda.packed_rows import num_parts
from dsi.models.cuda.triton_kernels import attend, split_counts
from dsi.models.protocol import ForwardRequest
from dsi.sampling.logits import sample, sample_rows
from dsi.sampling.noise import exponential, noise_key

MAX_LENGTH, VOCAB_SIZE = 160, 97
FLOAT, HALF = torch.float32, torch.float16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}  # of the second layer alone
PHI3 = {"pad_token_id": 0, "original_max_position_embeddings": MAX_LENGTH, "sliding_window": None}
BIGCODE = {"n_inner": 100, "activation_function": "gelu"}
SHAPES: dict[str, tuple[Any, Any, dict[str, Any], torch.dtype]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}, FLOAT),
    "llama half": (hf.LlamaForCausalLM, hf.LlamaConfig, {"head_dim": 64, "num_key_value_heads": 4}, HALF),
    "llama tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True}, FLOAT),
    "llama biases": (hf.LlamaForCausalLM, hf.LlamaConfig, BIASES, FLOAT),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 70}, FLOAT),
    "mistral half": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 5}, HALF),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, WINDOW, FLOAT),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}, FLOAT),
    "qwen3 half": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"tie_word_embeddings": True}, HALF),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**PHI3, "hidden_size": 128}, FLOAT),
    "phi3 window": (hf.Phi3ForCausalLM, hf.Phi3Config, {**PHI3, "hidden_size": 384, "sliding_window": 21}, FLOAT),
    "bigcode": (hf.GPTBigCodeForCausalLM, hf.GPTBigCodeConfig, {**BIGCODE, "hidden_size": 128}, FLOAT),
    "bigcode half": (hf.GPTBigCodeForCausalLM, hf.GPTBigCodeConfig, {"hidden_size": 128}, HALF),
}
OF_OTHERS = {"phi3": ("head_dim",), "gpt_bigcode": ("head_dim", "num_key_value_heads", "intermediate_size")}


def random_model(shape: str) -> Any:
    """A small model whose norms and biases have random values, too."""
    model_class, config_class, own, dtype = SHAPES[shape]
    sizes = {name: size for name, size in SIZES.items() if name not in OF_OTHERS.get(config_class.model_type, ())}
    torch.manual_seed(0)
    model = model_class(config_class(**sizes | own)).to(dtype).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    assert supports_triton(model)
    return model


def tolerance(model: Any) -> float:
    return 1e-5 if model.dtype == FLOAT else 2e-2


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


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_triton_forward_keeps_logits_and_cache(shape: str) -> None:
    """Over forwards of many widths: 70 new tokens are more than one tile."""
    model = random_model(shape)
    reference, by_triton, length = initialised_cache(model), initialised_cache(model), torch.tensor(0)
    for new in (3, 1, 8, 1, 70, 2):
        ids = torch.randint(VOCAB_SIZE, (new,))
        expected = forward(model, reference, length, ids)
        with triton_forward(model, MAX_LENGTH):
            actual = forward(model, by_triton, length, ids)
        assert torch.allclose(expected, actual, atol=tolerance(model))
        length = length + new
    for a, b in zip(reference.layers, by_triton.layers):
        assert torch.allclose(a.keys[:, :, :length], b.keys[:, :, :length], atol=tolerance(model))
        assert torch.allclose(a.values[:, :, :length], b.values[:, :, :length], atol=tolerance(model))


@torch.inference_mode()
def test_triton_forward_ignores_the_cache_beyond_the_text() -> None:
    """Rejected draft tokens and padding leave arbitrary values there."""
    model = random_model("mistral")
    cache, ids = initialised_cache(model), torch.arange(6)
    with triton_forward(model, MAX_LENGTH):
        expected = forward(model, cache, torch.tensor(0), ids)
        for layer in cache.layers:
            layer.keys[:, :, 2:], layer.values[:, :, 2:] = torch.nan, torch.nan
        assert torch.allclose(forward(model, cache, torch.tensor(2), ids[2:]), expected[2:], atol=1e-5)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in ("llama tied", "bigcode half")])
@torch.inference_mode()
def test_triton_forward_gives_the_same_bits_for_every_cut(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is longer than two tiles of keys. In float32 linear layers are torch's, so forwards are padded."""
    # As on tensor cores, and unlike in numpy, a row's products must not depend on where in its tile it is.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, None] * b.T[None]).sum(-1, dtype=dtype))
    model = random_model(shape)
    text = torch.randint(VOCAB_SIZE, (140,))

    def logits(cut: list[int]) -> Tensor:
        cache, rows, length = initialised_cache(model), list[Tensor](), 0
        with triton_forward(model, MAX_LENGTH):
            for new in cut:
                padding = 16 - new if model.dtype == FLOAT else 0
                ids = torch.nn.functional.pad(text[length : length + new], (0, padding))
                rows.append(forward(model, cache, torch.tensor(length), ids)[:new])
                length += new
        return torch.cat(rows)

    expected = logits([16] * 8 + [12])
    for cut in ([1] * 3 + [16] * 8 + [9], [11, 16] * 5 + [5]):
        assert torch.equal(logits(cut), expected)
    whole = forward(model, initialised_cache(model), torch.tensor(0), text)
    assert torch.allclose(expected, whole, atol=10 * tolerance(model) * float(whole.abs().max()))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("new", [1, 3, 30])
@torch.inference_mode()
def test_attend_gives_the_same_bits_for_any_number_of_splits(new: int, window: int) -> None:
    """With more programs than tiles of keys, fewer, and one."""
    heads, kv_heads, size, cached = 4, 2, 32, 100
    qkv, table = torch.randn(new, (heads + 2 * kv_heads) * size, dtype=HALF), torch.randn(MAX_LENGTH, size, dtype=HALF)
    keys, values = torch.randn(2, 1, kv_heads, MAX_LENGTH, size, dtype=HALF)

    def attention(splits: int) -> Tensor:
        arrivals = torch.zeros(kv_heads, num_parts(new, heads // kv_heads), splits, dtype=torch.int32)
        cache = keys.clone(), values.clone(), torch.tensor(cached)
        return attend(qkv, table, table, *cache, scale=0.2, window=window, arrivals=arrivals)

    assert torch.equal(attention(2), attention(1))
    assert torch.equal(attention(5), attention(1))


def test_split_counts_fill_the_processors_with_programs() -> None:
    assert split_counts(new=1, heads=32, kv_heads=4, capacity=4096, sms=132) == (4, 1, 64)
    assert split_counts(new=1, heads=32, kv_heads=32, capacity=256, sms=132) == (32, 1, 4)
    assert split_counts(new=128, heads=32, kv_heads=32, capacity=4096, sms=132) == (32, 8, 1)
    assert split_counts(new=1, heads=32, kv_heads=32, capacity=4096, sms=8) == (32, 1, 1)


TILINGS = {
    "by rows": Tiling(16, 32, 64, 3),
    "by outputs": Tiling(32, 64, 32, 4, swapped=True),
    "bulk copies": Tiling(16, 64, 64, 3, swapped=True, bulk=True),
}


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("activation", ["", GATED, *GELU])
@torch.inference_mode()
def test_linear_agrees_with_torch(activation: str, tiling: str) -> None:
    """Of numbers of rows, inputs and outputs that fill no tile."""
    outputs = 176 if activation == GATED else 88
    x, weight, bias = (torch.randn(shape, dtype=HALF) for shape in ((19, 72), (outputs, 72), (outputs,)))
    actual = linear(x, weight / 4, bias, activation=activation, tiling=TILINGS[tiling])
    expected = linear_by_torch(x.float(), weight.float() / 4, bias.float(), activation=activation)
    assert torch.allclose(actual.float(), expected, atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def test_linear_adds_to_the_residual_in_place() -> None:
    x, weight, bias, residual = (torch.randn(shape, dtype=HALF) for shape in ((3, 72), (88, 72), (88,), (3, 88)))
    expected = residual.float() + torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert linear(x, weight, bias, residual, tiling=TILINGS["by rows"]) is residual
    assert torch.allclose(residual.float(), expected, atol=2e-2)


@torch.inference_mode()
def test_triton_forward_restores_the_model() -> None:
    model = random_model("mistral")
    module = sys.modules[type(model).__module__]
    forwards = [submodule.forward for submodule in model.modules()]
    masks = module.create_causal_mask, module.create_sliding_window_causal_mask
    before = forward(model, initialised_cache(model), torch.tensor(0), torch.arange(5))
    with triton_forward(model, MAX_LENGTH):
        assert [submodule.forward for submodule in model.modules()] != forwards
    assert [submodule.forward for submodule in model.modules()] == forwards
    assert (module.create_causal_mask, module.create_sliding_window_causal_mask) == masks
    assert torch.equal(forward(model, initialised_cache(model), torch.tensor(0), torch.arange(5)), before)


LENGTH = 17  # of the text before rows that are sampled


def sampled(logits: Tensor, sampling: Sampling) -> tuple[list[int], list[int]]:
    """The tokens after these rows, and what is marked of them."""
    settings = token_sampling.settings_of(sampling) if sampling.temperature else (0, 0)
    tokens, marked = (torch.zeros(len(logits), dtype=torch.int64) for _ in range(2))
    token_sampling.sample_tokens(logits, torch.tensor([LENGTH, *settings]), tokens, marked)
    return tokens.tolist(), marked.tolist()


@pytest.mark.parametrize("vocab", [5, 97, 40_000])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8, 3.0])
def test_sample_tokens_are_those_of_the_host(vocab: int, dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab).to(dtype) * 4
    logits[0, 3] = logits[0, 1] = logits[0].max()  # the first of equals
    logits[1, 2:] = -torch.inf
    sampling = Sampling(temperature, seed=2**63 + vocab)
    expected = list(sample_rows(logits.float(), sampling, LENGTH + 1))
    assert sampled(logits, sampling) == (expected, expected)


def test_sample_tokens_marks_rows_that_only_exact_arithmetic_decides() -> None:
    sampling, near, far = Sampling(1.0, seed=3), torch.full((1, 9), -torch.inf), 1e-4
    e = exponential(noise_key(sampling.seed, LENGTH + 1), torch.tensor([2, 7]))
    near[0, 2], near[0, 7] = 0.0, float((e[1] / e[0]).log())
    [token], [marked] = sampled(near.double(), sampling)
    assert (token in (2, 7), marked) == (True, -1 - token)
    near[0, 7] += far
    assert sampled(near.double(), sampling) == ([7], [7])
    near[0, 7] = torch.nan
    assert sampled(near.double(), sampling)[1] == [-3]
    assert sampled(near.double(), Sampling())[1] == [2]
    near[0, 7] = torch.inf
    assert sampled(near.double(), sampling)[1] == [-8]


def test_sample_texts_are_those_of_the_host_whatever_their_settings() -> None:
    torch.manual_seed(1)
    samplings = [Sampling(0.7, seed=5), Sampling(1.0, top_k=3, seed=6), Sampling(1.5, seed=7), Sampling(0.7, seed=8)]
    logits, positions = [torch.randn(rows, 97) for rows in (2, 1, 3, 0)], [(4, 5), (9,), (30, 8, 2), ()]
    expected = [
        tuple(sample(row, sampling, position) for row, position in zip(rows, own))
        for rows, sampling, own in zip(logits, samplings, positions)
    ]
    assert token_sampling.sample_texts(logits, samplings, positions) == expected
    logits[0][1] = torch.nan
    with pytest.raises(ValueError, match="not numbers"):
        token_sampling.sample_texts(logits, samplings, positions)


def marks_all(logits: Tensor, settings: Tensor, tokens: Tensor, marked: Tensor) -> None:
    """As if no row could be decided on the device."""
    token_sampling.sample_tokens(logits, settings, tokens, marked)
    marked.copy_(-1 - tokens)


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(0.9, seed=4), Sampling(0.9, top_k=5, seed=4)])
def test_cuda_graph_model_that_samples_gives_the_text_of_one_that_does_not(
    sampling: Sampling, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, models = random_model("llama"), [1, 5, 9, 2, 7], []
    for sampler in (None, token_sampling):
        monkeypatch.setattr(graphs, "token_sampler", lambda _, sampler=sampler: sampler)
        models.append(graphs.CudaGraphModel(model, MAX_LENGTH, sizes=(1, 8)))
    if marks:
        own = {name: getattr(token_sampling, name) for name in ("samples", "settings_of")}
        models[1]._sampler = SimpleNamespace(sample_tokens=marks_all, **own)
    for start, request in ((1, text), (4, text), (6, [*text, 3])):
        expected, tokens = (model.answer(ForwardRequest(request, start, sampling=sampling)) for model in models)
        assert tokens == expected
    drafts = [
        [token for token in model.poll_draft(ForwardRequest(text, 5, sampling=sampling), 6) if token is not None]
        for model in models
    ]
    assert drafts[0] == drafts[1]
