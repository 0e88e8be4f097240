"""Distributed speculative inference on one GPU cut into slices: real forwards, several real targets.

Models of real shapes with random weights: a forward takes as long as a trained one's, and guesses are right
at a chosen rate, by an oracle. Each server has one slice; SI and non-SI have one for the target and one for
the drafter. Measured.
`--only` picks targets or parts. Needs an NVIDIA GPU with green contexts (driver of CUDA 12.4 or later).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

import harness
import make_results
from divergence import divergences
from dsi.core.messages import DRAFTER, GREEDY, TARGET, Sampling
from dsi.core.policies import policy_for
from dsi.core.request import Completion, Request
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import TREE_BRANCHES, rank_chances
from dsi.engine.build import silence_transformers
from dsi.engine.build_cuda import packed_servers
from dsi.engine.profile_cuda import latency_model, order_by_contention, with_packed_forwards
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server, make_servers
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.green_contexts import green_context_streams
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.process_utils import freeze_objects
from dsi.models.protocol import SamplingModel
from dsi.models.shapes import random_model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.paper.table2 import PAIRS
from dsi.planning.latency import LatencyModel
from dsi.planning.search import DeploymentPlan, PairProfile, search_devices
from dsi.planning.trees import best_si_tree, dsi_trees
from oracle import Oracle, PackedOracle

TARGETS = ("llama-1.1b", "vicuna-7b", "vicuna-13b")
DRAFTER_SHAPE = "vicuna-68m"
ACCEPTANCES = (0.63, 0.8, 0.93)
PROMPT, ROOM = 128, 384
WARM_UP = 20  # tokens
WHOLE_REPEATS = 3
TEXTS, PACKED_SIZES = 4, (1, 2, 4, 8, 16, 32, 64, 128)  # of forwards over trees
MAX_TREE, MAX_TREE_TARGETS = 127, 4
SHARES = (0.6, 0.8, 1, 1.2, 1.5)  # of SI's best lookahead in simulation: those it is measured with


@dataclass
class Bench:
    """A target's replicas and a drafter, each on its slice."""

    targets: list[CudaGraphModel]
    drafter: CudaGraphModel
    latency: LatencyModel
    runner_up: float = 0.0  # how often the drafter's next choice is right where the one before is not
    packed: dict[str, PackedCudaModel] = field(default_factory=dict)  # for trees, by server
    plain_ms: dict[int, list[float]] = field(default_factory=dict)  # non-SI, by tokens

    def fleet(self, sp: int, acceptance: float, seed: int) -> CudaFleet:
        teacher = ToyTarget(seed)
        guess = ToyDrafter(teacher, acceptance, seed * 1013, self.runner_up)
        servers = make_servers(
            [Oracle(target, teacher) for target in self.targets[:sp]],
            {DRAFTER: Oracle(self.drafter, guess)},
            shared_kv=True,
        )
        packed = {}
        for server in servers if self.packed else ():
            oracle = PackedOracle(SamplingModel(self.packed[server.name]), guess if server.role == DRAFTER else teacher)
            packed[server.name] = Server(server.name, server.role, oracle)
        return CudaFleet(servers, packed=packed)


@cache
def pool() -> ProcessPoolExecutor:
    """Return processes for simulations, which the GPU waits for.

    All have started before anything is measured: while they do, the thread that launches forwards is slowed.
    """
    context, count = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    started = context.Barrier(count + 1)
    executor = ProcessPoolExecutor(count, context, initializer=started.wait)
    for _ in range(count):
        executor.submit(int)
    started.wait()
    return executor


@lru_cache(maxsize=1)
def prepared(
    target: str, drafter: str, segments: int | None, share: int, slices: int, most: int, runner_up: float
) -> Bench:
    """Each server on its slice, the drafter on `share`; targets share their weights and their cache."""
    streams = green_context_streams(0, slices, [share] + [1] * most)
    target_model, drafter_model = (
        random_model(name, device="cuda:0", max_positions=ROOM) for name in (target, drafter)
    )
    return bench(target_model, drafter_model, streams[0], streams[1:], segments, runner_up)


def bench(
    target: Any,
    small_model: Any,
    drafter_stream: Any,
    target_streams: list[Any],
    segments: int | None,
    runner_up: float,
) -> Bench:
    began = perf_counter()
    drafter = CudaGraphModel(small_model, ROOM, drafter_stream, drafts=True)
    targets: list[CudaGraphModel] = []
    for stream in target_streams:
        targets.append(
            CudaGraphModel(target, ROOM, stream, segments=segments, share_cache_with=targets[0] if targets else None)
        )
    how = targets[0].eager_reason or targets[0].slower_reason or "CUDA graphs"
    harness.log(f"recorded in {perf_counter() - began:.1f} s; {how}")
    targets = order_by_contention(targets, PROMPT)
    latency = latency_model(targets, drafter, PROMPT, targets[0].cancel_points, shared_kv=True)
    if not runner_up:
        freeze_objects()
        return Bench(targets, drafter, latency)
    packed = {
        name: PackedCudaModel(model.model, ROOM, TEXTS * ROOM, TEXTS, model.stream, PACKED_SIZES, name == DRAFTER)
        for name, model in ((DRAFTER, drafter), *((f"{TARGET}-{i}", target) for i, target in enumerate(targets, 1)))
    }
    first = {TARGET: packed[f"{TARGET}-1"], DRAFTER: packed[DRAFTER]}
    trial = CudaFleet(make_servers(targets[:1], {DRAFTER: drafter}), packed=packed_servers(first))
    latency = with_packed_forwards(latency, trial, first, PROMPT)
    freeze_objects()
    return Bench(targets, drafter, latency, runner_up, packed)


def write(bench: Bench, choice: DeploymentPlan, acceptance: float, tokens: int, seed: int) -> Completion:
    fleet = bench.fleet(choice.sp, acceptance, seed)
    policy = policy_for(choice.spec)
    try:
        [done] = EngineLoop(fleet).run(Request((1,) * PROMPT, tokens, policy))
        return done
    finally:
        fleet.close()


def cell(bench: Bench, acceptance: float, tokens: int, repeats: int) -> dict[str, Any]:
    """One target and acceptance rate: non-SI, SI at blocks near its best, DSI as chosen, interleaved."""
    most = len(bench.targets)
    chosen = {choice.algorithm: choice for choice in search_devices(bench.latency, acceptance, most, map=pool().map)}
    first = min(chosen.values(), key=lambda choice: choice.ms)
    rows = {"nonsi": chosen["nonsi"], **({"dsi": chosen["dsi"]} if most > 1 else {})}
    si = chosen["si"]
    for block in sorted({max(1, round((si.spec.lookahead or 1) * share)) for share in SHARES}):
        rows[f"si {block}"] = DeploymentPlan(SpecConfig("si", block), ms=si.ms)
    rows |= tree_rows(bench, acceptance)
    times = measured(bench, rows, acceptance, tokens, repeats)
    best = min((name for name in rows if name.startswith("si")), key=lambda name: sum(times[name]))
    result = {
        "acceptance": acceptance,
        "chosen": first.json(),
        "si_lookahead": rows[best].spec.lookahead,
        "ms": times,
        "ms_per_token": {name: median(runs) / tokens for name, runs in times.items()},
    }
    for name in ("si", "dsi") if bench.packed else ():
        chain = times[best] if name == "si" else times.get("dsi", [])
        trees = {row: ms for row, ms in times.items() if row.startswith(f"tree {name}")}
        if trees and chain:
            tree = min(trees, key=lambda row: sum(trees[row]))
            result[f"{name}_tree"] = {"best": tree, "over_chain": sum(chain) / sum(trees[tree])}
    if "dsi" in rows:
        result |= compared(bench, rows["dsi"], times, best, acceptance, tokens)
    harness.log(f"  { ({k: v for k, v in result.items() if k != 'ms'}) }")
    return result


def tree_rows(bench: Bench, acceptance: float) -> dict[str, DeploymentPlan]:
    """SI and DSI with the trees that may be fastest by the measured latencies, and some beside them."""
    if not bench.packed:
        return {}
    rows: dict[str, DeploymentPlan] = {}
    chances = rank_chances(acceptance, bench.runner_up, TREE_BRANCHES)
    if best := best_si_tree(bench.latency, acceptance, bench.runner_up):
        size, depth = best[0].tree, best[0].lookahead or 1
        smaller, larger = max(3, size // 2), min(MAX_TREE, 2 * size + 1)  # with the root, a power of two of rows
        for nodes, levels in ((size, depth), (size, depth + 2), (smaller, depth), (larger, depth)):
            if nodes > levels:
                spec = SpecConfig("si", levels, max_targets=1, tree=nodes, chances=chances)
                rows[f"tree si {nodes}, {levels} deep"] = DeploymentPlan(spec)
    for sp in range(2, min(len(bench.targets), MAX_TREE_TARGETS) + 1):
        for spec in dsi_trees(bench.latency.with_targets(sp), sp):
            row = f"tree dsi {spec.tree}, lookahead {spec.lookahead}, min draft {spec.min_draft}, SP {sp}"
            rows[row] = DeploymentPlan(replace(spec, chances=chances), sp)
    return rows


def measured(
    bench: Bench, rows: dict[str, DeploymentPlan], acceptance: float, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each row, by seed."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    plain = bench.plain_ms.get(tokens)
    for seed in range(repeats + 1):  # the first is short and not counted: it warms up
        texts = set()
        for name, choice in rows.items():
            if name == "nonsi" and (seed > 1 or plain):
                continue  # it does the same whatever is drafted
            done = write(bench, choice, acceptance, tokens if seed else WARM_UP, seed)
            texts.add(done.tokens)
            harness.log(f"    seed {seed}, {name}: {1000 * float(done.elapsed) / len(done.tokens):.2f} ms a token")
            if seed:
                times[name].append(1000 * float(done.elapsed))
        if len(texts) > 1:
            harness.fail(f"seed {seed}: different texts")
    times["nonsi"] = bench.plain_ms[tokens] = plain or times["nonsi"]
    return times


def compared(
    bench: Bench, dsi: DeploymentPlan, times: dict[str, list[float]], best: str, acceptance: float, tokens: int
) -> dict[str, Any]:
    over_si = [a / b for a, b in zip(times[best], times["dsi"])]
    virtual = [virtual_ms(bench, dsi, acceptance, tokens, seed) for seed in range(1, len(times["dsi"]) + 1)]
    return {
        "dsi": dsi.json(),
        "dsi_over_si": sum(times[best]) / sum(times["dsi"]),
        "spread": [min(over_si), max(over_si)],
        "dsi_over_nonsi": median(times["nonsi"]) / median(times["dsi"]),
        "measured_over_virtual": sum(times["dsi"]) / sum(virtual),
        "beyond_virtual_us_per_token": 1000 * (sum(times["dsi"]) - sum(virtual)) / tokens / len(virtual),
    }


def virtual_ms(bench: Bench, choice: DeploymentPlan, acceptance: float, tokens: int, seed: int) -> float:
    """Return the time of the same text with the same seed in virtual time, with the measured latencies."""
    setting = choice.simulation(PairProfile({1: bench.latency}, {"match": acceptance}), tokens)
    policy = setting.policy(choice.algorithm)
    [done] = EngineLoop(setting.simulated(seed)).run(Request((1,) * PROMPT, tokens, policy))
    return float(done.elapsed)


def table(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """One target in slices, and the whole GPU given to SI and non-SI."""
    harness.log(shape)
    if options.no_slices:
        target, drafter = (random_model(name, device="cuda:0", max_positions=ROOM) for name in (shape, DRAFTER_SHAPE))
        return {"shape": shape, "whole_gpu": whole_gpu(target, drafter, options)}
    sliced = prepared(shape, DRAFTER_SHAPE, *cut(options))
    harness.log(f"  {sliced.latency.json()}")
    cells = [cell(sliced, rate, options.tokens, options.repeats) for rate in options.acceptances]
    result = {
        "shape": shape,
        "drafter_slices": options.drafter_slices,
        "slices": options.slices,
        "costs": sliced.latency.json(),
        "cells": cells,
    }
    if options.no_whole:
        return result
    return result | {"whole_gpu": whole_gpu(sliced.targets[0].model, sliced.drafter.model, options)}


def whole_gpu(target: Any, drafter: Any, options: argparse.Namespace) -> dict[str, Any]:
    """SI and non-SI with all of the GPU for each forward."""
    whole = bench(target, drafter, None, [None], 1, options.runner_up)
    harness.log(f"  the whole GPU: {whole.latency.json()}")
    repeats = min(options.repeats, WHOLE_REPEATS)
    cells = [cell(whole, rate, options.tokens, repeats) for rate in options.acceptances]
    return {"costs": whole.latency.json(), "cells": cells}


def cut(options: argparse.Namespace) -> tuple[int | None, int, int, int, float]:
    return options.segments, options.drafter_slices, options.slices, options.targets, options.runner_up


def texts(options: argparse.Namespace) -> dict[str, Any]:
    """The built-in target on the GPU beside the CPU: equal in float32; in bfloat16, where they first differ."""
    rows: dict[str, Any] = {}
    sampled = Sampling(temperature=0.8, top_p=0.95, seed=7)
    for dtype, sampling in (("float32", GREEDY), ("float32", sampled), ("bfloat16", GREEDY)):
        name = f"{dtype}, {'sampled' if sampling.temperature else 'greedy'}"
        rows[name] = divergences(options.tokens, dtype, "cuda:0", sampling)
        harness.log(f"  {name}: {rows[name]}")
    return rows


def paper_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Table 2 of the paper with latencies measured here, its acceptance rates and 50 tokens."""
    for pair in PAIRS:
        if not pair.name.startswith(options.rows):
            continue
        ready = prepared(pair.target.lower(), pair.drafter.lower(), *cut(options))
        harness.log(f"{pair.name}: {ready.latency.json()}")
        if ready.targets[0].eager_reason or ready.drafter.eager_reason:
            continue  # as it stands, a forward is mostly the interpreter's time
        row = cell(ready, pair.acceptance, 50, options.repeats)
        yield {"pair": pair.name, "published": pair.published, "costs": ready.latency.json(), **row}


def show(path: Path) -> None:
    """Print the tables of a run as `docs/gpu.md` shows them."""
    run = json.loads(path.read_text())
    print(f"{run['gpu']}, {run['date']}, torch {run['torch']}: {run['label']}\n")
    for section in (make_results.slices, make_results.table2):
        print(*section(run), sep="\n", end="\n\n")
    if all("whole_gpu" in target for target in run["targets"]):
        print(*make_results.whole_gpu(run), sep="\n")


def circumstances() -> dict[str, Any]:
    return {
        "label": "measured, random weights, acceptance by an oracle",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def parts(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The results of a part, as they come."""
    if name == "text":
        yield "text", texts(options)
    elif name == "table2":
        yield from (("table2", row) for row in paper_rows(options))
    else:
        yield "targets", table(name, options)


def main() -> None:
    parts_of_all = ("text", *TARGETS, "table2")
    parser = harness.arguments(
        __doc__, "--only llama-1.1b --repeats 2", tokens=200, repeats=7, slices=16, targets=7, drafter_slices=1
    )
    parser.add_argument("--only", type=harness.names(*parts_of_all), default=",".join(parts_of_all), help="parts")
    parser.add_argument("--acceptances", type=harness.share, nargs="+", default=ACCEPTANCES)
    parser.add_argument(
        "--segments", type=harness.positive, help="of a target forward, after each of which it can stop"
    )
    parser.add_argument(
        "--runner-up",
        type=harness.share,
        default=0.0,
        help="acceptance of next choices; above 0: with trees, too",
    )
    parser.add_argument("--no-whole", action="store_true", help="only in slices")
    parser.add_argument("--no-slices", action="store_true", help="only on the whole GPU")
    parser.add_argument("--rows", default="", help="of table2: those whose name begins so")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of an earlier run")
    options = parser.parse_args()
    if options.show:
        if not options.show.is_file():
            parser.error(f"{options.show}: there is no such file")
        show(options.show)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    silence_transformers()
    pool()
    results: dict[str, Any] = circumstances() | {"targets": [], "table2": []}
    for part in options.only:
        for name, result in parts(part, options):
            results[name] = [*results[name], result] if name in results else result
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
