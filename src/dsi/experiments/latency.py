"""Measure how long the forwards of a model take, alone on one server (the paper's TTFT and TPOT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median, stdev
from time import perf_counter
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.core.sequence import Tokens
from dsi.engine.trial import ModelFactory, decode
from dsi.models.protocol import ForwardRequest, Model

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # new tokens of the forwards that the curve is made of
ROUNDS = 12  # forwards of each width


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of some times, in milliseconds."""

    mean: float
    stdev: float


@dataclass(frozen=True)
class Timing:
    """The first token of a text, after the prefill, and those after it."""

    ttft_ms: Spread
    tpot_ms: Spread

    @property
    def ratio(self) -> float:
        return self.ttft_ms.mean / self.tpot_ms.mean

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"ttft_over_tpot": self.ratio}


@dataclass(frozen=True)
class PairLatencies:
    target: Timing
    drafter: Timing
    curve: dict[int, float]  # ms of a target forward by its new tokens

    @property
    def per_token_ms(self) -> float:
        """Return the slope of the curve: what another token adds, by least squares."""
        if len(self.curve) < 2:
            return 0.0
        return max(0.0, linear_regression(list(self.curve), list(self.curve.values())).slope)

    @property
    def drafter_share(self) -> float:
        """Return the drafter's share of the target's time per token (the paper's drafter latency in percent)."""
        return self.drafter.tpot_ms.mean / self.target.tpot_ms.mean

    def json(self) -> dict[str, Any]:
        return {
            "target": self.target.json(),
            "drafter": self.drafter.json(),
            "drafter_over_target": self.drafter_share,
            "curve": [{"new_tokens": width, "ms": ms} for width, ms in self.curve.items()],
            "per_token_ms": self.per_token_ms,
        }


def latencies(
    target: ModelFactory,
    drafter: ModelFactory,
    prompts: Sequence[Tokens],
    tokens: int,
    context: int = 0,
    progress: Progress = no_progress,
) -> PairLatencies:
    """Time one model after the other: interleaved, they would evict each other from the processor's caches."""
    if tokens < 2:
        raise ValueError(f"tokens {tokens}: must be at least 2, for the time between them")
    slow, fast = (timing(model, prompts, tokens, progress) for model in (target, drafter))
    return PairLatencies(slow, fast, curve(target(), prompts[0], context))


def timing(model: ModelFactory, prompts: Sequence[Tokens], tokens: int, progress: Progress = no_progress) -> Timing:
    """Decode every text to its full length, whether or not the model would have ended it."""
    timed(model(), prompts[0], tokens)  # warm up: the first forwards of a process take longer
    first, later = [], []
    for prompt in prompts:
        times = timed(model(), prompt, tokens)
        first.append(times[0])
        later += times[1:]
        progress()
    return Timing(spread(first), spread(later))


def timed(model: Model, prompt: Tokens, tokens: int) -> list[float]:
    """Return the milliseconds of each token of a text."""
    marks = [perf_counter()]
    marks += (perf_counter() for _ in decode(model, prompt, tokens))
    return [1000 * (end - begin) for begin, end in pairwise(marks)]


def curve(model: Model, prompt: Tokens, context: int = 0) -> dict[int, float]:
    """Return the milliseconds of a forward over the target's text by its new tokens: medians, widths interleaved."""
    widths = [width for width in WIDTHS if not context or len(prompt) + width <= context]
    text = tuple(decode(model, prompt, max(widths)))
    times: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(ROUNDS):
        for width in widths:
            times[width].append(forward_ms(model, prompt + text[:width], width))
    return {width: median(runs) for width, runs in times.items()}


def forward_ms(model: Model, text: Tokens, new: int) -> float:
    """Time a forward over the last `new` tokens: a model recomputes the positions that a request asks for."""
    began = perf_counter()
    model.answer(ForwardRequest(text, len(text) + 1 - new))
    return 1000 * (perf_counter() - began)


def spread(times: Sequence[float]) -> Spread:
    return Spread(fmean(times), stdev(times) if len(times) > 1 else 0.0)
