"""The same processors for every algorithm: GPUs (exact, from measured latencies) and cores (measured).

The latencies are those of a whole H200 (`benchmarks/results`). Under DSI, n GPUs are one for the drafter and
n - 1 for targets; under SI and non-SI all of them share each target forward, of which a share scales with
their number and the rest does not (`--parallel-fractions`). Nothing crowds anything: these are separate GPUs. On the
cores, the built-in pair writes for each class of prompts under each algorithm in each of its arrangements,
as in `dsi compare --budget`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import harness
from dsi.cli import output as show
from dsi.engine.engine import Engine
from dsi.experiments import budget
from dsi.experiments.budget import Table
from dsi.experiments.compare import CLASSES
from dsi.experiments.divergence import check_equal
from dsi.planning import theory
from dsi.planning.equation_1 import amdahl
from dsi.planning.latency import LatencyModel

TOKENS = 200
BLOCKS = (3, 5, 8, 12)  # that SI tries


def measured() -> dict[str, tuple[float, float]]:
    """Return for each target the milliseconds of its forward over a few tokens, and of the drafter's."""
    forwards = {}
    for path in sorted(harness.RESULTS.glob("h200-*.json")):
        for target in json.loads(path.read_text())["targets"]:
            if "whole_gpu" in target:
                costs = target["whole_gpu"]["costs"]
                forwards[target["shape"]] = costs["by_width"]["8"], costs["drafter_ms"]
    return forwards


def row(target: float, drafter: float, acceptance: float, gpus: int, parallel_fractions: list[float]) -> dict[str, Any]:
    latencies = LatencyModel(round(target, 3), round(drafter, 3))
    dsi = min(float(theory.dsi(TOKENS, latencies, acceptance, k, gpus - 1)) for k in range(1, 41))
    ms = {"dsi": dsi / TOKENS}
    for share in parallel_fractions:
        faster = LatencyModel(round(target * amdahl(share, gpus), 3), round(drafter, 3))
        si = min(float(theory.si(TOKENS, faster, acceptance, k)) for k in range(1, 41))
        ms |= {f"si {share:g}": si / TOKENS, f"nonsi {share:g}": theory.nonsi(TOKENS, faster) / TOKENS}
    return {"gpus": gpus, "acceptance": acceptance, "ms_per_token": ms}


def on_cores(cores: int, repeats: int, tokens: int) -> list[Table]:
    """Interleaved and repeated; all texts are checked to be equal."""
    configs = budget.configurations(budget.ALGORITHMS, cores, BLOCKS)
    count = len(configs) * sum(map(len, CLASSES.values())) * repeats
    with budget.engines(Engine.load, configs) as running, show.progress("texts", count) as advance:
        tables = budget.measured(running, CLASSES, repeats, {"max_new_tokens": tokens}, advance)
    for table in tables:
        check_equal(table.divergences)
    return tables


def exact_lines(tables: dict[str, list[dict[str, Any]]], acceptance: float) -> Iterator[str]:
    for shape, rows in tables.items():
        yield f"{shape}, acceptance {acceptance}: milliseconds per token, exact"
        names = list(rows[0]["ms_per_token"])
        cells = [(row["gpus"], *(f"{row['ms_per_token'][name]:.2f}" for name in names)) for row in rows]
        yield from harness.table(("GPUs", *names), cells)


def main() -> None:
    here = budget.cores_here()
    parser = harness.arguments(__doc__, "--repeats 0 --acceptance 0.93", tokens=96)
    parser.add_argument("--cores", type=int, default=here, choices=range(1, here + 1), help="of this machine")
    parser.add_argument("--repeats", type=harness.count, default=3, help="of each prompt on the cores; 0: only GPUs")
    parser.add_argument("--svg", type=harness.writable, metavar="FILE", help="also draw what the cores did")
    parser.add_argument(
        "--parallel-fractions", type=fractions, default="0.5,0.8", help="shares of a forward that scale with the GPUs"
    )
    parser.add_argument("--acceptance", type=harness.share, default=0.8)
    options = parser.parse_args()
    exact = {
        shape: [row(target, drafter, options.acceptance, gpus, options.parallel_fractions) for gpus in range(2, 9)]
        for shape, (target, drafter) in measured().items()
    }
    tables = on_cores(options.cores, options.repeats, options.tokens) if options.repeats else []
    if options.svg and tables:
        from dsi.plot import style
        from dsi.plot.budget import figure

        style.save(figure(tables, f"The same {options.cores} cores for every algorithm"), options.svg)
    on_this_machine = {"label": "measured", "cores": options.cores, "classes": [table.json() for table in tables]}
    results = {"rows": exact, "measured": on_this_machine if tables else None}
    lines = exact_lines(exact, options.acceptance)
    harness.report(options, "exact, from measured latencies", results, lines)
    if tables and not options.json:
        runs = tables[0].entries[0].runs
        about = f"{runs} texts of each class and configuration on {options.cores} cores, all equal"
        show.budget(tables, about, False, [])


def fractions(text: str) -> list[float]:
    return [harness.share(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
