"""New tokens of several texts in one forward of a transformers model, against one forward each. Measured.

A GPT-2 with random weights of 30 million parameters, one thread on one core, interleaved.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import harness
from dsi.engine.build import silence_transformers
from dsi.models.hf import Transformer
from dsi.models.protocol import ForwardRequest

TEXTS = (2, 4, 8, 16)
PREFIX = 128  # tokens of each text
VOCABULARY = 20000
SHAPE = {"n_layer": 6, "n_head": 8, "n_embd": 512, "bos_token_id": 0, "eos_token_id": 0}

Forward = Callable[[int], float]  # milliseconds for so many texts


def random_texts(count: int, new: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    texts: list[list[int]] = torch.randint(0, VOCABULARY, (count, PREFIX + new), generator=generator).tolist()
    return texts


def timed(model: Transformer, new: int, forward: Callable[[Sequence[ForwardRequest]], Any]) -> Forward:
    def milliseconds(count: int) -> float:
        texts = random_texts(count, new)
        for text in texts:
            model.forward(text[:PREFIX], PREFIX)
        began = time.perf_counter()
        forward([ForwardRequest(text, PREFIX + 1) for text in texts])
        return 1000 * (time.perf_counter() - began)

    return milliseconds


def lines(times: dict[str, list[float]]) -> list[str]:
    heads = ("texts", "one by one, ms", "packed, ms", "times as fast")
    rows = []
    for i, count in enumerate(TEXTS):
        alone, packed = (times[name][i :: len(TEXTS)] for name in ("alone", "packed"))
        ratio = median(harness.ratios(alone, packed))
        rows.append((count, f"{median(alone):.1f}", f"{median(packed):.1f}", f"{ratio:.2f}"))
    return list(harness.table(heads, rows))


def parse() -> argparse.Namespace:
    return harness.arguments(__doc__, "--new 6", repeats=10, new=6).parse_args()


def main() -> None:
    options = parse()
    silence_transformers()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    torch.manual_seed(0)
    model = Transformer(GPT2LMHeadModel(GPT2Config(**SHAPE, vocab_size=VOCABULARY)), max_sequences=32)
    forwards = {
        "alone": timed(model, options.new, lambda texts: [model.forward(text.tokens, text.start) for text in texts]),
        "packed": timed(model, options.new, model.forward_packed),
    }
    times = harness.interleave(forwards, TEXTS, options.repeats, warm_up=1)
    note = f"measured on one core, float32, {options.new} new tokens after {PREFIX} of each text; medians"
    harness.report(options, "measured", {"ms": times, "texts": TEXTS, "new": options.new}, [*lines(times), note])


if __name__ == "__main__":
    main()
