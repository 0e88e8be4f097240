"""What all pictures share: the colours of algorithms and outcomes, and how a figure becomes a file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ALGORITHM_COLOURS = {"nonsi": "#9aa5b1", "si": "#f2b134", "pearl": "#8fd0cf", "dsi": "#3b6fb6", "auto": "#7a4fa3"}
OUTCOME_COLOURS = {
    "verified": "#3b6fb6",
    "stale": "#c9d3e0",
    "prefilled": "#8fd0cf",
    "accepted": "#f2b134",
    "rejected": "#d1495b",
}


def hide_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the path's suffix."""
    path.write_bytes(rendered(figure, path.suffix[1:]))


def rendered(figure: Figure, format: str) -> bytes:
    """Return the file's content: SVG keeps text as text, and both formats are reproducible to the byte."""
    out = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dsi", "svg.fonttype": "none"}):
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(out, format=format, dpi=150, metadata=metadata)
    return out.getvalue()
