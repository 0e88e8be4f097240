"""What stale forwards cost DSI, and what cancel points and a minimum draft give back. Simulated.

Target 27 ms, drafter 1 ms, 100 tokens; SI and DSI each at their best lookahead. Prints DSI's speed over
SI's for each SP degree; `--svg FILE` draws it (docs/how-it-works.md shows the picture).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

import harness
from dsi.experiments.simulate import best
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.plot import style

REPEATS = 30
SPS = (1, 2, 3, 4, 7)
# (cancel points, thread pool): when a cancelled forward ends, and when a target takes its next job.
STOPS = {
    (1, True): "whole forwards",
    (1, False): "whole forwards, answers handled first",
    (8, True): "eight cancel points",
    (0, True): "stopped at once",
}
COLOURS = ("#d1495b", "#e08a3c", "#3b6fb6", "#4c9f70")
LOOKAHEADS = (2, 4, 6, 9, 14)
MIN_DRAFTS = {False: (0,), True: (1, 2, 4, 6, 9)}
Cell = tuple[float, int, tuple[int, bool], bool]  # acceptance, SP, how forwards stop, with a minimum draft


def dsi_ms(cell: Cell) -> float:
    acceptance, sp, (cancel_points, thread_pool), with_min_draft = cell
    latency = LatencyModel(27.0, 1.0, cancel_points=cancel_points)
    setting = SimulationConfig(latency, acceptance, sp, tokens=100, thread_pool=thread_pool)
    return best(setting, "dsi", LOOKAHEADS, MIN_DRAFTS[with_min_draft], repeats=REPEATS).mean_ms


def si_ms(acceptance: float) -> float:
    setting = SimulationConfig(LatencyModel(27.0, 1.0), acceptance, sp=1, tokens=100)
    return best(setting, "si", (3, 5, 8, 12, 16), (0,), repeats=REPEATS).mean_ms


def measure(acceptances: list[float]) -> dict[Cell, float]:
    """DSI's speed over SI's in each cell."""
    cells = list(product(acceptances, SPS, STOPS, (False, True)))
    with ProcessPoolExecutor() as pool:
        si = dict(zip(acceptances, pool.map(si_ms, acceptances)))
        ratios = {}
        for cell, ms in zip(cells, pool.map(dsi_ms, cells)):
            ratios[cell] = si[cell[0]] / ms
            harness.progress(len(ratios), len(cells), "cells")
    return ratios


def lines(ratios: dict[Cell, float]) -> Iterator[str]:
    for acceptance in sorted({cell[0] for cell in ratios}):
        yield f"\nacceptance {acceptance}: DSI's speed over SI's (simulated), SP = {SPS}"
        for stop, with_min_draft in product(STOPS, (False, True)):
            row = " ".join(f"{ratios[acceptance, sp, stop, with_min_draft]:5.2f}" for sp in SPS)
            yield f"  {row}   {STOPS[stop]}{', with a minimum draft' * with_min_draft}"


def draw(ratios: dict[Cell, float], path: Path) -> None:
    acceptances = sorted({cell[0] for cell in ratios})
    picture = Figure(figsize=(4 * len(acceptances) + 1, 4.2), layout="constrained")
    panels = picture.subplots(1, len(acceptances), sharey=True, squeeze=False)[0]
    for axes, acceptance in zip(panels, acceptances):
        for (stop, label), colour in zip(STOPS.items(), COLOURS):
            for with_min_draft, line in ((False, "--"), (True, "-")):
                values = [ratios[acceptance, sp, stop, with_min_draft] for sp in SPS]
                name = label + ", with a minimum draft" * with_min_draft
                axes.plot(SPS, values, line, marker="o", color=colour, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"acceptance {acceptance}", fontsize=10)
        axes.set_xlabel("SP degree (target servers)")
        axes.set_xticks(SPS)
    panels[0].set_ylabel("DSI's speed over SI's (simulated)")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    style.save(picture, path)


def main() -> None:
    parser = harness.arguments(__doc__, "--acceptance 0.63 0.8 0.93 --svg docs/stale.svg")
    parser.add_argument("--acceptance", type=harness.share, nargs="+", default=[0.63])
    parser.add_argument("--svg", type=harness.writable, metavar="FILE", help="also draw it")
    options = parser.parse_args()
    ratios = measure(options.acceptance)
    if options.svg:
        draw(ratios, options.svg)
    rows = [
        {
            "acceptance": acceptance,
            "sp": sp,
            "cancel_points": cancel_points,
            "thread_pool": thread_pool,
            "min_draft": min_draft,
            "speed": ratio,
        }
        for (acceptance, sp, (cancel_points, thread_pool), min_draft), ratio in ratios.items()
    ]
    harness.report(options, "simulated", {"rows": rows}, lines(ratios))


if __name__ == "__main__":
    main()
