"""Where the text of another device or data type first differs from the CPU's in float32, and by what margin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dsi.core.messages import GREEDY, TARGET, Sampling
from dsi.engine.build import load_tokenizer, silence_transformers
from dsi.engine.trial import decode
from dsi.experiments.compare import PROMPTS
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.hf import Transformer, load_model
from dsi.models.names import model_path
from dsi.models.protocol import SamplingModel


@dataclass(frozen=True)
class Divergence:
    """The first token that differs, and how far the largest logit leads the second there; None: none differs."""

    prompt: str
    place: int | None
    margin: float | None


def divergences(
    tokens: int,
    dtype: str,
    device: str = "cpu",
    sampling: Sampling = GREEDY,
    prompts: Iterable[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """Compare the built-in target's texts after each prompt."""
    silence_transformers()
    name = model_path("builtin", TARGET)
    reference = Transformer(load_model(name))
    text = load_tokenizer(name, reference.model)
    models = SamplingModel(reference), CudaGraphModel(load_model(name, dtype, device), reference.context)
    rows = []
    for prompt in prompts:
        ids = text.encode(prompt)
        expected, other = (list(decode(model, ids, tokens, sampling=sampling)) for model in models)
        rows.append(asdict(first_difference(reference, prompt, list(ids), expected, other)))
    return rows


def first_difference(
    reference: Transformer, prompt: str, ids: list[int], expected: list[int], other: list[int]
) -> Divergence:
    for place, (token, other_token) in enumerate(zip(expected, other)):
        if token != other_token:
            text = ids + expected[:place]
            largest, second = reference.forward(text, len(text))[0].topk(2).values.tolist()
            return Divergence(prompt, place, largest - second)
    return Divergence(prompt, None, None)
