"""The patches that are active while a forward is captured give the same logits."""

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

from decoders import MAX_LENGTH, MODELS, VOCAB_SIZE
from dsi.models.cuda import fused_ops
from dsi.models.cuda.fused_ops import GROUPED, SDPA, fuse_rotary, is_rms_norm, rotates_halves


def two_forwards(model: Any, tokens: list[int]) -> Tensor:
    """The logits of two consecutive forwards, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=MAX_LENGTH)
    logits = []
    with torch.inference_mode():
        for part in (tokens[:5], tokens[5:]):
            logits.append(model(torch.tensor([part]), past_key_values=cache).logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_fused_forward_keeps_logits_and_restores_the_model(name: str) -> None:
    torch.manual_seed(4)
    model = MODELS[name]().eval()
    tokens = torch.randint(VOCAB_SIZE, (13,)).tolist()
    before, module = two_forwards(model, tokens), sys.modules[type(model).__module__]
    rotary, forwards = getattr(module, fused_ops.APPLY_ROTARY, None), [part.forward for part in model.modules()]
    with fused_ops.fused_forward(model):
        during = two_forwards(model, tokens)
        assert model.config._attn_implementation == GROUPED
    assert torch.allclose(before, during, atol=1e-5)
    assert model.config._attn_implementation == SDPA
    assert getattr(module, fused_ops.APPLY_ROTARY, None) is rotary
    assert [part.forward for part in model.modules()] == forwards
    assert torch.equal(two_forwards(model, tokens), before)


def test_attend_groups_queries_without_copying_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = MODELS["llama"]().eval(), []
    plain = functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((query.shape[1:3], key.shape[1]))
        return plain(query, key, *rest, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    with fused_ops.fused_forward(model):
        two_forwards(model, [1, 2, 3, 4, 5, 6, 7, 8])
    assert seen[-1] == ((2, 6), 2)  # 4 heads and 3 tokens, 2 heads of keys: none is copied


def test_attend_leaves_other_arguments_to_transformers() -> None:
    module = MODELS["llama"]().model.layers[0].self_attn
    query, key = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 6, 8)
    mask, bias = torch.ones(1, 1, 3, 6, dtype=torch.bool), torch.rand(1, 4, 3, 6)
    default, _ = fused_ops.attend(module, query, key, key, mask)
    biased, _ = fused_ops.attend(module, query, key, key, mask, position_bias=bias)
    assert default.shape == biased.shape
    assert not torch.allclose(default, biased)


def test_rotates_halves_detects_other_rotations() -> None:
    assert rotates_halves(modeling_llama.apply_rotary_pos_emb)
    assert not rotates_halves(modeling_cohere.apply_rotary_pos_emb)  # neighbouring elements
    assert not rotates_halves(lambda q, k: (q, k))


def test_fuse_rotary_leaves_partial_rotations_to_the_model() -> None:
    q, k, cos = torch.rand(1, 4, 3, 8), torch.rand(1, 2, 3, 8), torch.rand(1, 3, 4)
    assert fuse_rotary(lambda q, k, *_: (k, q))(q, k, cos, cos) == (k, q)


def test_is_rms_norm_detects_other_norms() -> None:
    """Gemma adds one to its weights."""
    config = GemmaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.num_key_value_heads, config.vocab_size, config.head_dim = 1, 9, 8
    assert not is_rms_norm(GemmaForCausalLM(config).model.norm)
    assert is_rms_norm(MODELS["llama"]().model.norm)


@pytest.mark.parametrize("config", [Olmo2Config, DiffLlamaConfig, DogeConfig])
def test_fused_forward_keeps_logits_of_unusual_models_in_bfloat16(config: Any) -> None:
    """Sines of another dtype; norms without weights; a mask for each head."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH, "vocab_size": VOCAB_SIZE}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config(**shape, pad_token_id=0), dtype=torch.bfloat16).eval()
    tokens = torch.randint(VOCAB_SIZE, (13,)).tolist()
    before = two_forwards(model, tokens)
    with fused_ops.fused_forward(model):
        assert torch.allclose(two_forwards(model, tokens), before, atol=0.05)
