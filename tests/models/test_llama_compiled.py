"""The compiled Llama: the logits of transformers, and the same bits whatever the number of tokens in a forward."""

import sys
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.engine.build import cpu_model
from dsi.models.llama_compiled import LlamaCompiled
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.protocol import Cancelled

pytest.importorskip("numba")

SHAPE = {"hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 101, "head_dim": 32}
TOKENS = [int(token) for token in np.random.RandomState(0).randint(1, 101, 70)]


def make_model(dtype: torch.dtype = torch.float32, heads: int = 3, kv_heads: int = 3, **shape: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = SHAPE | shape
    config = LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=128)
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(params=[(torch.float32, 3, 3), (torch.float32, 4, 2), (torch.bfloat16, 6, 2)], ids=str)
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return make_model(*request.param)


def test_compiled_llama_gives_the_logits_of_transformers(model: LlamaForCausalLM) -> None:
    compiled = cpu_model(model)
    assert isinstance(compiled, LlamaCompiled)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].float()
    exact = model.dtype == torch.float32
    torch.testing.assert_close(compiled.forward(TOKENS, 1), expected, rtol=0, atol=2e-6 if exact else 2e-2)


def test_compiled_llama_gives_the_same_bits_for_every_width(model: LlamaForCausalLM) -> None:
    compiled = LlamaCompiled(model)
    whole = compiled.forward(TOKENS, 1)
    for widths in ([1] * 70, [7, 3, 20, 1, 1, 2, 36], [2] * 35, [5] * 14, [9] * 7 + [7]):
        compiled.clear_cache()
        ends = [0, *accumulate(widths)]
        parts = [compiled.forward(TOKENS[:end], start + 1) for start, end in pairwise(ends)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("threads", [2, 3])
def test_compiled_llama_gives_the_same_bits_on_several_threads(model: LlamaForCausalLM, threads: int) -> None:
    compiled = LlamaCompiled(model)
    whole = compiled.forward(TOKENS, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for end in (64, 65, 70):
            compiled.clear_cache() if end == 64 else None
            assert torch.equal(compiled.forward(TOKENS[:end], 60), whole[59:end])
    finally:
        torch.set_num_threads(before)


def test_compiled_llama_returns_to_an_earlier_token() -> None:
    compiled = LlamaCompiled(make_model())
    whole = compiled.forward(TOKENS, 1)
    compiled.forward([*TOKENS[:40], 5, 6, 7], 41)
    assert torch.equal(compiled.forward(TOKENS, 41), whole[40:])


def test_compiled_llama_shares_its_weights_with_the_model() -> None:
    model = make_model()
    compiled = LlamaCompiled(model)
    before = compiled.forward(TOKENS, 70)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    compiled.clear_cache()
    assert not torch.equal(compiled.forward(TOKENS, 70), before)


def test_compiled_llama_stops_between_layers() -> None:
    class Second:
        checks = 0

        def is_set(self) -> bool:
            self.checks += 1
            return self.checks > 1

        def wait(self, timeout: float) -> bool:
            raise NotImplementedError(timeout)

    compiled = LlamaCompiled(make_model())
    whole = compiled.forward(TOKENS, 1)
    compiled.clear_cache()
    with pytest.raises(Cancelled):
        compiled.forward(TOKENS, 1, Second())
    assert torch.equal(compiled.forward(TOKENS, 1), whole)


@pytest.mark.parametrize("shape", [{"hidden_size": 90}, {"intermediate_size": 100}, {"head_dim": 16}])
def test_compiled_llama_leaves_odd_shapes_to_others(shape: Any) -> None:
    assert not LlamaCompiled.supports(make_model(**shape))


def test_cpu_model_does_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dsi.models.cpu_kernels", None)
    assert type(cpu_model(make_model())) is LlamaCpu
