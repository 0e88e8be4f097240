"""Who is the fastest with the same processors: bars of tokens per second for each class of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsi.experiments.budget import Table
from dsi.plot.timeline import rendered

COLOURS = {"nonsi": "#9aa5b1", "si": "#f2b134", "pearl": "#8fd0cf", "dsi": "#3b6fb6", "auto": "#7a4fa3"}


def figure(tables: Sequence[Table], heading: str) -> Figure:
    """Two panels in a row, on one scale."""
    columns = min(2, len(tables))
    rows, bars = -(-len(tables) // columns), len(tables[0].entries)
    size = 2 + 5 * columns, (0.3 * bars + 0.9) * rows + 0.5
    picture = Figure(figsize=size, layout="constrained")
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


def save(tables: Sequence[Table], heading: str, path: Path) -> None:
    """The format is the suffix's."""
    path.write_bytes(rendered(figure(tables, heading), path.suffix[1:]))


def _panel(axes: Axes, table: Table) -> None:
    found = table.entries
    heights = [-i for i in range(len(found))]
    middles = [each.tokens_per_second for each in found]
    # Rounding must not make a whisker negative: that cannot be drawn.
    whiskers = [
        [max(0.0, each.tokens_per_second - each.low) for each in found],
        [max(0.0, each.high - each.tokens_per_second) for each in found],
    ]
    colours = [COLOURS[each.algorithm] for each in found]
    axes.barh(heights, middles, xerr=whiskers, color=colours, height=0.75, error_kw={"linewidth": 1})
    axes.set_yticks(heights, [each.name for each in found], fontsize=8)
    known = "" if table.acceptance is None else f", acceptance {table.acceptance:.2f}"
    axes.set_title(f"{table.name}{known}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
