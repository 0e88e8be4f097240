"""Models of the paper's architectures with random weights, whose forwards take as long as trained ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "vicuna-13b": {"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "layers": 40, "heads": 40},
    "vicuna-7b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "layers": 32, "heads": 32},
    "vicuna-68m": {"model_type": "llama", "hidden_size": 768, "intermediate_size": 3072, "layers": 2, "heads": 12},
    "llama-1.1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layers": 22,
        "heads": 32,
        "num_key_value_heads": 4,
    },
    "starcoder-15b": {"model_type": "gpt_bigcode", "n_embd": 6144, "n_inner": 24576, "layers": 40, "heads": 48},
    "starcoder-168m": {"model_type": "gpt_bigcode", "n_embd": 768, "n_inner": 3072, "layers": 20, "heads": 12},
    "phi3-14b": {
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "layers": 40,
        "heads": 40,
        "num_key_value_heads": 10,
    },
    "phi3-4b": {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "layers": 32, "heads": 32},
}
VOCAB_SIZES = {"llama": 32000, "gpt_bigcode": 49152, "phi3": 32064}
CONFIG_NAMES = {
    "gpt_bigcode": {"layers": "n_layer", "heads": "n_head", "max_positions": "n_positions"},
    "llama": {
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "max_positions": "max_position_embeddings",
    },
}


def config(name: str, max_positions: int = 2048) -> Any:
    """Return the transformers configuration of a shape with the given context length."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r}: must be one of {', '.join(SHAPES)}")
    shape = dict(SHAPES[name])
    kind = shape.pop("model_type")
    names = CONFIG_NAMES.get(kind, CONFIG_NAMES["llama"])
    fields = {names.get(key, key): value for key, value in (shape | {"max_positions": max_positions}).items()}
    if kind == "phi3":
        fields |= {"pad_token_id": 0, "original_max_position_embeddings": max_positions}
    return AutoConfig.for_model(kind, vocab_size=VOCAB_SIZES[kind], **fields)


def random_model(name: str, dtype: str = "bfloat16", device: str = "cpu", max_positions: int = 2048) -> Any:
    """Create the model on the device itself, with transformers' default initialisation."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(name, max_positions), dtype=getattr(torch, dtype))
    return model.eval()
