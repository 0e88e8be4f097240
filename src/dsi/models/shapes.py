"""Models of the paper's architectures, and of others, with random weights: forwards take as long as trained ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# Model type, hidden size, MLP size, layers, attention heads, and KV heads where those are fewer.
SHAPES: dict[str, tuple[Any, ...]] = {
    "vicuna-13b": ("llama", 5120, 13824, 40, 40),
    "vicuna-7b": ("llama", 4096, 11008, 32, 32),
    "vicuna-68m": ("llama", 768, 3072, 2, 12),
    "llama-1.1b": ("llama", 2048, 5632, 22, 32, 4),
    "starcoder-15b": ("gpt_bigcode", 6144, 24576, 40, 48),
    "starcoder-168m": ("gpt_bigcode", 768, 3072, 20, 12),
    "phi3-14b": ("phi3", 5120, 17920, 40, 40, 10),
    "phi3-4b": ("phi3", 3072, 8192, 32, 32),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8),
    "qwen2-7b": ("qwen2", 3584, 18944, 28, 28, 4),
    "qwen2-0.5b": ("qwen2", 896, 4864, 24, 14, 2),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8),
}
TIED = ("qwen2-0.5b",)  # whose head is the embedding
VOCAB_SIZES = {"llama": 32000, "gpt_bigcode": 49152, "phi3": 32064, "mistral": 32000, "qwen2": 152064, "qwen3": 151936}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def config(name: str, max_positions: int = 2048) -> Any:
    """Return the transformers configuration of a shape with the given context length."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r}: must be one of {', '.join(SHAPES)}")
    kind, *sizes = SHAPES[name]
    fields = dict(zip(SIZES, sizes), max_position_embeddings=max_positions)
    if kind == "gpt_bigcode":  # which has the standard names as aliases, but for this one
        fields["n_inner"] = fields.pop("intermediate_size")
    if kind == "phi3":
        fields |= {"pad_token_id": 0, "original_max_position_embeddings": max_positions}
    fields["tie_word_embeddings"] = name in TIED or kind == "gpt_bigcode"
    return AutoConfig.for_model(kind, vocab_size=VOCAB_SIZES[kind], **fields)


def random_model(name: str, dtype: str = "bfloat16", device: str = "cpu", max_positions: int = 2048) -> Any:
    """Create the model on the device itself, with transformers' default initialisation."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(name, max_positions), dtype=getattr(torch, dtype))
    return model.eval()
