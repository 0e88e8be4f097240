"""Whether texts written under DSI are as likely as the target says: a chi-square on a real vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from dsi.core.messages import DRAFTER, TARGET, Sampling
from dsi.core.policies import distributed
from dsi.core.progress import Progress, no_progress
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.fleets.loop import EngineLoop
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.worker import Server
from dsi.models.protocol import NEVER, Backend, CancelFlag, SamplingModel
from dsi.models.wait import Latency, Wait
from dsi.sampling.logits import probabilities

SAMPLING = Sampling(0.8, top_k=12)  # on few tokens a chi-square sees more
SP = 3
FEWEST = 8  # texts that must be expected where they are counted


class Remembered:
    """Rows of a model, each computed once: the texts are short and many."""

    def __init__(self, backend: Backend) -> None:
        self._row = cache(lambda text: np.asarray(backend.forward(text, len(text), NEVER)[0]))

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> np.ndarray:  # noqa: ARG002
        return np.array([self._row(tuple(tokens[:i])) for i in range(start, len(tokens) + 1)])

    def odds(self, text: Tokens) -> dict[int, float]:
        row = probabilities(self._row(text), SAMPLING)
        return {int(token): float(row[token]) for token in row.nonzero()[0]}


def chi_square(
    target: Remembered,
    drafter: Remembered,
    rule: str,
    prompt: Tokens,
    samples: int,
    progress: Progress = no_progress,
) -> float:
    """Of texts of two tokens under DSI at SP 3, against the target's own probabilities.

    In standard deviations above what chance alone gives. A total variation of d adds at least 4 d^2 to the
    sum for each sample.
    """
    counts: Counter[Tokens] = Counter()
    for seed in range(samples):
        counts[written(target, drafter, replace(SAMPLING, seed=seed, rule=rule), prompt)] += 1
        progress()
    expected: dict[Tokens, float] = {
        (a, b): samples * first * second
        for a, first in target.odds(prompt).items()
        for b, second in target.odds((*prompt, a)).items()
    }
    if unheard := set(counts) - set(expected):
        raise ValueError(f"rule {rule}: wrote {len(unheard)} texts that the target never would")
    return sigmas(counts, expected)


def sigmas(counts: Counter[Tokens], expected: dict[Tokens, float]) -> float:
    often = {text: mean for text, mean in expected.items() if mean >= FEWEST}
    pairs = [(counts[text], mean) for text, mean in often.items()]
    seldom = sum(expected.values()) - sum(often.values())
    if seldom >= FEWEST:
        pairs.append((counts.total() - sum(counts[text] for text in often), seldom))
    freedom = len(pairs) - 1
    return float((sum((count - mean) ** 2 / mean for count, mean in pairs) - freedom) / (2 * freedom) ** 0.5)


def written(target: Any, drafter: Any, sampling: Sampling, prompt: Tokens) -> Tokens:
    servers = [Server(f"{TARGET}-{i}", TARGET, Wait(SamplingModel(target), Latency(5 + i))) for i in range(SP)]
    servers.append(Server(DRAFTER, DRAFTER, Wait(SamplingModel(drafter), Latency(2))))
    policy = distributed(2 if sampling.rule == "block" else 1)
    [done] = EngineLoop(SimulatedFleet(servers)).run(Request(prompt, 2, policy, sampling))
    return done.tokens
