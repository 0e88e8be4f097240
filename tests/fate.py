"""Chance played along a script, so that everything it can do is tried, each with its exact probability."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class Fate:
    """Chance played along a script: it decides what the script says, and knows how likely that was."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.probability = script, 1.0
        self.taken: tuple[int, ...] = ()
        self.untried: list[tuple[int, ...]] = []

    def draw(self, weights: Any) -> int:
        ways = [way for way, weight in enumerate(weights) if weight > 0]
        if len(self.taken) == len(self.script):
            self.untried += [(*self.taken, other) for other in ways[1:]]
            self.script = (*self.script, ways[0])
        way = self.script[len(self.taken)]
        self.taken = (*self.taken, way)
        self.probability *= float(weights[way] / sum(weights))
        return way


def law(run: Callable[[Fate], Outcome]) -> dict[Outcome, float]:
    """Each thing that can come out of a run, with its exact probability."""
    outcomes: dict[Outcome, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        fate = Fate(scripts.pop())
        outcomes[run(fate)] += fate.probability
        scripts += fate.untried
    return outcomes
