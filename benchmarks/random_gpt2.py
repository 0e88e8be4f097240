"""Save a GPT-2 with random weights of 30 million parameters and the built-in pair's tokenizer to a folder.

Its forwards are transformers' own: what `dsi` does with a model that it has no compiled forwards for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dsi.core.messages import TARGET
from dsi.models.names import BUILTIN, model_path

CONTEXT = 1024


def save(folder: str | Path, layers: int, width: int, seed: int = 0) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path(BUILTIN, TARGET))
    torch.manual_seed(seed)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"n_layer": layers, "n_head": width // 64, "n_embd": width, "n_positions": CONTEXT}
    # With GPT-2's own initializer range of 0.02, every text would be one token again and again.
    config = GPT2Config(vocab_size=len(tokenizer), **shape, **ids, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    save(options.folder, options.layers, options.width)


if __name__ == "__main__":
    main()
