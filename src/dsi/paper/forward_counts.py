"""The forwards that the paper's own online code counts, in exact expectation, to explain its speedups.

It differs from SI and DSI as they are described in four ways. The target's own token, which every
verification adds, is never counted. After each rejection SI pays for one more target forward, without draft
tokens, that DSI hides. Runs of accepted draft tokens are cut at 20. And DSI stops once the last tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Callable

from dsi.planning.latency import LatencyModel

LONGEST_RUN = 20

RunTime = Callable[[int, int], float]  # of a run of so many accepted draft tokens, with so many tokens to go


def run_probabilities(acceptance: float) -> list[float]:
    """The probabilities of 0, 1, ... accepted draft tokens in a row."""
    return [acceptance**n * (1 - acceptance) for n in range(LONGEST_RUN)] + [acceptance**LONGEST_RUN]


def si(tokens: int, latency: LatencyModel, acceptance: float, lookahead: int, extra: bool = True) -> float:
    """SI; `extra` says whether the forward after each rejection is counted."""
    block = float(lookahead * latency.drafter_ms + latency.target_ms)

    def run_time(run: int, to_go: int) -> float:
        if run >= to_go:
            return block * min(run // lookahead + 1, -(-to_go // lookahead))
        return block * (run // lookahead + 1) + extra * float(latency.target_ms)

    return _prefill(latency) + expected(tokens, acceptance, run_time)


def dsi(tokens: int, latency: LatencyModel, acceptance: float, lookahead: int) -> float:
    """Drafting up to the rejection, in whole blocks, and one verification that is not hidden."""
    block, target = float(lookahead * latency.drafter_ms), float(latency.target_ms)

    def run_time(run: int, to_go: int) -> float:
        blocks = -(-to_go // lookahead) if run >= to_go else run // lookahead + 1
        return block * blocks + target

    return _prefill(latency) + expected(tokens, acceptance, run_time)


def expected(tokens: int, acceptance: float, run_time: RunTime) -> float:
    """The expected time, by the number of tokens to go; a run of none leaves as many as before."""
    probabilities = run_probabilities(acceptance)
    times = [0.0]
    for to_go in range(1, tokens + 1):
        total = sum(
            probability * (run_time(run, to_go) + (times[to_go - run] if 0 < run < to_go else 0.0))
            for run, probability in enumerate(probabilities)
        )
        times.append(total / (1 - probabilities[0]))
    return times[-1]


def _prefill(latency: LatencyModel) -> float:
    """By how much the prefills exceed the other forwards."""
    target, drafter = latency.prefill_ms
    return float(target - latency.target_ms + drafter - latency.drafter_ms)
