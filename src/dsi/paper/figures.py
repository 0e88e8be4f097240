"""Figures 1, 2 and 3 of the paper as pictures, and the numbers behind the heatmaps as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from dsi.experiments.records import Record, record
from dsi.paper.grid import ACCEPTANCES, DRAFTERS, STATIC_LOOKAHEAD, Grid, Table
from dsi.paper.table1 import simulation
from dsi.plot.heatmap import Panel

SlowCell = tuple[Fraction, float, float]  # drafter latency, acceptance rate, and DSI's speed there


def figure1(case: str, tokens: int = 16) -> list[Record]:
    """The timelines of the three algorithms when every draft token is rejected, or every one is accepted."""
    config = simulation(case, tokens if case == "best" else 5)
    return [record(config, algorithm) for algorithm in ("nonsi", "si", "dsi")]


def figure2(grid: Grid) -> dict[str, Panel]:
    panels = _panels(grid.nonsi, grid.si.times, grid.dsi.times)
    return panels | {"min_dsi": Panel("(d) min(SI, non-SI)/DSI", grid.baseline / grid.dsi.times)}


def figure3(grid: Grid) -> dict[str, Panel]:
    return _panels(grid.nonsi, grid.si_static, grid.dsi_static)


def _panels(nonsi: Table, si: Table, dsi: Table) -> dict[str, Panel]:
    return {
        "nonsi_si": Panel("(a) non-SI/SI: SI's speed over non-SI's", nonsi / si),
        "si_dsi": Panel("(b) SI/DSI: DSI's speed over SI's", si / dsi),
        "nonsi_dsi": Panel("(c) non-SI/DSI: DSI's speed over non-SI's", nonsi / dsi),
    }


def headings(grid: Grid) -> tuple[str, str]:
    exact = f"exact expected times of {grid.tokens} tokens, SP {grid.sp}"
    return (
        f"Figure 2: each algorithm at its best lookahead of 1 to 200; {exact}",
        f"Figure 3: lookahead {STATIC_LOOKAHEAD}; {exact}",
    )


def rows(panel: Panel, columns: Mapping[str, Table]) -> Iterator[dict[str, str]]:
    """A row for each cell, the ratio last."""
    for i, drafter in enumerate(DRAFTERS):
        for j, acceptance in enumerate(ACCEPTANCES):
            cells = {name: f"{column[i, j]:.9g}" for name, column in (*columns.items(), ("speedup", panel.ratios))}
            yield {"drafter_latency": f"{float(drafter):g}", "acceptance_rate": f"{acceptance:g}", **cells}


def columns(grid: Grid, name: str, static: bool) -> dict[str, Table]:
    """The expected times, in target forwards, and the lookaheads that a panel compares."""
    algorithms = ("nonsi", "si", "dsi") if name == "min_dsi" else name.split("_")
    tables = {"nonsi_time": grid.nonsi}
    if static:
        tables |= {"si_time": grid.si_static, "dsi_time": grid.dsi_static}
    else:
        tables |= {"si_time": grid.si.times, "si_lookahead": grid.si.lookaheads}
        tables |= {"dsi_time": grid.dsi.times, "dsi_lookahead": grid.dsi.lookaheads}
    return {column: table for column, table in tables.items() if column.partition("_")[0] in algorithms}


def exceptions(grid: Grid) -> list[SlowCell]:
    """Where DSI is slower than the faster of SI and non-SI."""
    ratios = grid.baseline / grid.dsi.times
    return [
        (drafter, float(acceptance), float(ratios[i, j]))
        for i, drafter in enumerate(DRAFTERS)
        for j, acceptance in enumerate(ACCEPTANCES)
        if ratios[i, j] < 1 - 1e-9
    ]
