"""What stale forwards cost DSI, and what stopping them early and patience give back. Simulated.

Target 27 ms, drafter 1 ms, 100 tokens; SI and DSI each at their best lookahead. Prints DSI's speed over
SI's for each SP degree; `--svg FILE` draws it (docs/how-it-works.md shows the picture).
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from dsi.experiments.simulate import best
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

REPEATS = 30
SPS = (1, 2, 3, 4, 7)
# (pieces, eager): what becomes of a cancelled forward, and when a target that answered takes its next job.
STOPS = {
    (1, True): "whole forwards",
    (1, False): "whole forwards, answers handled first",
    (8, True): "stopped between eight pieces",
    (0, True): "stopped at once",
}
COLOURS = ("#d1495b", "#e08a3c", "#3b6fb6", "#4c9f70")
LOOKAHEADS = (2, 4, 6, 9, 14)
PATIENCES = {False: (0,), True: (1, 2, 4, 6, 9)}
Cell = tuple[float, int, tuple[int, bool], bool]  # acceptance, SP, how forwards stop, patient


def dsi_ms(cell: Cell) -> float:
    acceptance, sp, (pieces, eager), patient = cell
    setting = SimulationConfig(LatencyModel(27.0, 1.0, cancel_points=pieces), acceptance, sp, tokens=100, eager=eager)
    return best(setting, "dsi", LOOKAHEADS, PATIENCES[patient], repeats=REPEATS).mean_ms


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
            print(f"\r{len(ratios)} of {len(cells)} cells", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return ratios


def show(ratios: dict[Cell, float]) -> None:
    for acceptance in sorted({cell[0] for cell in ratios}):
        print(f"\nacceptance {acceptance}: DSI's speed over SI's (simulated), SP = {SPS}")
        for stop, patient in product(STOPS, (False, True)):
            row = " ".join(f"{ratios[acceptance, sp, stop, patient]:5.2f}" for sp in SPS)
            print(f"  {row}   {STOPS[stop]}{', with patience' * patient}")


def draw(ratios: dict[Cell, float], path: Path) -> None:
    acceptances = sorted({cell[0] for cell in ratios})
    picture = Figure(figsize=(4 * len(acceptances) + 1, 4.2), layout="constrained")
    panels = picture.subplots(1, len(acceptances), sharey=True, squeeze=False)[0]
    for axes, acceptance in zip(panels, acceptances):
        for (stop, label), colour in zip(STOPS.items(), COLOURS):
            for patient, style in ((False, "--"), (True, "-")):
                values = [ratios[acceptance, sp, stop, patient] for sp in SPS]
                name = label + ", with patience" * patient
                axes.plot(SPS, values, style, marker="o", color=colour, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"acceptance {acceptance}", fontsize=10)
        axes.set_xlabel("SP degree (target servers)")
        axes.set_xticks(SPS)
    panels[0].set_ylabel("DSI's speed over SI's (simulated)")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "dsi", "svg.fonttype": "none"}):
        picture.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.63])
    parser.add_argument("--svg", type=Path, help="also draw it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ratios = measure(options.acceptance)
    if options.svg:
        draw(ratios, options.svg)
    if options.json:
        rows = [
            {"acceptance": p, "sp": sp, "pieces": pieces, "eager": eager, "patient": patient, "speed": ratio}
            for (p, sp, (pieces, eager), patient), ratio in ratios.items()
        ]
        print(json.dumps({"label": "simulated", "rows": rows}))
    else:
        show(ratios)


if __name__ == "__main__":
    main()
