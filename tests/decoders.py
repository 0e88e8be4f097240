"""Small decoders of several architectures, with random weights."""

from collections.abc import Callable
from typing import Any

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

VOCAB_SIZE = 97
MAX_LENGTH = 64


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=MAX_LENGTH, vocab_size=VOCAB_SIZE))


def bigcode() -> Any:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": MAX_LENGTH, "vocab_size": VOCAB_SIZE}
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**shape))


def mistral(window: int) -> Any:
    return grouped(MistralForCausalLM, MistralConfig, sliding_window=window)


def grouped(kind: Any, config: Any, **options: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH, "vocab_size": VOCAB_SIZE}
    return kind(config(**shape, **options))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: grouped(LlamaForCausalLM, LlamaConfig),
    "gpt2": gpt2,
    "bigcode": bigcode,
    "window": lambda: mistral(8),
    "wide window": lambda: mistral(2 * MAX_LENGTH),
    "phi3": lambda: grouped(Phi3ForCausalLM, Phi3Config, pad_token_id=0, original_max_position_embeddings=MAX_LENGTH),
}
