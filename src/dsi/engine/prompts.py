"""Prompts to measure acceptance with: the built-in ones, and a random sample that fits the models' context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random

from dsi.core.sequence import Tokens
from dsi.models.tokenizer import Tokenizer

BUILTIN_PROMPTS = (files("dsi") / "assets" / "prompts.txt").read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class PromptSample:
    prompts: list[Tokens]
    skipped: int  # because they were too long


def sample_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, seed: int, tokens: int, context: int
) -> PromptSample:
    """Sample prompts uniformly; one that leaves no room for `tokens` new tokens is skipped, never cut."""
    prompts: list[Tokens] = []
    skipped = 0
    for text in Random(seed).sample(texts, len(texts)):
        if len(prompts) == count:
            break
        encoded = tokenizer.encode(text)
        if context and len(encoded) + tokens > context:
            skipped += 1
        else:
            prompts.append(encoded)
    if not prompts:
        raise ValueError(
            f"none of {skipped} prompts leaves room for {tokens} tokens in the models' context of {context}"
        )
    return PromptSample(prompts, skipped)
