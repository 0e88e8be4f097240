"""Acceptance if the drafter has another tokenizer: by shared tokens and through text.

The target is the built-in one. A drafter is counts of what followed the last four tokens in texts that the
target wrote, one for each tokenizer: so they differ in their tokens alone. Measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import harness
from dsi.core.messages import Sampling
from dsi.engine.build import cpu_model, load_tokenizer, silence_transformers
from dsi.experiments.compare import PROMPTS
from dsi.models.hf import load_model
from dsi.models.names import model_path
from dsi.models.protocol import CancelFlag, ForwardRequest, Model, SamplingModel
from dsi.models.tokenizer import Tokenizer
from dsi.models.vocab.slem import SLEM
from dsi.models.vocab.tli import TLI
from dsi.models.vocab.translate import shared_token_rate
from dsi.models.vocab.vocabulary import Vocabulary

ORDER = 5  # tokens of the longest n-gram
TRUST = 0.8  # in an n-gram over the next shorter one
BATCH = 32
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=3))
HEADS = ("tokenizer", "tokens", "shared", "share", "tli", "slem", "tli 0.8", "slem 0.8")


class Counts:
    """An n-gram model that interpolates between orders."""

    def __init__(self, texts: Iterable[Sequence[int]], size: int) -> None:
        self._size = size
        self._counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            for end in range(len(text)):
                for start in range(max(0, end + 1 - ORDER), end + 1):
                    self._counts[tuple(text[start:end])][text[end]] += 1

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        return np.array([self._row(tokens[:i]) for i in range(start, len(tokens) + 1)])

    def _row(self, tokens: Sequence[int]) -> Any:
        row = np.full(self._size, 1e-9)
        for length in range(min(ORDER, len(tokens) + 1)):
            counted = self._counts.get(tuple(tokens[len(tokens) - length :]))
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
    """Return stories that the target has sampled, to train drafters on."""
    torch.manual_seed(0)
    stories: list[str] = []
    while len(stories) < count:
        ids = torch.tensor([text.encode("")] * min(BATCH, count))
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            max_new_tokens=length,
            pad_token_id=0,
        )
        stories += [text.decode(row.tolist()) for row in rows]
    return stories


def continuations(target: Model, text: Tokenizer, sampling: Sampling, length: int) -> list[tuple[list[int], int]]:
    """Return the target's own continuation of each prompt, and where it begins."""
    texts = []
    for prompt in PROMPTS:
        tokens = list(text.encode(prompt))
        start = len(tokens)
        while len(tokens) < start + length and tokens[-1] not in text.eos_token_ids:
            tokens += target.answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
        texts.append((tokens, start))
    return texts


def acceptance(drafter: Model, texts: list[tuple[list[int], int]], sampling: Sampling) -> float:
    right = [
        drafter.answer(ForwardRequest(tokens[:i], i, sampling=sampling)) == (tokens[i],)
        for tokens, start in texts
        for i in range(start, len(tokens))
    ]
    return sum(right) / len(right)


def main() -> None:
    options = harness.arguments(__doc__, "--stories 32 --tokens 20", stories=128, tokens=80).parse_args()
    silence_transformers()
    model = load_model(model_path("builtin", "target"))
    text = load_tokenizer(model_path("builtin", "target"), model)
    target_vocabulary = Vocabulary(text, model.config.vocab_size)
    stories = written(model, text, options.stories, 160)
    tokenizers = {"the target's": text.tokenizer}
    tokenizers |= {f"byte-level {size}": byte_level(stories, size) for size in (500, 1000, 2000)}
    tokenizers |= {f"unigram {size}": unigram(stories, size) for size in (500, 1000)}
    target = SamplingModel(cpu_model(model))
    texts = [(continuations(target, text, sampling, options.tokens), sampling) for sampling in SAMPLINGS]
    rows = [row(name, drafter, stories, target_vocabulary, texts) for name, drafter in tokenizers.items()]
    places = sum(len(tokens) - start for tokens, start in texts[0][0])
    lines = harness.table(HEADS, [[v if isinstance(v, str) else f"{v:.3g}" for v in row] for row in rows])
    results = {"heads": HEADS, "rows": rows, "places": places}
    harness.report(options, "measured", results, [*lines, f"measured: {places} places of greedy texts"])


def row(name: str, tokenizer: Any, stories: list[str], own: Vocabulary, texts: list[Any]) -> list[Any]:
    """Return the figures of a drafter with this tokenizer, trained on these stories."""
    text = Tokenizer(tokenizer)
    vocabulary = Vocabulary(text, len(tokenizer))
    counts = Counts([[*text.encode(story), tokenizer.eos_token_id] for story in stories], len(tokenizer))
    by_token, by_text = TLI(counts, vocabulary, own), SLEM(counts, vocabulary, own)
    rates = [acceptance(drafter, *sample) for sample in texts for drafter in (SamplingModel(by_token), by_text)]
    return [name, len(tokenizer), len(by_token.shared), shared_token_rate(by_token, own), *rates]


if __name__ == "__main__":
    main()
