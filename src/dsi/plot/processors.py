"""Expected latency by the number of processors, a line for each algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from dsi.planning.simulation import TITLES
from dsi.plot import style


def figure(lines: Mapping[str, Mapping[int, float]], label: str) -> Figure:
    """Draw milliseconds per token; many processors get a logarithmic axis."""
    picture = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = picture.subplots()
    for name, line in lines.items():
        colour = style.ALGORITHM_COLOURS[name]
        axes.plot(list(line), list(line.values()), marker="o", label=TITLES[name], color=colour)
    if max(max(line) for line in lines.values()) > 16:
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processors")
    axes.set_ylabel("expected ms per token")
    axes.set_title(label, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    return picture
