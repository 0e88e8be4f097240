"""A corpus of short stories from the teacher, and a tokenizer of its own for it.

Usage: python corpus.py build/teacher.pt build --seconds 240

Writes build/tokenizer.json, build/train.npy and build/held_out.npy (uint16 token ids, stories separated
by the end token).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from sampler import DEVICE, Sampler, sampled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN = 1  # of the teacher: it also ends a story
LENGTH = 256
VOCABULARY = 4096
END, START = "<|end|>", "<|start|>"
WORKERS = 12
PIECES: list[bytes] = []


def teacher_stories(model: dict[str, object], seconds: float, batch: int) -> Iterator[np.ndarray]:
    """Beginnings are varied (temperature 1), the rest is careful (0.7)."""
    weights = {name: tensor.to(DEVICE).bfloat16() for name, tensor in model["weights"].items()}  # type: ignore[attr-defined]
    writer = Sampler(weights, int(model["heads"]), True, batch, LENGTH)  # type: ignore[call-overload]
    prompts = torch.full((batch, 1), BEGIN, device=DEVICE)
    began = time.time()
    while time.time() - began < seconds:
        texts = writer.write(prompts, LENGTH, lambda logits, at: sampled(logits, 1.0 if at < 24 else 0.7))
        yield texts.to(torch.int32).cpu().numpy()


def spelled(texts: np.ndarray) -> list[str]:
    """Each row as text, up to where the story ends; a story that does not end is cut at a sentence."""
    stories = []
    for row in texts:
        tokens = row[1:].tolist()
        ended = BEGIN in tokens
        tokens = tokens[: tokens.index(BEGIN)] if ended else tokens
        story = b"".join(PIECES[token] for token in tokens).decode("utf-8", "ignore").strip()
        if not ended:
            story = story[: max(story.rfind(mark) for mark in '.!?"') + 1]
        if len(story) > 40:
            stories.append(story + (END if ended else ""))
    return stories


def _learn(pieces: list[bytes]) -> None:
    PIECES[:] = pieces


def make_tokenizer(stories: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((story.removesuffix(END) for story in stories), trainer)
    start = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, start)]
    )
    return tokenizer


def encoded(tokenizer: Tokenizer, stories: list[str]) -> np.ndarray:
    """All stories in one row; one that did not end is followed by the next one's start alone."""
    rows = tokenizer.encode_batch_fast(stories)
    return np.concatenate([np.array(row.ids, dtype=np.uint16) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240, help="how long the teacher writes")
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=2000, help="stories kept from training")
    options = parser.parse_args()
    model = torch.load(options.teacher)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    parts, sizes, tokenizer = [], 0, None
    with ProcessPoolExecutor(WORKERS, initializer=_learn, initargs=(model["pieces"],)) as pool:
        waiting = []
        for texts in teacher_stories(model, options.seconds, options.batch):
            waiting.append([pool.submit(spelled, part) for part in np.array_split(texts, WORKERS)])
            print(
                f"{time.time() - began:.0f} s: {len(waiting) * texts.size / 1e6:.0f}M teacher tokens",
                flush=True,
            )
    for batch in waiting:
        stories = [story for part in batch for story in part.result()]
        if tokenizer is None:
            print("\n\n".join(stories[:3]))
            held_out, stories = stories[: options.held_out], stories[options.held_out :]
            tokenizer = make_tokenizer(stories[:100_000])
            np.save(options.out / "held_out.npy", encoded(tokenizer, held_out))
            tokenizer.save(str(options.out / "tokenizer.json"))
        parts.append(encoded(tokenizer, stories))
        sizes += len(parts[-1])
    np.save(options.out / "train.npy", np.concatenate(parts))
    print(f"{time.time() - began:.0f} s: {sizes / 1e6:.1f}M tokens of our own")


if __name__ == "__main__":
    main()
