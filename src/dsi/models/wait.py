"""The paper's `wait`: any model at a given latency, waiting instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from dsi.core.messages import Time
from dsi.core.sequence import Tokens
from dsi.models.protocol import Cancelled, ForwardRequest, Model, drawn, ranking
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
    steps: tuple[tuple[int, Time], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.tpot < float("inf"):
            raise ValueError(f"latency {self.tpot}: must be above 0")
        if self.ttft is not None and not self.tpot <= self.ttft < float("inf"):
            raise ValueError(f"time to first token {self.ttft}: must be at least the time per token, {self.tpot}")
        if self.per_token < 0 or not 0 <= self.jitter < 1:
            raise ValueError(
                f"per token {self.per_token}, jitter {self.jitter}: must be at least 0, and jitter below 1"
            )

    def forward(self, ask: ForwardRequest) -> Time:
        places = ask.places
        answer = self.tpot if places else 0
        if ask.kept is None:
            return answer + (0 if self.ttft is None else self.ttft - self.tpot)
        new = max(len(ask.tokens) - ask.kept, places)
        if self.steps:
            return next((time for width, time in self.steps if new <= width), self.steps[-1][1]) if new else 0
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

    def answer(self, ask: ForwardRequest) -> Tokens:
        self._wait(ask)
        return self.model.answer(ask) if ask.places else ()

    def rank(self, ask: ForwardRequest, count: int, doubt: float) -> Tokens:
        self._wait(ask)
        return ranking(self.model, ask, count, doubt)

    def draw(self, ask: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        self._wait(ask)
        return drawn(self.model, ask, start)

    def _wait(self, ask: ForwardRequest) -> None:
        seconds = self.latency.forward(ask)
        if self.latency.jitter:
            seconds *= 1 + self.latency.jitter * self.dice.uniform(-1, 1)
        if ask.cancelled.wait(seconds):
            raise Cancelled
