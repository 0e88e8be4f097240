"""Figure 1 of the paper for any setting: who computed what, when, as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dsi.experiments.records import Record

COLOURS = {
    "judged": ("#3b6fb6", "target, judged the text"),
    "stale": ("#c9d3e0", "target, stale"),
    "warmed": ("#8fd0cf", "target, reading ahead"),
    "accepted": ("#f2b134", "drafter, accepted"),
    "rejected": ("#d1495b", "drafter, rejected"),
}


def figure(records: Sequence[Record]) -> Figure:
    """One panel per run on one time axis, each server a row; ticks below mark tokens made certain."""
    rows = [len(_names(record)) + 1 for record in records]
    picture = Figure(figsize=(10, 0.28 * sum(rows) + 0.55 * len(records) + 0.9), layout="constrained")
    panels = picture.subplots(len(records), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, record in zip(panels, records):
        _panel(axes, record)
    panels[-1].set_xlabel(f"time (ms, {records[0].label})")
    seen = {block.outcome for record in records for block in record.blocks}
    patches = [Patch(color=colour, label=text) for key, (colour, text) in COLOURS.items() if key in seen]
    picture.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    return picture


def save(records: Sequence[Record], path: Path) -> None:
    """The format is the suffix's."""
    path.write_bytes(picture(records, path.suffix[1:]))


def picture(records: Sequence[Record], format: str) -> bytes:
    return rendered(figure(records), format)


def rendered(drawn: Figure, format: str) -> bytes:
    """SVG keeps its text as text, and is the same file each time."""
    out = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dsi", "svg.fonttype": "none"}):
        metadata = {"Date": None} if format == "svg" else None
        drawn.savefig(out, format=format, dpi=150, metadata=metadata)
    return out.getvalue()


def _names(record: Record) -> list[str]:
    worked = {block.server for block in record.blocks}
    return [name for name in record.servers if name in worked]


def _panel(axes: Axes, record: Record) -> None:
    names = _names(record)
    heights = {name: -row for row, name in enumerate(names)}
    for block in record.blocks:
        axes.barh(
            heights[block.server],
            block.end_ms - block.start_ms,
            left=block.start_ms,
            height=0.8,
            color=COLOURS[block.outcome][0],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.plot(record.times_ms, [-len(names)] * len(record.times_ms), "|", color="black", markersize=9)
    axes.set_yticks([*heights.values(), -len(names)], [*names, "text"], fontsize=8)
    axes.set_ylim(-len(names) - 0.6, 0.6)
    axes.set_title(f"{record.title}: {len(record.times_ms)} tokens in {record.total_ms:g} ms", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
