"""Heatmaps of speedups by drafter latency and acceptance rate; slowdowns are pink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

PINK = "#ff8fc7"
FINE_TICKS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5)  # for a colour bar that ends near 1
TOLERANCE = 1e-9  # ratios this close to 1 count as 1


@dataclass(frozen=True)
class Panel:
    """How many times as fast one algorithm is as another.

    One row per drafter latency in percent, 1 to 100, and one column per acceptance rate, 0 to 100.
    """

    title: str
    ratios: Any

    @property
    def slower(self) -> int:
        return int((self.ratios < 1 - TOLERANCE).sum())


def figure(panels: Sequence[Panel], heading: str) -> Figure:
    """Draw two panels in a row, legible at the width of a page."""
    rows = -(-len(panels) // 2)
    picture = Figure(figsize=(10, 4.2 * rows + 0.5), layout="constrained")
    cells = picture.subplots(rows, 2, squeeze=False).ravel()
    for axes, panel in zip(cells, panels):
        _draw(picture, axes, panel)
    for axes in cells[len(panels) :]:
        axes.set_axis_off()
    picture.suptitle(heading, fontsize=11)
    return picture


def _draw(picture: Figure, axes: Axes, panel: Panel) -> None:
    ratios = np.where(np.abs(panel.ratios - 1) < TOLERANCE, 1, panel.ratios)
    most = max(1.01, float(ratios.max()))
    image = axes.imshow(
        ratios.T,
        origin="lower",
        extent=(0.5, 100.5, -0.5, 100.5),
        cmap=colormaps["viridis"].with_extremes(under=PINK),
        norm=LogNorm(1, most),
        interpolation="nearest",
    )
    axes.set_xlabel("drafter latency (% of the target's)")
    axes.set_ylabel("acceptance rate (%)")
    slower = f"slower in {panel.slower:,} of {ratios.size:,} cells" if panel.slower else "never slower"
    axes.set_title(f"{panel.title}\n{ratios.min():.3f} to {most:.2f}; {slower}", fontsize=10)
    bar = picture.colorbar(image, ax=axes, extend="min" if panel.slower else "neither", label="times as fast")
    bar.ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if most > 3 else FINE_TICKS))
    bar.ax.yaxis.set_major_formatter(ScalarFormatter())
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
