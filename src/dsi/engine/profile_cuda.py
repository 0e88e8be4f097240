"""What targets cost one another: a forward's time by how many compute at once, and by its new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from dsi.models.protocol import ForwardRequest, Pollable
from dsi.planning.latency import LatencyModel

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # new tokens of the forwards that are recorded
WIDE = 8  # new tokens, where targets crowd each other
ROUNDS = 8
FEW_ROUNDS = 4
ORDERED = 5  # of more, it hardly matters which
TOKEN = 1  # any will do
DONE = object()


def latency_model(
    targets: Sequence[Pollable],
    drafter: Pollable,
    prompt: int = 128,
    cancel_points: int = 0,
    room: int = 512,
    shared_kv: bool = False,
) -> LatencyModel:
    """Measures these servers' models; `room` is how long a text can be."""
    if prompt < 1 or prompt + WIDE > room:
        raise ValueError(f"room for {room} tokens: too little to measure with a prompt of {prompt}")
    counts = range(1, len(targets) + 1)
    return LatencyModel.measured(
        by_width(targets[0], prompt, room),
        guess_ms(drafter, [], prompt, room),
        by_busy_targets=tuple((count, together(targets[:count], WIDE, prompt)) for count in counts),
        drafter_by_busy_targets=tuple((count, guess_ms(drafter, targets[:count], prompt, room)) for count in counts),
        cancel_points=cancel_points,
        drafter_cancel_points=1 if cancel_points else None,  # a guess that is on its way cannot be called back
        shared_kv=shared_kv,
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
