"""Where the text of another device or number format parts from the CPU's in float32, and by how little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dsi.core.messages import GREEDY, TARGET, Sampling
from dsi.engine.build import quiet, tokenizer
from dsi.experiments.alone import write
from dsi.experiments.compare import PROMPTS
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.hf import Transformer, load
from dsi.models.names import folder
from dsi.models.protocol import ForwardRequest, Model, SamplingModel


@dataclass(frozen=True)
class Divergence:
    """The first token that differs, and by how much the best score led the second there; None: none does."""

    prompt: str
    place: int | None
    margin: float | None


class Asked:
    """A model that is asked with one way of sampling."""

    def __init__(self, model: Model, sampling: Sampling) -> None:
        self._model, self._sampling = model, sampling

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        return self._model.answer(
            ForwardRequest(request.tokens, request.start, request.num_cached, self._sampling, request.cancelled)
        )


def divergences(
    tokens: int,
    dtype: str,
    device: str = "cpu",
    sampling: Sampling = GREEDY,
    prompts: Iterable[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """The built-in target, after each of a few beginnings."""
    quiet()
    name = folder("builtin", TARGET)
    plain = Transformer(load(name))
    text = tokenizer(name, plain.model)
    other = CudaGraphModel(load(name, dtype, device), plain.context)
    found = []
    for prompt in prompts:
        ids = text.encode(prompt)
        ours, theirs = (list(write(Asked(model, sampling), ids, tokens)) for model in (SamplingModel(plain), other))
        found.append(asdict(first_difference(plain, prompt, list(ids), ours, theirs)))
    return found


def first_difference(plain: Transformer, prompt: str, ids: list[int], ours: list[int], theirs: list[int]) -> Divergence:
    for place, (mine, other) in enumerate(zip(ours, theirs)):
        if mine != other:
            text = ids + ours[:place]
            best, second = plain.forward(text, len(text))[0].topk(2).values.tolist()
            return Divergence(prompt, place, best - second)
    return Divergence(prompt, None, None)
