"""What targets cost one another: a forward's time by how many compute at once, and by its new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from dsi.models.protocol import ForwardRequest, Pollable

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are recorded
WIDE = 8  # new tokens, where targets crowd each other
ROUNDS = 8
FEW_ROUNDS = 4
ORDERED = 5  # of more, it hardly matters which
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
    one_cache: bool = False  # whether the targets fill one together

    def drafter_beside(self, targets: int) -> float:
        """The drafter's forward while so many targets compute."""
        return max([self.drafter_ms, *(ms for count, ms in self.drafter_crowded.items() if count <= targets)])

    @property
    def drafter_pieces(self) -> int | None:
        """A guess that is on its way cannot be called back."""
        return 1 if self.pieces else None

    @property
    def target_ms(self) -> float:
        return self.by_width[1]

    @property
    def per_token_ms(self) -> float:
        """What each new token more adds, from the narrowest forward to the widest."""
        widest = max(self.by_width)
        return max(0.0, self.by_width[widest] - self.target_ms) / max(1, widest - 1)

    def contention(self, targets: int) -> float:
        """By what share each other target at work slows one down, where there are so many."""
        crowd = min((count for count in self.crowded if count >= targets), default=max(self.crowded))
        return max(0.0, self.crowded[crowd] / self.crowded[1] - 1) / max(1, crowd - 1)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"per_token_ms": self.per_token_ms}


def costs(
    targets: Sequence[Pollable],
    drafter: Pollable,
    prompt: int = 128,
    pieces: int = 0,
    room: int = 512,
    one_cache: bool = False,
) -> Costs:
    """Of these servers' models; `pieces` is where a forward can be stopped, `room` how long a text can be."""
    if prompt < 1 or prompt + WIDE > room:
        raise ValueError(f"room for {room} tokens: too little to measure with a prompt of {prompt}")
    return Costs(
        drafter_ms=guess_ms(drafter, [], prompt, room),
        drafter_crowded={
            count: guess_ms(drafter, targets[:count], prompt, room) for count in range(1, len(targets) + 1)
        },
        by_width=by_width(targets[0], prompt, room),
        crowded={count: together(targets[:count], WIDE, prompt) for count in range(1, len(targets) + 1)},
        pieces=pieces,
        one_cache=one_cache,
    )


def in_order(models: Sequence[Pollable], prompt: int = 128) -> list[Any]:
    """Those that slow one another down least come first: they are taken where fewer than all are needed.

    Slices of a GPU share their ways to its memory, some of them more than others.
    """
    found, left = list(models[:1]), list(models[1:])
    while len(left) > 1 and len(found) < ORDERED:
        best = min(left, key=lambda each: together([*found, each], WIDE, prompt, FEW_ROUNDS))
        found.append(best)
        left.remove(best)
    return found + left


def by_width(model: Pollable, prompt: int = 128, room: int = 512) -> dict[int, float]:
    """A forward's time alone, by its new tokens."""
    return {width: together([model], width, prompt) for width in WIDTHS if prompt + width <= room}


def together(models: Sequence[Pollable], width: int, prompt: int, rounds: int = ROUNDS) -> float:
    """The median of a forward over so many new tokens while all of these keep computing."""
    text = [TOKEN] * prompt
    for model in models:
        model.answer(ForwardRequest(text, prompt))
    crew = [Busy(model, text + [TOKEN] * width, width) for model in models]
    while any(len(each.times) < rounds for each in crew):
        for each in crew:
            each.look()
    finish(crew)
    return 1000 * median(time for each in crew for time in each.times[:rounds])


class Busy:
    """A model that computes the same forward over and over."""

    def __init__(self, model: Pollable, text: list[int], width: int) -> None:
        self._model, self._ask = model, ForwardRequest(text, len(text) + 1 - width)
        self.times: list[float] = []
        self._begin()
        self._counts = False  # all begin at once, and may first have to fall into step

    def _begin(self) -> None:
        self._counts, self._began = True, perf_counter()
        self.steps = self._model.poll_answer(self._ask)

    def look(self) -> None:
        if next(self.steps, DONE) is DONE:
            if self._counts:
                self.times.append(perf_counter() - self._began)
            self._begin()


def finish(crew: Iterable[Busy]) -> None:
    """Each in turn: one may have to wait for another."""
    flying = [each.steps for each in crew]
    while flying:
        flying = [steps for steps in flying if next(steps, DONE) is not DONE]


def guess_ms(drafter: Pollable, targets: Sequence[Pollable], prompt: int, room: int) -> float:
    """The median of the time from one guess to the next while all of these keep computing."""
    text = [TOKEN] * prompt
    crew = [Busy(target, text + [TOKEN] * WIDE, WIDE) for target in targets]
    times = [perf_counter()]
    for token in drafter.poll_draft(ForwardRequest(text, prompt), min(3 * ROUNDS, room - prompt)):
        if token is not None:
            times.append(perf_counter())
        for each in crew:
            each.look()
    finish(crew)
    return 1000 * median(after - before for before, after in pairwise(times))
