"""The paper's `wait` command: a model that waits for a given latency instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from dsi.core.messages import Time
from dsi.core.sequence import Tokens
from dsi.models.protocol import (
    Answer,
    Cancelled,
    ForwardRequest,
    Model,
    draw_or_answer,
    top_k_or_answer,
    tree_answer,
)
from dsi.sampling.verify import DraftProbs


@dataclass(frozen=True)
class Latency:
    """The latency of one forward, given how much of the text the server has in its KV cache.

    `ttft` is the latency of a forward over a new prompt; prefilling it without sampling takes ttft - tpot.
    `per_token` is added for each new token after the first, which includes tokens that other servers
    verified meanwhile. Where forwards are padded, `by_width` gives the latency by the number of new tokens
    instead. `jitter` varies each forward uniformly by that fraction in either direction.
    """

    tpot: Time
    ttft: Time = None
    per_token: Time = 0
    jitter: float = 0
    by_width: tuple[tuple[int, Time], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.tpot < float("inf"):
            raise ValueError(f"latency {self.tpot}: must be above 0")
        if self.ttft is not None and not self.tpot <= self.ttft < float("inf"):
            raise ValueError(f"time to first token {self.ttft}: must be at least the time per token, {self.tpot}")
        if self.per_token < 0 or not 0 <= self.jitter < 1:
            raise ValueError(
                f"per token {self.per_token}, jitter {self.jitter}: must be at least 0, and jitter below 1"
            )

    def forward(self, request: ForwardRequest) -> Time:
        positions = request.num_positions
        answer = self.tpot if positions else 0
        if request.num_cached is None:  # prefill
            return answer + (0 if self.ttft is None else self.ttft - self.tpot)
        on_text = positions - len(request.asked)
        new = max(len(request.tokens) - request.num_cached, on_text) + request.num_new_nodes
        if self.by_width:
            return next((time for width, time in self.by_width if new <= width), self.by_width[-1][1]) if new else 0
        return answer + self.per_token * (new - bool(positions))


@dataclass
class Wait:
    """Answer as `model` does, after `latency`. In virtual time the wait only advances the clock."""

    model: Model
    latency: Latency
    seed: int = 0
    rng: Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)

    def answer(self, request: ForwardRequest) -> Tokens:
        self._wait(request)
        return self.model.answer(request) if request.num_positions else ()

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        self._wait(request)
        return top_k_or_answer(self.model, request, count)

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        self._wait(request)
        return draw_or_answer(self.model, request, start)

    def answer_tree(self, request: ForwardRequest) -> Answer:
        self._wait(request)
        return tree_answer(self.model, request)

    def _wait(self, request: ForwardRequest) -> None:
        seconds = self.latency.forward(request)
        if self.latency.jitter:
            seconds *= 1 + self.latency.jitter * self.rng.uniform(-1, 1)
        if request.cancelled.wait(seconds):
            raise Cancelled
