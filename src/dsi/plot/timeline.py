"""Figure 1 of the paper for any setting: which server computed what, and when, as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dsi.experiments.records import Record
from dsi.plot import style
from dsi.plot.style import OUTCOME_COLOURS

LEGEND = {
    "verified": "target, verified the text",
    "stale": "target, stale",
    "prefilled": "target, prefill",
    "accepted": "drafter, accepted",
    "rejected": "drafter, rejected",
}


def figure(records: Sequence[Record]) -> Figure:
    """Draw one panel per run on one time axis, a row per server; ticks below mark the verified tokens."""
    rows = [len(record.active_servers) + 1 for record in records]
    picture = Figure(figsize=(10, 0.28 * sum(rows) + 0.55 * len(records) + 0.9), layout="constrained")
    panels = picture.subplots(len(records), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, record in zip(panels, records):
        _panel(axes, record)
    panels[-1].set_xlabel(f"time (ms, {records[0].label})")
    drawn = {block.outcome for record in records for block in record.blocks}
    patches = [Patch(color=OUTCOME_COLOURS[key], label=text) for key, text in LEGEND.items() if key in drawn]
    picture.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    return picture


def _panel(axes: Axes, record: Record) -> None:
    heights = {name: -row for row, name in enumerate(record.active_servers)}
    bottom = -len(heights)
    for block in record.blocks:
        axes.barh(
            heights[block.server],
            block.end_ms - block.start_ms,
            left=block.start_ms,
            height=0.8,
            color=OUTCOME_COLOURS[block.outcome],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.plot(record.times_ms, [bottom] * len(record.times_ms), "|", color="black", markersize=9)
    axes.set_yticks([*heights.values(), bottom], [*heights, "text"], fontsize=8)
    axes.set_ylim(bottom - 0.6, 0.6)
    axes.set_title(f"{record.title}: {len(record.times_ms)} tokens in {record.total_ms:g} ms", fontsize=10, loc="left")
    style.hide_frame(axes)
