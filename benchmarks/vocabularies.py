"""How often guesses are right if the drafter has another tokenizer: by shared tokens and through text.

The target is the built-in one. A drafter is counts of what followed the last four tokens in texts that the
target wrote, one for each tokenizer: so they differ in their tokens alone. Measured.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dsi.core.messages import Sampling
from dsi.engine.build import backend, quiet, tokenizer
from dsi.experiments.compare import PROMPTS
from dsi.models.hf import load_model
from dsi.models.names import model_path
from dsi.models.protocol import CancelFlag, ForwardRequest, Model, SamplingModel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from dsi.models.vocab.translate import shared_token_rate
from dsi.models.vocab.vocabulary import Vocabulary

ORDER = 5  # tokens of the longest run that is counted
TRUST = 0.8  # in a run over one that is shorter by a token
BATCH = 32
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=3))
HEADS = ("tokenizer", "tokens", "shared", "share", "tli", "slem", "tli 0.8", "slem 0.8")


class Counts:
    """A model that has counted runs of tokens."""

    def __init__(self, texts: Iterable[Sequence[int]], size: int) -> None:
        self._size = size
        self._runs: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            for end in range(len(text)):
                for start in range(max(0, end + 1 - ORDER), end + 1):
                    self._runs[tuple(text[start:end])][text[end]] += 1

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        return np.array([self._row(tokens[:i]) for i in range(start, len(tokens) + 1)])

    def _row(self, tokens: Sequence[int]) -> Any:
        row = np.full(self._size, 1e-9)
        for length in range(min(ORDER, len(tokens) + 1)):
            counted = self._runs.get(tuple(tokens[len(tokens) - length :]))
            if counted is not None:
                row *= 1 - TRUST
                row[list(counted)] += TRUST * np.array(list(counted.values())) / counted.total()
        return np.log(row)


def byte_level(texts: list[str], size: int) -> Any:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def unigram(texts: list[str], size: int) -> Any:
    raw = RawTokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def written(model: Any, text: Tokenizer, count: int, length: int) -> list[str]:
    """Stories that the target has sampled, to learn from."""
    torch.manual_seed(0)
    found: list[str] = []
    while len(found) < count:
        ids = torch.tensor([text.encode("")] * BATCH)
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            max_new_tokens=length,
            pad_token_id=0,
        )
        found += [text.decode(row.tolist()) for row in rows]
    return found


def truths(target: Model, text: Tokenizer, sampling: Sampling, length: int) -> list[tuple[list[int], int]]:
    """The target's own continuation of each prompt, and where it begins."""
    found = []
    for prompt in PROMPTS:
        tokens = list(text.encode(prompt))
        start = len(tokens)
        while len(tokens) < start + length and tokens[-1] not in text.eos_token_ids:
            tokens += target.answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
        found.append((tokens, start))
    return found


def acceptance(drafter: Model, texts: list[tuple[list[int], int]], sampling: Sampling) -> float:
    right = [
        drafter.answer(ForwardRequest(tokens[:i], i, sampling=sampling)) == (tokens[i],)
        for tokens, start in texts
        for i in range(start, len(tokens))
    ]
    return sum(right) / len(right)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--stories", type=int, default=128)
    options.add_argument("--tokens", type=int, default=80)
    asked = options.parse_args()
    quiet()
    model = load_model(model_path("builtin", "target"))
    text = tokenizer(model_path("builtin", "target"), model)
    own = Vocabulary(text, model.config.vocab_size)
    stories = written(model, text, asked.stories, 160)
    tongues = {"the target's": text.tokenizer}
    tongues |= {f"byte-level {size}": byte_level(stories, size) for size in (500, 1000, 2000)}
    tongues |= {f"unigram {size}": unigram(stories, size) for size in (500, 1000)}
    target = SamplingModel(backend(model))
    texts = [(truths(target, text, sampling, asked.tokens), sampling) for sampling in SAMPLINGS]
    print(("{:16}{:>8}{:>8}{:>8}" + 4 * "{:>9}").format(*HEADS))
    for name, tongue in tongues.items():
        known = Tokenizer(tongue)
        drafter = Vocabulary(known, len(tongue))
        counts = Counts([[*known.encode(story), tongue.eos_token_id] for story in stories], len(tongue))
        by_token, by_text = TLI(counts, drafter, own), SLEM(counts, drafter, own)
        figures = [acceptance(way, *each) for each in texts for way in (SamplingModel(by_token), by_text)]
        print(f"{name:16}{len(tongue):8}{len(by_token.shared):8}{shared_token_rate(by_token, own):8.2f}", end="")
        print("".join(f"{figure:9.3f}" for figure in figures))
    print(f"measured: {sum(len(tokens) - start for tokens, start in texts[0][0])} places of greedy texts")


if __name__ == "__main__":
    main()
