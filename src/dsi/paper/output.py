"""Compute every table and figure of the paper, and write them once all are computed."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.paper import claims, figures, trees
from dsi.paper.grid import DRAFTERS, Grid, grid
from dsi.paper.table1 import CASES, Cell, table1
from dsi.paper.table2 import PAIRS, Line, table2
from dsi.paper.table3 import Ratio, table3
from dsi.plot import heatmap, style, timeline

STEPS = len(DRAFTERS) + len(PAIRS) + claims.CLAIMS  # reported as progress

Files = dict[str, bytes]


@dataclass(frozen=True)
class Findings:
    cells: list[Cell]
    lines: list[Line]
    ratios: list[Ratio]
    grid: Grid
    checks: list[claims.Check]
    examples: list[claims.Example]

    def json(self) -> dict[str, Any]:
        """The rows of each table; the figures are in files."""
        return {
            "table1": [asdict(cell) for cell in self.cells],
            "table2": [line.json() for line in self.lines],
            "table3": [asdict(ratio) for ratio in self.ratios],
            "figure2": summaries(figures.figure2(self.grid)),
            "figure3": summaries(figures.figure3(self.grid)),
            "exceptions": [
                {"drafter_latency": float(drafter), "acceptance_rate": rate, "speedup": speedup}
                for drafter, rate, speedup in figures.exceptions(self.grid)
            ],
            "largest_with_enough_targets": float((self.grid.dsi_enough.times / self.grid.baseline).max()),
            "largest_with_any_lookahead": float((self.grid.dsi_any.times / self.grid.baseline).max()),
            "theory": [check.json() for check in self.checks],
            "examples": [asdict(example) for example in self.examples],
        }


def summaries(panels: Mapping[str, heatmap.Panel]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "least": float(panel.ratios.min()),
            "most": float(panel.ratios.max()),
            "cells": panel.ratios.size,
            "slower": panel.slower,
        }
        for name, panel in panels.items()
    }


def findings(
    repeats: int = 100, waited: int = 0, profiles: Iterable[Path] = (), progress: Progress = no_progress
) -> Findings:
    return Findings(
        ratios=table3(profiles),
        cells=table1(),
        grid=grid(progress=progress),
        lines=table2(repeats, waited, progress),
        checks=claims.checks(progress),
        examples=claims.examples(),
    )


def figure1_files() -> Files:
    drawn = {case: timeline.figure(figures.figure1(case)) for case in CASES}
    return {f"figure1_{case}.svg": style.rendered(picture, "svg") for case, picture in drawn.items()}


def figure2_files(grid: Grid) -> Files:
    return _heatmaps("figure2", figures.figure2(grid), figures.headings(grid)[0], grid, static=False)


def figure3_files(grid: Grid) -> Files:
    return _heatmaps("figure3", figures.figure3(grid), figures.headings(grid)[1], grid, static=True)


def trees_files(cells: trees.TreeGrid) -> Files:
    panels = trees.panels(cells)
    picture = style.rendered(heatmap.figure(list(panels.values()), trees.HEADING), "png")
    return {"trees.png": picture} | {
        f"trees_{name}.csv": to_csv(figures.rows(panel, trees.columns(cells, name))) for name, panel in panels.items()
    }


def _heatmaps(name: str, panels: Mapping[str, heatmap.Panel], heading: str, grid: Grid, static: bool) -> Files:
    files = {f"{name}.png": style.rendered(heatmap.figure(list(panels.values()), heading), "png")}
    for key, panel in panels.items():
        files[f"{name}_{key}.csv"] = to_csv(figures.rows(panel, figures.columns(grid, key, static)))
    return files


def table_files(findings: Findings) -> Files:
    lines = [line.json() for line in findings.lines]
    for line in lines:
        drafters, waited = line.pop("simulated_drafters"), line.pop("waited") or {}
        line |= line.pop("pair")
        line |= {f"simulated_{number}_drafters": speedup for number, speedup in drafters.items()}
        line |= {f"waited_{name}": value for name, value in waited.items()}
    return {
        "table1.csv": to_csv(asdict(cell) for cell in findings.cells),
        "table2.csv": to_csv(lines),
        "table3.csv": to_csv(asdict(ratio) for ratio in findings.ratios),
        "theory.csv": to_csv(check.json() for check in findings.checks),
        "examples.csv": to_csv(asdict(example) for example in findings.examples),
    }


def to_csv(rows: Iterable[dict[str, Any]]) -> bytes:
    rows = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def check_folder(folder: Path) -> Path:
    """Raise, before anything is computed, if the folder cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def write(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write each file atomically."""
    for name, content in files.items():
        partial = folder / f".{name}.part"
        partial.write_bytes(content)
        os.replace(partial, folder / name)
    return [folder / name for name in files]
