"""Rewrite the tables of the documentation that come from result files (`benchmarks/results`).

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the newest complete result is shown.
`--check` changes nothing, and exits with status 1 where a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import engines
import faults
import forwards
import harness

ROOT = harness.RESULTS.parents[1]
PAGES = ("README.md", "docs/results.md", "docs/gpu.md")
SHAPES = {"llama-1.1b": "1.1B", "vicuna-7b": "7B", "vicuna-13b": "13B"}
H200_ROW = "| DSI's speed over SI's, several targets on one H200 in slices"
Row = dict[str, Any]


def newest(name: str = "h200", is_wanted: Callable[[Row], bool] | None = None) -> Path:
    """Return the newest complete run of a benchmark, or the newest that is wanted."""
    runs = {path: json.loads(path.read_text()) for path in harness.RESULTS.glob(f"{name}-*.json")}
    complete = [path for path, run in runs.items() if (is_wanted or COMPLETE[name])(run)]
    return max(complete, key=lambda path: (date_of(runs[path]), path.name))


def date_of(run: Row) -> str:
    return str(run.get("date") or run["machine"]["date"])


def is_complete(run: Row) -> bool:
    """Whether a run of `h200.py` has every target, the whole GPU, and Table 2."""
    whole = {target["shape"] for target in run["targets"] if "whole_gpu" in target}
    return whole == set(SHAPES) and bool(run["table2"])


def targets(run: Row) -> list[Row]:
    """Those of a run of `h200.py` from the smallest to the largest, in whatever order they were measured."""
    return sorted(run["targets"], key=lambda target: list(SHAPES).index(target["shape"]))


def slices(run: Row) -> Iterator[str]:
    heads = (
        "target",
        "acceptance",
        "SP, lookahead, min draft",
        "DSI over SI",
        "DSI over non-SI (by total)",
        "over virtual time",
        "DSI, ms a token",
    )
    rows = [
        (SHAPES[target["shape"]], cell["acceptance"], config(cell), *ratios(cell), f"{cell['ms_per_token']['dsi']:.2f}")
        for target in targets(run)
        for cell in target["cells"]
    ]
    return harness.markdown(heads, rows)


def config(cell: Row) -> str:
    dsi = cell["dsi"]
    return f"{dsi['sp']}, {dsi['lookahead']}, {dsi.get('min_draft', dsi.get('patience'))}"


def ratios(cell: Row) -> tuple[str, str, str]:
    """Format the speed over SI and non-SI, and the time over virtual time."""
    low, high = cell["spread"]
    total = fmean(cell["ms"]["nonsi"]) / fmean(cell["ms"]["dsi"])
    return (
        f"{cell['dsi_over_si']:.2f} ({low:.2f} to {high:.2f})",
        f"{cell['dsi_over_nonsi']:.2f} ({total:.2f})",
        f"{cell['measured_over_virtual']:.3f}",
    )


def table2(run: Row) -> Iterator[str]:
    heads = (
        "target + drafter, dataset",
        "target ms",
        "drafter ms",
        "published",
        "DSI over SI, measured",
        "DSI over non-SI (by total)",
        "over virtual time",
    )
    rows = [
        (
            row["pair"],
            f"{row['costs']['by_width']['1']:.1f}",
            f"{row['costs']['drafter_ms']:.2f}",
            f"{row['published']:.2f}",
            *ratios(row),
        )
        for row in run["table2"]
    ]
    return harness.markdown(heads, rows)


def whole_gpu(run: Row) -> Iterator[str]:
    """Compare one whole GPU under SI and non-SI with DSI in slices of it, on the same texts."""
    heads = ("target", "acceptance", "DSI in slices", "SI, whole GPU", "non-SI, whole GPU")
    rows = []
    for target in targets(run):
        pairs = list(zip(target["cells"], target["whole_gpu"]["cells"]))
        dsi = [dsi_ms(cell, texts=max(map(len, whole["ms"].values()))) for cell, whole in pairs]
        si = [min(ms for name, ms in whole["ms_per_token"].items() if name.startswith("si")) for _, whole in pairs]
        rates = ", ".join(str(cell["acceptance"]) for cell, _ in pairs)
        nonsi = pairs[0][1]["ms_per_token"]["nonsi"]
        rows.append((SHAPES[target["shape"]], rates, listed(dsi), listed(si), f"{nonsi:.2f}"))
    return harness.markdown(heads, rows)


def dsi_ms(cell: Row, texts: int) -> float:
    """Return DSI's milliseconds per token over the first texts."""
    times = cell["ms"]["dsi"]
    tokens = median(times) / cell["ms_per_token"]["dsi"]
    return float(fmean(times[:texts]) / tokens)


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def h200_row(run: Row) -> str:
    """Format the line of the README's and the results page's table."""
    speeds = "; ".join(
        listed([cell["dsi_over_si"] for cell in target["cells"]]) + f" ({SHAPES[target['shape']]})"
        for target in targets(run)
    )
    over = [cell["measured_over_virtual"] for target in run["targets"] for cell in target["cells"]]
    claim = f"{H200_ROW}, at acceptance 0.63, 0.8, 0.93"
    figure = f"{speeds}; {min(over):.2f} to {max(over):.2f} of virtual time"
    label = f"measured {date_of(run)}, random weights, acceptance by an oracle"
    return f"{claim} | {figure} | {label} | `python benchmarks/h200.py` |"


def source(_: Row) -> Iterator[str]:
    yield f"From `{newest().name}` in `benchmarks/results`."


def fault_table(run: Row) -> Iterator[str]:
    return faults.table(run["rows"])


def has_every_fault(run: Row) -> bool:
    """Whether a run of `faults.py` has both kinds of fleet, and the server."""
    return {row["fleet"] for row in run["rows"]} == {"processes", "ray"} and "server" in run


def newest_of_each(name: str, key: Callable[[Row], Any]) -> Row:
    """Return the newest runs of a benchmark, one for each pair or number format."""
    runs = [json.loads(path.read_text()) for path in sorted(harness.RESULTS.glob(f"{name}-*.json"))]
    return {"runs": list({key(run): run for run in sorted(runs, key=date_of)}.values())}


def peers_table(run: Row) -> Iterator[str]:
    """Median tokens per second by class of prompts, and the speed of `auto` over the best of llama.cpp's rows."""
    for pair in run["runs"]:
        names, rates = pair["pair"], pair["tokens_per_second"]
        yield f"{MODELS.get(names['target'], names['target'])}, drafter {names['drafter']}, {names['dtype']}:"
        yield ""
        rows = [
            (row, *(f"{median(by_row[row]):.0f}" for by_row in rates.values())) for row in next(iter(rates.values()))
        ]
        over = pair["over_llama_cpp"]
        best = ("**auto over llama.cpp at its best**", *(f"**{over[name]:.2f}**" for name in rates))
        yield from harness.markdown(("tokens per second", *rates), [*rows, best])
        others = ", ".join(f"{count} of {row}" for row, count in pair["other_texts"].items())
        yield ""
        yield f"{pair['texts']} texts of each row; other texts than ours: {others or 'none'}."
        yield ""


def forwards_table(run: Row) -> Iterator[str]:
    heads = ("", "tokens", "compiled, ms", "torch, ms", "llama.cpp, ms", "of torch's time", "of llama.cpp's time")
    rows = [
        (
            f"{role}, {pair['dtype']}",
            width,
            *(f"{median(times[name][width]):.2f}" for name in times),
            *(f"{forwards.ratio(times, name, width):.2f}" for name in (forwards.TORCH, forwards.LLAMA_CPP)),
        )
        for pair in run["runs"]
        for role, times in pair["ms"].items()
        for width in times[forwards.COMPILED]
    ]
    return harness.markdown(heads, rows)


def batches_table(run: Row) -> Iterator[str]:
    """Tokens per second of the server and of transformers' batches, and the delay of a short request."""
    heads = ("", "texts at once", "`dsi serve`, tokens/s", "transformers batched", "ratio", "texts that differ", "its")
    rows = [
        (
            pair["dtype"],
            row["streams"],
            *(f"{median(row['tokens_per_second'][name]):.0f}" for name in ("server", "transformers")),
            harness.extremes(row["ratios"]),
            *row["differing"].values(),
        )
        for pair in run["runs"]
        for row in pair["load"]
    ]
    yield from harness.markdown(heads, rows)
    yield ""
    for pair in run["runs"]:
        behind, alone = (median(pair["short"][name]) for name in ("behind_ms", "alone_ms"))
        ratio = harness.extremes(pair["short"]["ratios"])
        yield f"- 4 tokens behind 16 long requests, {pair['dtype']}: {behind:.0f} ms, alone {alone:.0f}: {ratio}"


def exact_table(run: Row) -> Iterator[str]:
    heads = ("logits of", "dtype", "rows compared", "differing")
    rows = [(row["model"], row["dtype"], row["rows"], row["differing"]) for row in run["logits"]]
    yield from harness.markdown(heads, rows)
    yield ""
    yield exact_texts(run)


def has_every_engine(run: Row) -> bool:
    """Whether a run of `engines.py` has all its parts."""
    pools = {(row["engine"], row["targets"]) for row in run["measured"]}
    return bool(run["waiting"] and run["verify"]) and pools >= {("dsi serve", 1), ("vLLM", 1), ("vLLM", 2)}


def engines_table(run: Row) -> Iterator[str]:
    """Milliseconds a token: what waits beside virtual time, what computes beside its own streaming."""
    for row in run["waiting"]:
        yield f"{engines.TARGETS} engines that wait {row['target_ms']:g} ms, waited:"
        yield ""
        yield from harness.markdown(("ms a token", "over HTTP", "virtual time"), engines.waiting_rows(row))
        yield ""
        yield f"DSI over SI: {engines.gains(row)}."
        yield ""
    heads = ("ms a token", *(f"{row['targets']} {row['engine']}, {row['dtype']}" for row in run["measured"]))
    columns = [{name: (ms, over) for name, ms, over in engines.measured_rows(row)} for row in run["measured"]]
    rows = [(name, *(" · ".join(column[name]) for column in columns)) for name in columns[0]]
    yield "Measured, the median, and how much of the time of the engine's own streaming:"
    yield ""
    yield from harness.markdown(heads, rows)
    yield ""
    for width, times in run["verify"].items():
        yield f"- A verification of {width} {'position' if width == '1' else 'positions'}: {engines.round_trip(times)}."


def exact_gpu_table(run: Row) -> Iterator[str]:
    """All runs on a GPU: each has some of the shapes, or the texts."""
    logits = {(row["model"], row["where"]): row for one in run["runs"] for row in one["logits"]}
    models, places = (list(dict.fromkeys(names)) for names in zip(*logits))
    cells = [[logits[model, place] for place in places] for model in models]
    lines = [[model, *(f"{row['differing']} of {row['rows']}" for row in own)] for model, own in zip(models, cells)]
    yield from harness.markdown(("rows of logits that differ", *places), lines)
    packed = [row for one in run["runs"] for row in one.get("packed", ())]
    if packed:
        rows, differing = (sum(row[name] for row in packed) for name in ("rows", "differing"))
        names = ", ".join(dict.fromkeys(row["model"] for row in packed))
        yield ""
        yield f"Of forwards that texts and draft trees share, {rows} rows ({names}): {differing} differ."
    for one in run["runs"]:
        for part, how in (("texts", ""), ("trees", " with draft trees, alone and 16 at once")):
            if one.get(part):
                yield ""
                yield exact_texts(one, part, how)


def gpu_forwards_table(run: Row) -> Iterator[str]:
    """A token of one text on a whole GPU, beside transformers."""
    heads = ("target", "ours", "compiled", "plain", "over compiled", "over plain")
    rows = []
    for one in run["runs"]:
        for row in one["rows"]:
            ours, *others = row["ms"].values()
            over = (harness.spread(harness.ratios(times, ours), 2) for times in others)
            rows.append((SHAPES[row["shape"]], *(f"{median(times):.2f}" for times in (ours, *others)), *over))
    return harness.markdown(heads, rows)


def exact_texts(run: Row, part: str = "texts", how: str = "") -> str:
    texts = run[part]
    total, differing = sum(row["texts"] for row in texts), sum(row["differing"] for row in texts)
    names = f"{len(texts)} configurations (non-SI, SI, PEARL, DSI, auto{how})"
    return f"{texts[0]['texts']} texts in {texts[0]['dtype']} under {names}: {differing} of {total} differ."


MODELS = {"build/smollm2": "SmolLM2-135M", "builtin": "the built-in target"}


def gpu_streams_table(run: Row) -> Iterator[str]:
    """Requests at once on a whole GPU, beside one alone under plain decoding."""
    heads = ("target", "streams", "plain decoding, all at once", "as `auto` chooses", "`auto` over plain", "tokens/s")
    rows = []
    for shape, part in run["shapes"].items():
        for row in part["streams"]:
            one, plain, chosen = row["tokens_per_second"].values()
            over = (harness.spread(harness.ratios(*pair), 2) for pair in ((plain, one), (chosen, one), (chosen, plain)))
            rows.append((SHAPES[shape], row["streams"], *over, f"{median(chosen):.0f}"))
    return harness.markdown(heads, rows)


def has_trees(run: Row) -> bool:
    """Whether a run of `h200.py` has SI with trees on the whole GPU."""
    cells = [cell for target in run["targets"] for cell in target.get("whole_gpu", {}).get("cells", ())]
    return any("si_tree" in cell for cell in cells)


def trees_table(run: Row) -> Iterator[str]:
    heads = ("target", "acceptance", "SI with the best chain, ms a token", "with the best tree", "tree over chain")
    rows = []
    for target in targets(run):
        for cell in target["whole_gpu"]["cells"]:
            chain, (tree, over) = f"si {cell['si_lookahead']}", cell["si_tree"].values()
            seeds = [a / b for a, b in zip(cell["ms"][chain], cell["ms"][tree])]
            rows.append(
                (
                    SHAPES[target["shape"]],
                    cell["acceptance"],
                    f"{cell['ms_per_token'][chain]:.2f} (lookahead {cell['si_lookahead']})",
                    f"{cell['ms_per_token'][tree]:.2f} ({tree.removeprefix('tree si ')})",
                    f"{over:.2f} ({min(seeds):.2f} to {max(seeds):.2f})",
                )
            )
    return harness.markdown(heads, rows)


COMPLETE: dict[str, Callable[[Row], bool]] = {
    "h200": is_complete,
    "faults": has_every_fault,
    "exact": lambda run: bool(run["logits"] and run["texts"]),
    "gpu_streams": lambda run: "vicuna-7b" in run["shapes"],
    "gpu_batches": lambda run: bool(run["load"]),
    "engines": has_every_engine,
}
SECTIONS: dict[str, Callable[[Row], Iterator[str]]] = {  # each begins with the name of its benchmark
    "h200 source": source,
    "h200 slices": slices,
    "h200 table 2": table2,
    "h200 whole": whole_gpu,
    "faults": fault_table,
    "peers": peers_table,
    "forwards": forwards_table,
    "batches": batches_table,
    "exact": exact_table,
    "exact_gpu": exact_gpu_table,
    "gpu_forwards": gpu_forwards_table,
    "gpu_streams": gpu_streams_table,
    "gpu_batches": lambda run: batches_table({"runs": [run]}),
    "trees": trees_table,
    "engines": engines_table,
}


def rewritten(text: str, runs: dict[str, Row]) -> str:
    """Return the page with its generated sections and lines made from these runs."""
    for name, section in SECTIONS.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        body = "\n".join(section(runs[name.partition(" ")[0]]))
        text = re.sub(pattern, rf"\1\n{body}\n\n\2", text, flags=re.DOTALL)
    lines = [h200_row(runs["h200"]) if line.startswith(H200_ROW) else line for line in text.split("\n")]
    return "\n".join(lines)


def parts_of_exact(run: Row) -> tuple[Any, ...]:
    """Which shapes and parts a run of `exact.py` has."""
    return (*(row["model"] for row in run["logits"]), *(bool(run.get(part)) for part in ("packed", "texts", "trees")))


def newest_runs() -> dict[str, Row]:
    runs = {name: json.loads(newest(name).read_text()) for name in COMPLETE}
    peers = newest_of_each("peers", lambda run: tuple(run["pair"].values()))
    by_dtype = {name: newest_of_each(name, lambda run: run["dtype"]) for name in ("forwards", "batches")}
    exact_gpu = newest_of_each("exact_gpu", parts_of_exact)
    trees = json.loads(newest("h200", has_trees).read_text())
    gpu_forwards = newest_of_each("gpu_forwards", lambda run: tuple(row["shape"] for row in run["rows"]))
    gpu_runs = {"exact_gpu": exact_gpu, "gpu_forwards": gpu_forwards, "trees": trees}
    return {**runs, **gpu_runs, "peers": peers, **by_dtype}


def main() -> None:
    parser = harness.Parser(prog="make_results.py", description=__doc__, epilog="example: make_results.py --check")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    options = parser.parse_args()
    runs = newest_runs()
    stale = []
    for name in PAGES:
        before = (ROOT / name).read_text()
        after = rewritten(before, runs)
        if before != after:
            stale.append(name)
            if not options.check:
                (ROOT / name).write_text(after)
    print(f"{'out of date' if options.check else 'rewritten'}: {', '.join(stale) or 'none'}")
    sys.exit(bool(stale) and options.check)


if __name__ == "__main__":
    main()
