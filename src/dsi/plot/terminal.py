"""A run drawn as text: one line per server, time from left to right, legible without colour."""

from __future__ import annotations

from rich.text import Text

from dsi.experiments.records import Record

# outcome: (glyph, colour, meaning); where several forwards share a cell, the later in this list shows.
GLYPHS = {
    "prefilled": ("·", "cyan", "target, prefill"),
    "stale": ("░", "bright_black", "target, stale"),
    "verified": ("█", "blue", "target"),
    "accepted": ("▄", "yellow", "drafter, accepted"),
    "rejected": ("×", "red", "drafter, rejected"),
}
EDGE = "▐"  # where a target's forward begins
RANKS = {outcome: rank for rank, outcome in enumerate(GLYPHS)}


def draw(record: Record, width: int, total_ms: float | None = None) -> Text:
    """Draw a line per server and one for the text; the whole width stands for `total_ms`."""
    names = record.active_servers
    margin = max(len(name) for name in (*names, "text")) + 1
    scale = max(1, width - margin - 2) / (total_ms or record.total_ms)
    text = Text(no_wrap=True)
    for name in names:
        text.append(f"{name:>{margin - 1}} ")
        text.append(_line(record, name, scale))
        text.append("\n")
    text.append(f"{'text':>{margin - 1}} ")
    text.append(_tokens(record, scale), style="bold")
    return text


def legend() -> Text:
    text = Text()
    for glyph, colour, meaning in GLYPHS.values():
        text.append(f"{glyph * 2} ", style=colour)
        text.append(f"{meaning}   ")
    return text.append("digits: tokens verified")


def _line(record: Record, server: str, scale: float) -> Text:
    cells: list[tuple[int, str, str]] = [(-1, " ", "")] * (int(record.total_ms * scale) + 1)
    for block in record.blocks:
        if block.server != server:
            continue
        first = int(block.start_ms * scale)
        last = max(first, int(block.end_ms * scale) - 1)
        glyph, colour, _ = GLYPHS[block.outcome]
        for i in range(first, min(last + 1, len(cells))):
            edge = EDGE if block.outcome == "verified" and i == first < last else glyph
            cells[i] = max(cells[i], (RANKS[block.outcome], edge, colour))
    return Text.assemble(*((glyph, colour) for _, glyph, colour in cells))


def _tokens(record: Record, scale: float) -> str:
    """Count the tokens verified in each cell: a digit, or + for more than nine."""
    counts = [0] * (int(record.total_ms * scale) + 1)
    for time in record.times_ms:
        counts[int(time * scale)] += 1
    return "".join(" " if n == 0 else str(n) if n < 10 else "+" for n in counts)
