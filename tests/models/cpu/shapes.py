"""Small models with random weights of every architecture that the compiled decoder supports."""

from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "llama tied": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True, "head_dim": 32}),
    "llama biases": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"num_key_value_heads": 2, "sliding_window": 10}),
    "qwen2": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config,
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"num_key_value_heads": 1, "head_dim": 20}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {"num_key_value_heads": 2, "head_dim": 70, "sliding_window": 6, "layer_types": SLIDING},
    ),
}


def random_model(shape: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model whose norms and biases have random values, too."""
    model_class, config_class, own = SHAPES[shape]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 10
    return model.to(dtype)
