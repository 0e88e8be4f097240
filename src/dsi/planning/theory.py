"""The expected time of non-SI, SI and DSI, computed exactly: nothing is sampled, and nothing is simulated.

As the paper assumes, each guess is right with the same probability, whatever came before, and a drafter is
not slower than its target. The acceptance rate may be an array, and so is the result then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

from dsi.planning.equation_1 import Number, check_latencies, exact

Array = Any  # a float or an array of floats, and so is what is computed from it


@dataclass(frozen=True)
class Latencies:
    """Of one forward of each model, and of the first one, over the prompt; in any unit of time."""

    target: Number
    drafter: Number
    target_ttft: Number | None = None
    drafter_ttft: Number | None = None

    def __post_init__(self) -> None:
        check_latencies(self.target, self.drafter)
        first = self.first
        for what, slow, fast in (
            ("drafter", self.drafter, self.target),
            ("drafter's first forward", first[1], first[0]),
        ):
            if slow > fast:
                raise ValueError(f"the {what} takes {slow:g}: must not be more than the target's {fast:g}")

    @property
    def first(self) -> tuple[Number, Number]:
        """The first forwards: those of the target and of the drafter."""
        return (
            self.target if self.target_ttft is None else self.target_ttft,
            self.drafter if self.drafter_ttft is None else self.drafter_ttft,
        )


def nonsi(tokens: int, latencies: Latencies) -> float:
    """One forward for each token, the first of them over the prompt."""
    return float(latencies.first[0] + (tokens - 1) * latencies.target)


def si(tokens: int, latencies: Latencies, acceptance: Array, lookahead: int) -> Array:
    """Take turns: draft a block, verify it. The time is what the forwards take, one after the other."""
    drafts, forwards = si_forwards(tokens, acceptance, lookahead)
    return si_time(tokens, latencies, drafts, forwards)


def si_time(tokens: int, latencies: Latencies, drafts: Array, forwards: Array) -> Array:
    prompt = latencies.first[0] - latencies.target
    if tokens > 1:
        prompt += latencies.first[1] - latencies.drafter
    return drafts * float(latencies.drafter) + forwards * float(latencies.target) + float(prompt)


def si_forwards(tokens: int, acceptance: Array, lookahead: int) -> tuple[Array, Array]:
    """How many forwards SI is expected to ask of its drafter and its target.

    With r tokens to go it drafts n, the lookahead or all that can be of use; if exactly x < n of them are
    right, r - 1 - x are left, and r - 1 - n if all are. `ahead` is the sum over x that all r share.
    """
    p = np.asarray(acceptance, float)
    left = [np.zeros((2, *p.shape))]  # drafts and forwards still to come, by tokens to go
    ahead = np.zeros((2, *p.shape))
    for togo in range(1, tokens + 1):
        block = min(lookahead, togo - 1)
        ahead = p * ahead + left[-1]
        if togo - 1 > lookahead:
            ahead = ahead - p**lookahead * left[togo - 1 - lookahead]
        spent = np.ones((2, *p.shape))
        spent[0] = block
        left.append(spent + (1 - p) * ahead + p**block * left[togo - 1 - block])
    drafts, forwards = left[-1]
    return drafts, forwards


def dsi(tokens: int, latencies: Latencies, acceptance: Array, lookahead: int, sp: int | None = None) -> Array:
    """Never take turns. `sp` None: as many targets as can be of use.

    Every rejection begins anew, with fewer tokens to go and no guess in flight, so the expected time with r
    tokens to go is that until the first rejection, and then that of what is left.
    """
    p = np.asarray(acceptance, float)
    (target, drafter, *first), unit = whole(latencies.target, latencies.drafter, *latencies.first)
    # What comes after the first rejection: with one token more to go, as before if the next guess is right,
    # and all that is left if it is wrong: p * after + (begun + (1 - p) * after).
    after = np.zeros(p.shape)
    for begun in _until_rejection(tokens - 1, Pace(target, drafter), p, lookahead, sp):
        after = begun + after
    slow_start = Pace(target, drafter, first[0] - target, first[1] - drafter)
    *_, begun = _until_rejection(tokens, slow_start, p, lookahead, sp)
    return (begun + (1 - p) * after) / unit


def whole(*numbers: Number) -> tuple[list[int], int]:
    """The numbers as whole ones, and how many of these make one: equal times are then exactly equal."""
    values = [exact(number) for number in numbers]
    unit = lcm(*(value.denominator for value in values))
    return [int(value * unit) for value in values], unit


@dataclass(frozen=True)
class Pace:
    """What forwards take; and how much longer the first ones do, of a target and of a drafter."""

    target: int
    drafter: int
    late: int = 0
    slow: int = 0

    def guessed(self, guesses: int) -> int:
        """When so many guesses are there."""
        return self.slow + guesses * self.drafter


def _until_rejection(tokens: int, pace: Pace, p: Array, lookahead: int, sp: int | None) -> Iterator[Array]:
    """The expected time until a guess is rejected or all is certain, with 1, 2, ... `tokens` to go.

    Block 0 is the watch on the root, which begins at once. The next one begins when `lookahead` guesses wait
    to be judged, when the text has grown to the first of them, or when there is nothing left to guess; and
    when a target is free. The first wrong guess is found when its block ends.
    """
    ends = [pace.late + pace.target]
    judged = 0  # guesses that belong to blocks so far
    found = (1 - p) * ends[0]
    if tokens > 0:
        yield found + p * ends[0]
    for guesses in range(1, tokens):
        last = _end(ends, pace.guessed(guesses), pace, sp)
        yield found + p ** (judged + 1) * last
        full = guesses - judged == lookahead
        if full or pace.guessed(guesses + 1) > ends[-1]:
            end = last if full else _end(ends, ends[-1], pace, sp)
            found = found + (p ** (judged + 1) - p ** (guesses + 1)) * end
            judged = guesses
            ends.append(end)


def _end(ends: Sequence[int], asked: int, pace: Pace, sp: int | None) -> int:
    """When a block ends that is asked for at this time, as the one after these: targets serve in turn."""
    free = pace.late if sp is None or len(ends) < sp else ends[len(ends) - sp]
    return max(asked, free) + pace.target
