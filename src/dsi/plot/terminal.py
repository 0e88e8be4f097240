"""A run drawn in text: one line per server, time to the right. Legible without colour."""

from __future__ import annotations

from rich.text import Text

from dsi.experiments.records import Record

# outcome: (glyph, colour, meaning); where several forwards share a cell, the later in this list shows.
GLYPHS = {
    "warmed": ("·", "cyan", "target reading ahead"),
    "stale": ("░", "bright_black", "target, stale"),
    "judged": ("█", "blue", "target"),
    "accepted": ("▄", "yellow", "drafter, accepted"),
    "rejected": ("×", "red", "drafter, rejected"),
}
EDGE = "▐"  # where a target's forward begins
RANKS = {outcome: rank for rank, outcome in enumerate(GLYPHS)}


def draw(record: Record, width: int, total_ms: float | None = None) -> Text:
    """The servers' lines and the text's; `total_ms` is what the whole width stands for."""
    names = [name for name in record.servers if any(block.server == name for block in record.blocks)]
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
    return text.append("digits: tokens made certain")


def _line(record: Record, server: str, scale: float) -> Text:
    cells: list[tuple[int, str, str]] = [(-1, " ", "")] * (int(record.total_ms * scale) + 1)
    for block in record.blocks:
        if block.server != server:
            continue
        first = int(block.start_ms * scale)
        last = max(first, int(block.end_ms * scale) - 1)
        glyph, colour, _ = GLYPHS[block.outcome]
        for i in range(first, min(last + 1, len(cells))):
            edge = EDGE if block.outcome == "judged" and i == first < last else glyph
            cells[i] = max(cells[i], (RANKS[block.outcome], edge, colour))
    return Text.assemble(*((glyph, colour) for _, glyph, colour in cells))


def _tokens(record: Record, scale: float) -> str:
    """How many tokens became certain in each cell: a digit, or + for more than nine."""
    counts = [0] * (int(record.total_ms * scale) + 1)
    for time in record.times_ms:
        counts[int(time * scale)] += 1
    return "".join(" " if n == 0 else str(n) if n < 10 else "+" for n in counts)
