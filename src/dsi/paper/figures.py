"""Figures 1, 2 and 3 of the paper as pictures, and the numbers behind the heatmaps as CSV."""

from __future__ import annotations

import csv
import io
from fractions import Fraction
from typing import Any

from dsi.core.spec import SpecConfig
from dsi.experiments.records import Record, record
from dsi.paper.grid import ACCEPTANCES, DRAFTERS, STATIC_LOOKAHEAD, Grid
from dsi.paper.table1 import DRAFTER_MS, SP, TARGET_MS
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.plot.heatmap import Panel

CASES = {"worst": 0.0, "best": 1.0}

SlowCell = tuple[Fraction, float, float]  # drafter latency, acceptance rate, and DSI's speed there


def figure1(case: str, tokens: int = 16) -> list[Record]:
    """The timelines of the three algorithms when every draft token is rejected, or every one is accepted."""
    setting = SimulationConfig(
        LatencyModel(TARGET_MS, DRAFTER_MS),
        CASES[case],
        SP,
        tokens if case == "best" else 5,
        spec=SpecConfig(lookahead=1),
    )
    return [record(setting, algorithm) for algorithm in ("nonsi", "si", "dsi")]


def figure2(grid: Grid) -> dict[str, Panel]:
    return {
        "nonsi_si": Panel("(a) non-SI/SI: SI's speed over non-SI's", grid.nonsi / grid.si.times),
        "si_dsi": Panel("(b) SI/DSI: DSI's speed over SI's", grid.si.times / grid.dsi.times),
        "nonsi_dsi": Panel("(c) non-SI/DSI: DSI's speed over non-SI's", grid.nonsi / grid.dsi.times),
        "min_dsi": Panel("(d) min(SI, non-SI)/DSI", grid.baseline / grid.dsi.times),
    }


def figure3(grid: Grid) -> dict[str, Panel]:
    return {
        "nonsi_si": Panel("(a) non-SI/SI: SI's speed over non-SI's", grid.nonsi / grid.si_static),
        "si_dsi": Panel("(b) SI/DSI: DSI's speed over SI's", grid.si_static / grid.dsi_static),
        "nonsi_dsi": Panel("(c) non-SI/DSI: DSI's speed over non-SI's", grid.nonsi / grid.dsi_static),
    }


def headings(grid: Grid) -> tuple[str, str]:
    exact = f"exact expected times of {grid.tokens} tokens, SP {grid.sp}"
    return (
        f"Figure 2: each algorithm at its best lookahead of 1 to 200; {exact}",
        f"Figure 3: lookahead {STATIC_LOOKAHEAD}; {exact}",
    )


def table(panel: Panel, columns: dict[str, Any]) -> str:
    """A line for each cell, the ratio last."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["drafter_latency", "acceptance_rate", *columns, "speedup"])
    for i, drafter in enumerate(DRAFTERS):
        for j, acceptance in enumerate(ACCEPTANCES):
            cells = [f"{column[i, j]:.9g}" for column in (*columns.values(), panel.ratios)]
            writer.writerow([f"{float(drafter):g}", f"{acceptance:g}", *cells])
    return out.getvalue()


def columns(grid: Grid, name: str, static: bool) -> dict[str, Any]:
    """The expected times, in target forwards, and the lookaheads that a panel compares."""
    selected: dict[str, Any] = {}
    if "nonsi" in name or name == "min_dsi":
        selected["nonsi_time"] = grid.nonsi
    if name in ("nonsi_si", "si_dsi", "min_dsi"):
        selected["si_time"] = grid.si_static if static else grid.si.times
        if not static:
            selected["si_lookahead"] = grid.si.lookaheads
    if "_dsi" in name:
        selected["dsi_time"] = grid.dsi_static if static else grid.dsi.times
        if not static:
            selected["dsi_lookahead"] = grid.dsi.lookaheads
    return selected


def exceptions(grid: Grid) -> list[SlowCell]:
    """Where DSI is slower than the faster of SI and non-SI."""
    ratios = grid.baseline / grid.dsi.times
    return [
        (drafter, float(acceptance), float(ratios[i, j]))
        for i, drafter in enumerate(DRAFTERS)
        for j, acceptance in enumerate(ACCEPTANCES)
        if ratios[i, j] < 1 - 1e-9
    ]
