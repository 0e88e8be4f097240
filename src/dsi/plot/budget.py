"""Tokens per second of every algorithm on the same processors: a panel of bars for each class of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsi.experiments.budget import Table
from dsi.plot import style
from dsi.plot.style import ALGORITHM_COLOURS


def figure(tables: Sequence[Table], heading: str) -> Figure:
    """Draw two panels in a row, all on one scale."""
    columns = min(2, len(tables))
    rows, bars = -(-len(tables) // columns), len(tables[0].entries)
    picture = Figure(figsize=(2 + 5 * columns, (0.3 * bars + 0.9) * rows + 0.5), layout="constrained")
    cells = picture.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes, table in zip(cells, tables):
        _panel(axes, table)
    for axes in cells[len(tables) :]:
        axes.set_axis_off()
    for axes in cells[max(0, len(tables) - columns) : len(tables)]:
        axes.set_xlabel(f"tokens per second ({tables[0].entries[0].label}; median and quartiles)")
        axes.tick_params(labelbottom=True)
    picture.suptitle(heading, fontsize=11)
    return picture


def _panel(axes: Axes, table: Table) -> None:
    entries = table.entries
    heights = [-i for i in range(len(entries))]
    medians = [entry.tokens_per_second for entry in entries]
    # Rounding must not make a whisker negative: matplotlib refuses it.
    whiskers = [
        [max(0.0, entry.tokens_per_second - entry.low) for entry in entries],
        [max(0.0, entry.high - entry.tokens_per_second) for entry in entries],
    ]
    colours = [ALGORITHM_COLOURS[entry.algorithm] for entry in entries]
    axes.barh(heights, medians, xerr=whiskers, color=colours, height=0.75, error_kw={"linewidth": 1})
    axes.set_yticks(heights, [entry.name for entry in entries], fontsize=8)
    acceptance = "" if table.acceptance is None else f", acceptance {table.acceptance:.2f}"
    axes.set_title(f"{table.name}{acceptance}", fontsize=10, loc="left")
    style.hide_frame(axes)
