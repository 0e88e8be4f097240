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

TOKENS, SP, MAX_LOOKAHEAD, STATIC_LOOKAHEAD = 100, 7, 200, 5
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
        """The number of settings covered; lookaheads of no further effect are computed once."""
        allowed = sum(MAX_LOOKAHEAD + 1 - minimal_lookahead(1, drafter, self.sp) for drafter in DRAFTERS)
        return len(ACCEPTANCES) * (len(DRAFTERS) * MAX_LOOKAHEAD + allowed)


def grid(tokens: int = TOKENS, sp: int = SP, progress: Progress = no_progress) -> Grid:
    forwards = {k: theory.si_forwards(tokens, ACCEPTANCES, k) for k in range(1, MAX_LOOKAHEAD + 1)}
    si, dsi, any_lookahead, enough_targets, si_static, dsi_static = [], [], [], [], [], []
    for drafter in DRAFTERS:
        latency = LatencyModel(1, drafter)
        dsi_times = {k: theory.dsi(tokens, latency, ACCEPTANCES, k, sp) for k in useful_lookaheads(drafter)}
        least = minimal_lookahead(1, drafter, sp)
        unlimited = {k: theory.dsi(tokens, latency, ACCEPTANCES, k) for k in useful_lookaheads(drafter)}
        si_times = {k: theory.si_time(tokens, latency, *counts) for k, counts in forwards.items()}
        si.append(best(si_times))
        dsi.append(best({k: times for k, times in dsi_times.items() if k >= least}))
        any_lookahead.append(best(dsi_times))
        enough_targets.append(best(unlimited))
        si_static.append(si_times[STATIC_LOOKAHEAD])
        dsi_static.append(theory.dsi(tokens, latency, ACCEPTANCES, STATIC_LOOKAHEAD, sp))
        progress()
    static = np.array(si_static), np.array(dsi_static)
    tables = stack(si), stack(dsi), stack(any_lookahead), stack(enough_targets)
    return Grid(tokens, sp, *tables, *static)


def useful_lookaheads(drafter: Fraction) -> range:
    """The lookaheads up to where a larger one no longer changes anything.

    When a verification takes as long as so many drafts, the verified text reaches the first unverified position
    before there are more, and that position is verified at once.
    """
    return range(1, min(MAX_LOOKAHEAD, int(1 / drafter) + 2) + 1)


def best(times: dict[int, Any]) -> Best:
    """The best lookahead at each acceptance rate; the smallest of equals, up to rounding."""
    lookaheads, table = np.array(list(times)), np.array(list(times.values()))
    least = table.min(axis=0)
    return Best(least, lookaheads[(table <= least * (1 + 1e-12)).argmax(axis=0)])


def stack(rows: Iterable[Best]) -> Best:
    rows = list(rows)
    return Best(np.array([row.times for row in rows]), np.array([row.lookaheads for row in rows]))
