"""Exact distributions of random programs: every outcome is enumerated with its probability."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class ScriptedChoices:
    """Random choices that follow a script, with the probability of the script and the branches not taken."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.probability = script, 1.0
        self.taken: tuple[int, ...] = ()
        self.untried: list[tuple[int, ...]] = []

    def draw(self, weights: Any) -> int:
        options = [option for option, weight in enumerate(weights) if weight > 0]
        if len(self.taken) == len(self.script):
            self.untried += [(*self.taken, other) for other in options[1:]]
            self.script = (*self.script, options[0])
        option = self.script[len(self.taken)]
        self.taken = (*self.taken, option)
        self.probability *= float(weights[option] / sum(weights))
        return option


def exact_distribution(run: Callable[[ScriptedChoices], Outcome]) -> dict[Outcome, float]:
    """Run a program along every script; return each outcome with its exact probability."""
    outcomes: dict[Outcome, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        choices = ScriptedChoices(scripts.pop())
        outcomes[run(choices)] += choices.probability
        scripts += choices.untried
    return outcomes
