"""The paper's `wait`: any model at a given latency, waiting instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from dsi.core.messages import Time
from dsi.core.sequence import Tokens
from dsi.models.protocol import Cancelled, ForwardRequest, Model, draw_or_answer, top_k_or_answer
from dsi.sampling.verify import DraftProbs


@dataclass(frozen=True)
class Latency:
    """How long one forward takes, by what the server has read before.

    `ttft` is a forward over a prompt that is new to the server; only reading it, without being asked
    about it, takes the ttft - tpot by which it exceeds a forward. `per_token` is what each new token
    after the first adds to a forward: what other servers verified meanwhile is new to this one.
    `steps` says instead what forwards of up to so many new tokens take, where forwards are padded.
    `jitter` spreads a forward evenly by that share to either side.
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
        places = request.num_positions
        answer = self.tpot if places else 0
        if request.num_cached is None:
            return answer + (0 if self.ttft is None else self.ttft - self.tpot)
        new = max(len(request.tokens) - request.num_cached, places)
        if self.by_width:
            return next((time for width, time in self.by_width if new <= width), self.by_width[-1][1]) if new else 0
        return answer + self.per_token * (new - bool(places))


@dataclass
class Wait:
    """A model that answers as `model` does, after `latency`. In virtual time nobody really waits."""

    model: Model
    latency: Latency
    seed: int = 0
    dice: Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.dice = Random(self.seed)

    def answer(self, request: ForwardRequest) -> Tokens:
        self._wait(request)
        return self.model.answer(request) if request.num_positions else ()

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
        self._wait(request)
        return top_k_or_answer(self.model, request, count, min_ratio)

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        self._wait(request)
        return draw_or_answer(self.model, request, start)

    def _wait(self, request: ForwardRequest) -> None:
        seconds = self.latency.forward(request)
        if self.latency.jitter:
            seconds *= 1 + self.latency.jitter * self.dice.uniform(-1, 1)
        if request.cancelled.wait(seconds):
            raise Cancelled
