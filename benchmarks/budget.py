"""The same processors for every algorithm: GPUs (exact, from measured latencies) and cores (measured).

The latencies are those of a whole H200 (`benchmarks/results`). Under DSI, n GPUs are one for the drafter and
n - 1 for targets; under SI and non-SI all of them share each target forward, of which a share scales with
their number and the rest does not (`--scales`). Nothing crowds anything: these are separate GPUs. On the
cores, the built-in pair writes for each class of prompts under each algorithm in each of its arrangements,
as in `dsi compare --budget`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsi.cli import output as show
from dsi.engine.engine import Engine
from dsi.experiments import budget
from dsi.experiments.budget import Table
from dsi.experiments.compare import CLASSES
from dsi.planning import theory
from dsi.planning.equation_1 import shared_out
from dsi.planning.latency import LatencyModel

RESULTS = Path(__file__).parent / "results"
TOKENS = 200
BLOCKS = (3, 5, 8, 12)  # that SI tries


def measured() -> dict[str, tuple[float, float]]:
    """Of each target: its forward over a few tokens and the drafter's, in milliseconds."""
    found = {}
    for path in sorted(RESULTS.glob("h200-*.json")):
        for target in json.loads(path.read_text())["targets"]:
            if "whole_gpu" in target:
                costs = target["whole_gpu"]["costs"]
                found[target["shape"]] = costs["by_width"]["8"], costs["drafter_ms"]
    return found


def row(target: float, drafter: float, acceptance: float, gpus: int, scales: list[float]) -> dict[str, Any]:
    latencies = LatencyModel(round(target, 3), round(drafter, 3))
    dsi = min(float(theory.dsi(TOKENS, latencies, acceptance, k, gpus - 1)) for k in range(1, 41))
    ms = {"dsi": dsi / TOKENS}
    for share in scales:
        faster = LatencyModel(round(target * shared_out(share, gpus), 3), round(drafter, 3))
        si = min(float(theory.si(TOKENS, faster, acceptance, k)) for k in range(1, 41))
        ms |= {f"si {share:g}": si / TOKENS, f"nonsi {share:g}": theory.nonsi(TOKENS, faster) / TOKENS}
    return {"gpus": gpus, "acceptance": acceptance, "ms_per_token": ms}


def on_cores(cores: int, repeats: int, tokens: int) -> list[Table]:
    """Interleaved and repeated; all texts are checked to be equal."""
    entrants = budget.contenders(budget.ALGORITHMS, cores, BLOCKS)
    count = len(entrants) * sum(map(len, CLASSES.values())) * repeats
    with budget.engines(Engine.load, entrants) as running, show.progress("texts", count) as advance:
        return budget.measured(running, CLASSES, repeats, {"max_new_tokens": tokens}, advance)


def main() -> None:
    here = budget.cores_here()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=here, choices=range(1, here + 1), help="of this machine")
    parser.add_argument("--repeats", type=int, default=3, help="of each prompt on the cores; 0: only GPUs")
    parser.add_argument("--tokens", type=int, default=96, help="of each text on the cores")
    parser.add_argument("--out", type=Path, help="a picture of what the cores did: .svg or .png")
    parser.add_argument("--scales", default="0.5,0.8", help="shares of a forward that scale with the GPUs")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scales = [float(share) for share in options.scales.split(",")]
    found = {
        shape: [row(target, drafter, options.acceptance, gpus, scales) for gpus in range(2, 9)]
        for shape, (target, drafter) in measured().items()
    }
    tables = on_cores(options.cores, options.repeats, options.tokens) if options.repeats else []
    if options.out and tables:
        from dsi.plot.budget import save

        save(tables, f"The same {options.cores} cores for every algorithm", options.out)
    if options.json:
        measured_here = {"label": "measured", "cores": options.cores, "classes": [t.json() for t in tables]}
        exact = {"label": "exact, from measured latencies", "rows": found}
        print(json.dumps(exact | {"measured": measured_here if tables else None}))
        return
    for shape, rows in found.items():
        print(f"{shape}, acceptance {options.acceptance}: milliseconds for each token, exact")
        names = list(rows[0]["ms_per_token"])
        print("GPUs  " + "  ".join(f"{name:>9}" for name in names))
        for each in rows:
            print(f"{each['gpus']:>4}  " + "  ".join(f"{each['ms_per_token'][name]:9.2f}" for name in names))
    if tables:
        runs = tables[0].entries[0].runs
        about = f"{runs} texts of each class and contender on {options.cores} cores, all equal"
        show.budget(tables, about, False, [])


if __name__ == "__main__":
    main()
