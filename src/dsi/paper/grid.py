"""Figures 2 and 3 of the paper: every drafter latency and acceptance rate, each algorithm at its best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dsi.core.progress import Progress, no_progress
from dsi.planning import theory
from dsi.planning.equation_1 import minimal_lookahead
from dsi.planning.latency import LatencyModel

TOKENS, SP, MOST, STATIC = 100, 7, 200, 5
DRAFTERS = [Fraction(i, 100) for i in range(1, 101)]  # of the target's latency
ACCEPTANCES = np.arange(101) / 100

Table = Any  # an array: a row for each drafter latency, a column for each acceptance rate


@dataclass(frozen=True)
class Best:
    """The least expected times, in target forwards, and the lookaheads that reach them."""

    times: Table
    lookaheads: Table


@dataclass(frozen=True)
class Grid:
    """Expected times of `tokens` tokens in target forwards."""

    tokens: int
    sp: int
    si: Best
    dsi: Best  # lookaheads that Eq. (1) allows at this SP degree
    dsi_any: Best  # any lookahead at this SP degree: verifications may wait for a target
    dsi_enough: Best  # any lookahead, and as many targets as can be of use
    si_static: Table  # lookahead 5
    dsi_static: Table

    @property
    def nonsi(self) -> Table:
        return np.full_like(self.si.times, self.tokens)

    @property
    def baseline(self) -> Table:
        """The faster of SI and non-SI."""
        return np.minimum(self.si.times, self.nonsi)

    @property
    def settings(self) -> int:
        """How many settings this covers: lookaheads of no further effect are computed once."""
        allowed = sum(MOST + 1 - minimal_lookahead(1, drafter, self.sp) for drafter in DRAFTERS)
        return len(ACCEPTANCES) * (len(DRAFTERS) * MOST + allowed)


def grid(tokens: int = TOKENS, sp: int = SP, progress: Progress = no_progress) -> Grid:
    forwards = {k: theory.si_forwards(tokens, ACCEPTANCES, k) for k in range(1, MOST + 1)}
    si, few, any_, enough, si_static, dsi_static = [], [], [], [], [], []
    for drafter in DRAFTERS:
        latencies = LatencyModel(1, drafter)
        ours = {k: theory.dsi(tokens, latencies, ACCEPTANCES, k, sp) for k in blocks(drafter)}
        allowed = minimal_lookahead(1, drafter, sp)
        free = {k: theory.dsi(tokens, latencies, ACCEPTANCES, k) for k in blocks(drafter)}
        theirs = {k: theory.si_time(tokens, latencies, *counts) for k, counts in forwards.items()}
        si.append(best(theirs))
        few.append(best({k: times for k, times in ours.items() if k >= allowed}))
        any_.append(best(ours))
        enough.append(best(free))
        si_static.append(theirs[STATIC])
        dsi_static.append(theory.dsi(tokens, latencies, ACCEPTANCES, STATIC, sp))
        progress()
    static = np.array(si_static), np.array(dsi_static)
    return Grid(tokens, sp, stacked(si), stacked(few), stacked(any_), stacked(enough), *static)


def blocks(drafter: Fraction) -> range:
    """The lookaheads up to where a larger one no longer changes anything.

    When a verification takes as long as so many guesses, the text grows to the first unwatched place before
    there are more, and that place is watched at once.
    """
    return range(1, min(MOST, int(1 / drafter) + 2) + 1)


def best(times: dict[int, Any]) -> Best:
    """For each acceptance rate; the smallest lookahead of equals, up to rounding."""
    lookaheads, table = np.array(list(times)), np.array(list(times.values()))
    least = table.min(axis=0)
    return Best(least, lookaheads[(table <= least * (1 + 1e-12)).argmax(axis=0)])


def stacked(rows: Iterable[Best]) -> Best:
    rows = list(rows)
    return Best(np.array([row.times for row in rows]), np.array([row.lookaheads for row in rows]))
