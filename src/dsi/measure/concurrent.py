"""What targets cost one another: a forward's time by how many compute at once, and by its new tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from dsi.models.backend import Ask, Pollable

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are recorded
WIDE = 8  # new tokens, where targets crowd each other
CROWDS = (2, 4, 7)  # of targets beside a drafter
ROUNDS = 8
TOKEN = 1  # any will do
DONE = object()


@dataclass(frozen=True)
class Costs:
    """Measured, in milliseconds. `crowded` has a forward's time by the number of targets at work."""

    drafter_ms: float
    drafter_crowded: dict[int, float]  # by the number of targets at work beside it
    by_width: dict[int, float]  # one target alone, by new tokens
    crowded: dict[int, float]  # at a width of 8
    pieces: int = 0

    def drafter_beside(self, targets: int) -> float:
        """The drafter's forward while so many targets compute."""
        return max([self.drafter_ms, *(ms for count, ms in self.drafter_crowded.items() if count <= targets)])

    @property
    def target_ms(self) -> float:
        return self.by_width[1]

    @property
    def per_token_ms(self) -> float:
        """What each new token more adds, from the narrowest forward to the widest."""
        widest = max(self.by_width)
        return max(0.0, self.by_width[widest] - self.target_ms) / max(1, widest - 1)

    @property
    def contention(self) -> float:
        """By what share each other target at work slows one down."""
        most = max(self.crowded)
        return max(0.0, self.crowded[most] / self.crowded[1] - 1) / max(1, most - 1)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"per_token_ms": self.per_token_ms, "contention": self.contention}


def costs(
    targets: Sequence[Pollable], drafter: Pollable, prompt: int = 128, pieces: int = 0, room: int = 512
) -> Costs:
    """Of these servers' models; `pieces` is where a forward can be stopped, `room` how long a text can be."""
    if prompt < 1 or prompt + WIDE > room:
        raise ValueError(f"room for {room} tokens: too little to measure with a prompt of {prompt}")
    return Costs(
        drafter_ms=together([drafter], 1, prompt),
        drafter_crowded={n: beside(drafter, targets[:n], prompt) for n in CROWDS if n <= len(targets)},
        by_width=by_width(targets[0], prompt, room),
        crowded={count: together(targets[:count], WIDE, prompt) for count in range(1, len(targets) + 1)},
        pieces=pieces,
    )


def by_width(model: Pollable, prompt: int = 128, room: int = 512) -> dict[int, float]:
    """A forward's time alone, by its new tokens."""
    return {width: together([model], width, prompt) for width in WIDTHS if prompt + width <= room}


def together(models: Sequence[Pollable], width: int, prompt: int) -> float:
    """The median of a forward over so many new tokens while all of these compute at once."""
    text = [TOKEN] * prompt
    longer = text + [TOKEN] * width
    for model in models:
        model.answer(Ask(text, prompt))
    times = [time for _ in range(ROUNDS) for time in _round(models, longer, width)]
    return 1000 * median(times)


def _round(models: Sequence[Pollable], text: list[int], width: int) -> list[float]:
    """All begin at once, and each is looked at until it has ended."""
    flying = {i: model.answering(Ask(text, len(text) + 1 - width)) for i, model in enumerate(models)}
    times, began = [], perf_counter()
    while flying:
        for i, steps in list(flying.items()):
            try:
                next(steps)
            except StopIteration:
                times.append(perf_counter() - began)
                del flying[i]
    return times


def beside(drafter: Pollable, targets: Sequence[Pollable], prompt: int) -> float:
    """The median of the drafter's forward while all of these keep computing."""
    text = [TOKEN] * prompt
    longer = text + [TOKEN] * WIDE
    flying: dict[int, Iterator[None]] = {}
    times: list[float] = []
    while len(times) < 3 * ROUNDS:
        began, steps = perf_counter(), drafter.answering(Ask(text, prompt))
        while next(steps, DONE) is None:
            for i, target in enumerate(targets):
                if i not in flying or next(flying[i], DONE) is DONE:
                    flying[i] = target.answering(Ask(longer, prompt + 1))
        times.append(perf_counter() - began)
    for rest in flying.values():
        deque(rest, 0)
    return 1000 * median(times)
