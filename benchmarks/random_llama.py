"""Save a Llama of a real shape with random weights, and a drafter of one layer that often agrees with it.

Both have the built-in pair's tokenizer, and one embedding and head. What the target's layers add to the embedding is so
small that the next token is often the one that the embedding alone gives, which is what the drafter says: the smaller
`--depart`, the more often. So the pair can be served with real forwards and real acceptance, without a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from dsi.core.messages import DRAFTER, TARGET
from dsi.models.names import BUILTIN, model_path
from dsi.models.shapes import SHAPES, config

CONTEXT, DEPART = 1024, 0.1  # which gives an acceptance rate of 0.7 to 0.9
LAST = ("o_proj", "down_proj")  # whose outputs are added to the embedding
LLAMAS = tuple(name for name, (kind, *_) in SHAPES.items() if kind == "llama")


def random_llama(shape: str, layers: int | None, vocab: int, depart: float, device: str) -> Any:
    own = config(shape, CONTEXT)
    own.vocab_size, own.num_hidden_layers = vocab, layers or own.num_hidden_layers
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16)
        torch.nn.init.normal_(model.get_input_embeddings().weight)
    share = depart / (2 * own.num_hidden_layers) ** 0.5  # of each of the sums that layers add
    for name, linear in model.model.layers.named_modules():
        if isinstance(linear, torch.nn.Linear):
            scale = share if name.endswith(LAST) else 1.0
            torch.nn.init.normal_(linear.weight, std=scale / linear.in_features**0.5)
    return model


def save(folder: Path, shape: str, depart: float, device: str = "cpu", seed: int = 0) -> None:
    """Write the folders `target` and `drafter`."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(BUILTIN, TARGET))
    torch.manual_seed(seed)
    models = {
        TARGET: random_llama(shape, None, len(tokenizer), depart, device),
        DRAFTER: random_llama(shape, 1, len(tokenizer), depart, device),
    }
    for part in ("get_input_embeddings", "get_output_embeddings"):
        getattr(models[DRAFTER], part)().weight = getattr(models[TARGET], part)().weight
    for role, model in models.items():
        model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)


def main() -> None:
    parser = harness.arguments(__doc__, "/tmp/pair --shape llama-1.1b")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=LLAMAS, default="vicuna-7b")
    parser.add_argument("--depart", type=harness.share, default=DEPART, help=f"default: {DEPART}")
    parser.add_argument("--device", default="cpu", help="where the weights are made")
    options = parser.parse_args()
    save(options.folder, options.shape, options.depart, options.device)


if __name__ == "__main__":
    main()
