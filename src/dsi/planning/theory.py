"""The expected time of non-SI, SI and DSI, computed exactly: nothing is sampled, and nothing is simulated.

As the paper assumes, draft tokens are accepted independently with the same probability, and a drafter is not
slower than its target. The acceptance rate may be an array, and then so is the result.
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
    """Raise if the drafter is slower than its target: the formulas do not hold then."""
    prefill = latency.prefill_ms
    for what, drafter, target in (
        ("drafter", latency.drafter_ms, latency.target_ms),
        ("drafter's first forward", prefill[1], prefill[0]),
    ):
        if drafter > target:
            raise ValueError(f"the {what} takes {drafter:g}: must not be more than the target's {target:g}")


def nonsi(tokens: int, latency: LatencyModel) -> float:
    """One target forward per token, the first of which is the prefill."""
    check_drafter(latency)
    return float(latency.prefill_ms[0] + (tokens - 1) * latency.target_ms)


def si(tokens: int, latency: LatencyModel, acceptance: Array, lookahead: int) -> Array:
    """Draft a block, verify it, repeat: the time is the sum of all forwards."""
    drafts, forwards = si_forwards(tokens, acceptance, lookahead)
    return si_time(tokens, latency, drafts, forwards)


def si_time(tokens: int, latency: LatencyModel, drafts: Array, forwards: Array) -> Array:
    check_drafter(latency)
    prefill = latency.prefill_ms[0] - latency.target_ms
    if tokens > 1:
        prefill += latency.prefill_ms[1] - latency.drafter_ms
    return drafts * float(latency.drafter_ms) + forwards * float(latency.target_ms) + float(prefill)


def si_forwards(tokens: int, acceptance: Array, lookahead: int) -> tuple[Array, Array]:
    """The expected numbers of drafter and target forwards under SI.

    With r tokens to go it drafts n, the lookahead or all that can be of use; if exactly x < n of them are
    accepted, r - 1 - x are left, and r - 1 - n if all are. `after_rejection` is the sum over x that all r share.
    """
    p = np.asarray(acceptance, float)
    left = [np.zeros((2, *p.shape))]  # drafts and forwards still to come, by tokens to go
    after_rejection = np.zeros((2, *p.shape))
    for togo in range(1, tokens + 1):
        block = min(lookahead, togo - 1)
        after_rejection = p * after_rejection + left[-1]
        if togo - 1 > lookahead:
            after_rejection = after_rejection - p**lookahead * left[togo - 1 - lookahead]
        turn = np.ones((2, *p.shape))
        turn[0] = block
        left.append(turn + (1 - p) * after_rejection + p**block * left[togo - 1 - block])
    drafts, forwards = left[-1]
    return drafts, forwards


def dsi(tokens: int, latency: LatencyModel, acceptance: Array, lookahead: int, sp: int | None = None) -> Array:
    """Draft and verify at once; without an `sp`, with as many targets as can be of use.

    Every rejection is a renewal, with fewer tokens to go and no draft token in flight, so the expected time with
    r tokens to go is that until the first rejection, and then that of what is left.
    """
    check_drafter(latency)
    p = np.asarray(acceptance, float)
    (target, drafter, *prefill), unit = to_integers(latency.target_ms, latency.drafter_ms, *latency.prefill_ms)
    # The time after the first rejection: with one token more to go, as before if the next draft token is accepted,
    # and all that is left if it is rejected: p * after + (until + (1 - p) * after).
    after = np.zeros(p.shape)
    for until in _until_rejection(tokens - 1, _Forwards(target, drafter), p, lookahead, sp):
        after = until + after
    with_prefill = _Forwards(target, drafter, prefill[0] - target, prefill[1] - drafter)
    *_, until = _until_rejection(tokens, with_prefill, p, lookahead, sp)
    return (until + (1 - p) * after) / unit


def to_integers(*numbers: Number) -> tuple[list[int], int]:
    """The numbers as integers of a common unit, and how many of them make one: equal times are then equal exactly."""
    values = [to_fraction(number) for number in numbers]
    unit = lcm(*(value.denominator for value in values))
    return [int(value * unit) for value in values], unit


class _Forwards(NamedTuple):
    """Latencies in integer units, and by how much the prefills exceed the other forwards."""

    target: int
    drafter: int
    target_prefill: int = 0
    drafter_prefill: int = 0

    def drafted_at(self, count: int) -> int:
        """When so many tokens are drafted."""
        return self.drafter_prefill + count * self.drafter


def _until_rejection(tokens: int, forwards: _Forwards, p: Array, lookahead: int, sp: int | None) -> Iterator[Array]:
    """The expected time until a draft token is rejected or all are verified, with 1, 2, ... `tokens` to go.

    Block 0 is the verification of the root, which starts at once. The next one starts when `lookahead` draft
    tokens wait for it, when the verified text has reached the first of them, or when there is nothing left to
    draft; and when a target is free. A rejection is known when its block ends.
    """
    ends = [forwards.target_prefill + forwards.target]
    in_blocks = 0  # draft tokens that belong to blocks so far
    rejected = (1 - p) * ends[0]
    if tokens > 0:
        yield rejected + p * ends[0]
    for drafted in range(1, tokens):
        last = _end(ends, forwards.drafted_at(drafted), forwards, sp)
        yield rejected + p ** (in_blocks + 1) * last
        full = drafted - in_blocks == lookahead
        if full or forwards.drafted_at(drafted + 1) > ends[-1]:
            end = last if full else _end(ends, ends[-1], forwards, sp)
            rejected = rejected + (p ** (in_blocks + 1) - p ** (drafted + 1)) * end
            in_blocks = drafted
            ends.append(end)


def _end(ends: Sequence[int], ready: int, forwards: _Forwards, sp: int | None) -> int:
    """When the next block ends if it is ready at this time: targets take blocks in turn."""
    free = forwards.target_prefill if sp is None or len(ends) < sp else ends[len(ends) - sp]
    return max(ready, free) + forwards.target
