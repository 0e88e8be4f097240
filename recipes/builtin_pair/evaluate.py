"""How well the pair fits together, on one core: greedy acceptance, latencies and their ratio. Measured.

Usage: python evaluate.py [TARGET DRAFTER]

The beginnings are those of prompts.py.
"""

from __future__ import annotations

import sys
from math import sqrt

import torch
from prompts import PROMPTS
from transformers import AutoTokenizer

from dsi.engine.build import forward_ms
from dsi.models.hf import Transformer, load_model
from dsi.models.names import model_path

TOKENS = 100


def accepted(target: Transformer, drafter: Transformer, prompt: list[int]) -> tuple[int, int]:
    """How many of the target's greedy tokens the drafter would have guessed, and how many there are."""
    text = list(prompt)
    while len(text) < len(prompt) + TOKENS:
        token = int(target.forward(text, len(text))[0].argmax())
        text.append(token)
        if token == 0:
            break
    guesses = drafter.forward(text[:-1], len(prompt)).argmax(-1).tolist()
    return sum(guess == token for guess, token in zip(guesses, text[len(prompt) :])), len(guesses)


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:3] or [model_path("builtin", "target"), model_path("builtin", "drafter")]
    target, drafter = (Transformer(load_model(name)) for name in names)
    tokenizer = AutoTokenizer.from_pretrained(names[0])
    counts = [accepted(target, drafter, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    right, drawn = (sum(column) for column in zip(*counts))
    rate = right / drawn
    print(f"greedy acceptance {rate:.3f} ± {1.96 * sqrt(rate * (1 - rate) / drawn):.3f} over {drawn} tokens")
    paces = [forward_ms(model, repeats=50) for model in (target, drafter)]
    print(f"one core: target {paces[0]:.2f} ms, drafter {paces[1]:.2f} ms per token ({paces[1] / paces[0]:.1%})")


if __name__ == "__main__":
    main()
