"""The expected time of non-SI, SI and DSI, computed exactly: nothing is sampled, and nothing is simulated.

As the paper assumes, each guess is right with the same probability, whatever came before, and a drafter is
not slower than its target. The acceptance rate may be an array, and so is the result then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from dsi.planning.equation_1 import Number, to_fraction
from dsi.planning.latency import LatencyModel

Array = Any  # a float or an array of floats, and so is what is computed from it


def check_drafter(latency: LatencyModel) -> None:
    """Raises where the drafter is slower than its target: the formulas do not hold then."""
    prefill = latency.prefill_ms
    for what, drafter, target in (
        ("drafter", latency.drafter_ms, latency.target_ms),
        ("drafter's first forward", prefill[1], prefill[0]),
    ):
        if drafter > target:
            raise ValueError(f"the {what} takes {drafter:g}: must not be more than the target's {target:g}")


def nonsi(tokens: int, latency: LatencyModel) -> float:
    """One forward for each token, the first of them over the prompt."""
    check_drafter(latency)
    return float(latency.prefill_ms[0] + (tokens - 1) * latency.target_ms)


def si(tokens: int, latency: LatencyModel, acceptance: Array, lookahead: int) -> Array:
    """Take turns: draft a block, verify it. The time is what the forwards take, one after the other."""
    drafts, forwards = si_forwards(tokens, acceptance, lookahead)
    return si_time(tokens, latency, drafts, forwards)


def si_time(tokens: int, latency: LatencyModel, drafts: Array, forwards: Array) -> Array:
    check_drafter(latency)
    prompt = latency.prefill_ms[0] - latency.target_ms
    if tokens > 1:
        prompt += latency.prefill_ms[1] - latency.drafter_ms
    return drafts * float(latency.drafter_ms) + forwards * float(latency.target_ms) + float(prompt)


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


def dsi(tokens: int, latency: LatencyModel, acceptance: Array, lookahead: int, sp: int | None = None) -> Array:
    """Never take turns. `sp` None: as many targets as can be of use.

    Every rejection begins anew, with fewer tokens to go and no guess in flight, so the expected time with r
    tokens to go is that until the first rejection, and then that of what is left.
    """
    check_drafter(latency)
    p = np.asarray(acceptance, float)
    (target, drafter, *first), unit = to_integers(latency.target_ms, latency.drafter_ms, *latency.prefill_ms)
    # What comes after the first rejection: with one token more to go, as before if the next guess is right,
    # and all that is left if it is wrong: p * after + (begun + (1 - p) * after).
    after = np.zeros(p.shape)
    for begun in _until_rejection(tokens - 1, _Forwards(target, drafter), p, lookahead, sp):
        after = begun + after
    slow_start = _Forwards(target, drafter, first[0] - target, first[1] - drafter)
    *_, begun = _until_rejection(tokens, slow_start, p, lookahead, sp)
    return (begun + (1 - p) * after) / unit


def to_integers(*numbers: Number) -> tuple[list[int], int]:
    """The numbers as whole ones, and how many of these make one: equal times are then exactly equal."""
    values = [to_fraction(number) for number in numbers]
    unit = lcm(*(value.denominator for value in values))
    return [int(value * unit) for value in values], unit


class _Forwards(NamedTuple):
    """Forwards in whole units of time, and by how much the prefills exceed them, of a target and of a drafter."""

    target: int
    drafter: int
    late: int = 0
    slow: int = 0

    def guessed(self, guesses: int) -> int:
        """When so many guesses are there."""
        return self.slow + guesses * self.drafter


def _until_rejection(tokens: int, forwards: _Forwards, p: Array, lookahead: int, sp: int | None) -> Iterator[Array]:
    """The expected time until a guess is rejected or all is certain, with 1, 2, ... `tokens` to go.

    Block 0 is the watch on the root, which begins at once. The next one begins when `lookahead` guesses wait
    to be judged, when the text has grown to the first of them, or when there is nothing left to guess; and
    when a target is free. The first wrong guess is found when its block ends.
    """
    ends = [forwards.late + forwards.target]
    judged = 0  # guesses that belong to blocks so far
    found = (1 - p) * ends[0]
    if tokens > 0:
        yield found + p * ends[0]
    for guesses in range(1, tokens):
        last = _end(ends, forwards.guessed(guesses), forwards, sp)
        yield found + p ** (judged + 1) * last
        full = guesses - judged == lookahead
        if full or forwards.guessed(guesses + 1) > ends[-1]:
            end = last if full else _end(ends, ends[-1], forwards, sp)
            found = found + (p ** (judged + 1) - p ** (guesses + 1)) * end
            judged = guesses
            ends.append(end)


def _end(ends: Sequence[int], asked: int, forwards: _Forwards, sp: int | None) -> int:
    """When a block ends that is asked for at this time, as the one after these: targets serve in turn."""
    free = forwards.late if sp is None or len(ends) < sp else ends[len(ends) - sp]
    return max(asked, free) + forwards.target
