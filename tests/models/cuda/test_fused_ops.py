"""The same numbers in fewer kernels: what is swapped in while a forward is recorded."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Olmo2Config,
    StaticCache,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from decoders import MODELS, ROOM, WORDS
from dsi.models.cuda import fused_ops as fused
from dsi.models.cuda.fused_ops import NAME, PLAIN, is_plain_norm, together, turns_halves


def rows(model: Any, tokens: list[int]) -> Tensor:
    """Of two forwards, the second behind the first, with a cache that has room for more."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    found = []
    with torch.inference_mode():
        for part in (tokens[:5], tokens[5:]):
            found.append(model(torch.tensor([part]), past_key_values=cache).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_same_and_the_model_is_as_before(name: str) -> None:
    torch.manual_seed(4)
    model = MODELS[name]().eval()
    tokens = torch.randint(WORDS, (13,)).tolist()
    before, module = rows(model, tokens), sys.modules[type(model).__module__]
    turn, forwards = getattr(module, fused.ROTATION, None), [part.forward for part in model.modules()]
    with fused.fused(model):
        during = rows(model, tokens)
        assert model.config._attn_implementation == NAME
    assert torch.allclose(before, during, atol=1e-5)
    assert model.config._attn_implementation == PLAIN
    assert getattr(module, fused.ROTATION, None) is turn
    assert [part.forward for part in model.modules()] == forwards
    assert torch.equal(rows(model, tokens), before)


def test_queries_that_read_the_same_keys_are_rows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = MODELS["llama"]().eval(), []
    plain = functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((query.shape[1:3], key.shape[1]))
        return plain(query, key, *rest, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    with fused.fused(model):
        rows(model, [1, 2, 3, 4, 5, 6, 7, 8])
    assert seen[-1] == ((2, 6), 2)  # 4 heads and 3 tokens, 2 heads of keys: none is copied


def test_what_is_asked_for_besides_is_left_to_transformers() -> None:
    module = MODELS["llama"]().model.layers[0].self_attn
    query, key = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 6, 8)
    mask, bias = torch.ones(1, 1, 3, 6, dtype=torch.bool), torch.rand(1, 4, 3, 6)
    plainly, _ = fused.attend(module, query, key, key, mask)
    biased, _ = fused.attend(module, query, key, key, mask, position_bias=bias)
    assert plainly.shape == biased.shape
    assert not torch.allclose(plainly, biased)


def test_a_rotation_of_another_kind_stays() -> None:
    assert turns_halves(modeling_llama.apply_rotary_pos_emb)
    assert not turns_halves(modeling_cohere.apply_rotary_pos_emb)  # neighbours
    assert not turns_halves(lambda q, k: (q, k))


def test_a_rotation_of_part_of_a_head_is_left_to_the_model() -> None:
    q, k, cos = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 3, 8), torch.rand(1, 3, 4)
    assert together(lambda q, k, *_: (k, q))(q, k, cos, cos) == (k, q)


def test_a_norm_of_another_kind_stays() -> None:
    """Gemma adds one to its weights."""
    config = GemmaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.num_key_value_heads, config.vocab_size, config.head_dim = 1, 9, 8
    assert not is_plain_norm(GemmaForCausalLM(config).model.norm)
    assert is_plain_norm(MODELS["llama"]().model.norm)


@pytest.mark.parametrize("config", [Olmo2Config, DiffLlamaConfig, DogeConfig])
def test_models_with_ways_of_their_own_write_the_same_in_sixteen_bits(config: Any) -> None:
    """Sines in another format; norms without weights; a mask for each head."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": ROOM, "vocab_size": WORDS}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config(**shape, pad_token_id=0), dtype=torch.bfloat16).eval()
    tokens = torch.randint(WORDS, (13,)).tolist()
    before = rows(model, tokens)
    with fused.fused(model):
        assert torch.allclose(rows(model, tokens), before, atol=0.05)
