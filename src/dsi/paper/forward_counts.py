"""What the paper's own online code counts, as an exact expectation, so that its speedups can be explained.

It differs from SI and DSI as they are described in four ways. The target's own token, which every
verification adds, is never counted. After each rejection SI pays for one more target forward, without drafts,
that DSI hides. Runs of accepted guesses are cut at 20. And DSI stops when the last tokens have been drafted.
"""

from __future__ import annotations

from collections.abc import Callable

from dsi.planning.latency import LatencyModel

CAP = 20

Spent = Callable[[int, int], float]  # of a run of so many accepted guesses, with so many tokens to go


def runs(acceptance: float) -> list[float]:
    """The chance of 0, 1, ... accepted guesses in a row."""
    return [acceptance**n * (1 - acceptance) for n in range(CAP)] + [acceptance**CAP]


def si(tokens: int, latencies: LatencyModel, acceptance: float, lookahead: int, extra: bool = True) -> float:
    """`extra`: whether the forward after each rejection is paid for."""
    block = float(lookahead * latencies.drafter_ms + latencies.target_ms)

    def spent(run: int, togo: int) -> float:
        if run >= togo:
            return block * min(run // lookahead + 1, -(-togo // lookahead))
        return block * (run // lookahead + 1) + extra * float(latencies.target_ms)

    return _prompt(latencies) + expected(tokens, acceptance, spent)


def dsi(tokens: int, latencies: LatencyModel, acceptance: float, lookahead: int) -> float:
    """Drafting up to the rejection, in whole blocks, and one verification that is not hidden."""
    block, target = float(lookahead * latencies.drafter_ms), float(latencies.target_ms)

    def spent(run: int, togo: int) -> float:
        blocks = -(-togo // lookahead) if run >= togo else run // lookahead + 1
        return block * blocks + target

    return _prompt(latencies) + expected(tokens, acceptance, spent)


def expected(tokens: int, acceptance: float, spent: Spent) -> float:
    """By the number of tokens to go; a run of none leaves as many as before."""
    chances = runs(acceptance)
    times = [0.0]
    for togo in range(1, tokens + 1):
        total = sum(
            chance * (spent(run, togo) + (times[togo - run] if 0 < run < togo else 0.0))
            for run, chance in enumerate(chances)
        )
        times.append(total / (1 - chances[0]))
    return times[-1]


def _prompt(latencies: LatencyModel) -> float:
    """What the first forwards take beyond later ones."""
    target, drafter = latencies.prefill_ms
    return float(target - latencies.target_ms + drafter - latencies.drafter_ms)
