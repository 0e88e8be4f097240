"""Never slower: `auto`, which knows no acceptance rate beforehand, beside SI at its best block and non-SI.

`simulated`: random settings (latencies, acceptance, contention, jitter, one to eight targets), in some of
which acceptance changes in the middle or the drafter is slower than the target. `waited`: the same on real
threads, beside what the forecast says. `trees`: a grid in virtual time where `auto` may choose draft trees, beside
`auto` with chains alone, the planner's choice, and fixed configurations, which know the rates. `measured`: the
built-in pair on this machine, with prompts it likes and prompts it does not, beside non-SI with all cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import Pool
from random import Random
from statistics import fmean, median
from typing import Any

import harness
from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine
from dsi.experiments.compare import CLASSES
from dsi.planning.auto import adaptive, best_config, cached_latency_table, latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.search import si_block
from dsi.planning.simulation import SimulationConfig
from dsi.planning.trees import best_dsi_tree, best_si_tree, dsi_trees

TOKENS = 200
SEEDS = range(16)
TREE_SEEDS = range(4)
TREE_GROUPS = (  # milliseconds of a target forward, where the drafter takes 1, and SP degree
    *((10.0, 8), (10.0, 2), (5.0, 4), (20.0, 4), (20.0, 8), (10.0, 1)),
    *((5.0, 8), (20.0, 2), (10.0, 4), (5.0, 1), (20.0, 1), (5.0, 2)),
)
TREE_RATES, TREE_RUNNER_UPS = (0.4, 0.63, 0.8, 0.93), (0.3, 0.5)


def random_setting(number: int, waited: bool = False) -> SimulationConfig:
    """A drafter takes between a thirtieth of the target's time and 1.4 times as long."""
    dice = Random(number)
    target, sp, acceptance = 20.0, dice.randint(1, 8), dice.random()
    drafter = round(target * 10 ** dice.uniform(-1.5, 0.15), 3)
    jitter, contention = dice.choice([0, dice.uniform(0, 0.3)]), dice.choice([0, dice.uniform(0, 0.2)])
    later = (TOKENS // 2, dice.random()) if dice.random() < 1 / 3 else None
    return SimulationConfig(
        LatencyModel(
            target,
            drafter,
            jitter=jitter,
            contention=0 if waited else contention,
            cancel_points=dice.choice([0, 8]),
            per_token_ms=dice.choice([0, round(dice.uniform(0, 1), 3)]),
        ),
        acceptance,
        sp,
        TOKENS,
        thread_pool=False,
        acceptance_change=later,
    )


@dataclass(frozen=True)
class Row:
    """Milliseconds of a text, on average."""

    number: int
    config: SimulationConfig
    nonsi: float
    si: float
    auto: float
    predicted: float | None = None  # of the planner's choice, which knows the acceptance: on average
    simulated_ms: float | None = None  # the same in virtual time, with the seeds of the texts that are waited for
    planned: float | None = None  # and what that takes
    best: float | None = None  # share by which it is slower than the best configuration, all tried

    @property
    def over(self) -> float:
        """By what share `auto` is slower than the better of the others."""
        return self.auto / min(self.nonsi, self.si) - 1


def rates(config: SimulationConfig) -> list[float]:
    return [config.acceptance] if config.acceptance_change is None else [config.acceptance, config.acceptance_change[1]]


def si_blocks(config: SimulationConfig) -> list[int]:
    """Those that may be SI's best, knowing the acceptance rates."""
    acceptances = rates(config)
    return sorted(
        {
            max(1, round(si_block(config, rate) * share))
            for rate in [*acceptances, fmean(acceptances)]
            for share in (0.6, 1, 1.4)
        }
    )


def simulated(number: int) -> Row:
    config = random_setting(number)

    def mean(algorithm: Any, case: SimulationConfig = config) -> float:
        return fmean(case.run(algorithm, seed).ms for seed in SEEDS)

    si = min(mean("si", config.with_spec(lookahead=length)) for length in si_blocks(config))
    return Row(number, config, mean("nonsi"), si, mean(adaptive(latency_table(config), config)))


def waited(number: int) -> Row:
    """Interleaved; SI has the block that is its best in virtual time. All configurations are tried in virtual time."""
    config = replace(random_setting(number, waited=True), acceptance_change=None, tokens=100)
    table = latency_table(config)
    length = min(
        si_blocks(config),
        key=lambda size: sum(config.with_spec(lookahead=size).run("si", seed).ms for seed in SEEDS),
    )
    si = config.with_spec(lookahead=length)
    spec, predicted = best_config(table, config.acceptance)
    contenders: dict[str, Callable[[int], float]] = {
        "nonsi": lambda seed: config.run("nonsi", seed, True).ms,
        "si": lambda seed: si.run("si", seed, True).ms,
        "auto": lambda seed: config.run(adaptive(table, config), seed, True).ms,
        "planned": lambda seed: config.run(spec, seed, True).ms,
    }
    ms = harness.interleave(contenders, range(3), quiet=True)
    tried = {spec: fmean(config.run(spec, seed).ms for seed in SEEDS) for spec in table.configs}
    return Row(
        number,
        config,
        fmean(ms["nonsi"]),
        fmean(ms["si"]),
        fmean(ms["auto"]),
        predicted=predicted * config.tokens,
        simulated_ms=fmean(config.run(spec, seed).ms for seed in range(3)),
        planned=fmean(ms["planned"]),
        best=tried[spec] / min(tried.values()) - 1,
    )


def virtual(count: int) -> dict[str, Any]:
    with Pool(os.cpu_count()) as pool:
        rows = list(harness.tracked(pool.imap(simulated, range(count)), count, "settings"))
    over = sorted(row.over for row in rows)
    slow = [row for row in rows if row.config.latency.drafter_ms > row.config.latency.target_ms]
    changed = [row for row in rows if row.config.acceptance_change]
    return {
        "label": "simulated",
        "settings": count,
        "within_2_percent": sum(share <= 0.02 for share in over),
        "worst": over[-1],
        "median_speedup": median(1 / (1 + share) for share in over),
        "slow_drafters": {"settings": len(slow), "worst": max((row.over for row in slow), default=None)},
        "changing_acceptance": {"settings": len(changed), "worst": max((row.over for row in changed), default=None)},
        "worst_settings": [
            {"over": row.over, "number": row.number, "setting": brief(row.config)}
            for row in sorted(rows, key=lambda row: -row.over)[:3]
        ],
        "rows": [asdict(row) | {"over": row.over} for row in rows],
    }


def virtual_lines(result: dict[str, Any]) -> Iterator[str]:
    within, count = result["within_2_percent"], result["settings"]
    yield f"simulated: {within} of {count} within 2% of the better of non-SI and SI"
    yield f"  worst {result['worst']:+.1%}; median speed over the better {result['median_speedup']:.2f}"
    for name in ("slow_drafters", "changing_acceptance"):
        part = result[name]
        if part["settings"]:
            yield f"  {name.replace('_', ' ')}: {part['settings']} settings, worst {part['worst']:+.1%}"
    for row in result["worst_settings"]:
        yield f"  {row['over']:+.1%} in setting {row['number']}: {row['setting']}"


def brief(config: SimulationConfig) -> str:
    return (
        f"drafter {config.latency.drafter_ms / config.latency.target_ms:.2f} of the target, acceptance "
        f"{' then '.join(f'{rate:.2f}' for rate in rates(config))}, SP {config.sp}, contention "
        f"{config.latency.contention:.2f}, jitter {config.latency.jitter:.2f}"
    )


@dataclass(frozen=True)
class TreeRow:
    """Milliseconds per token, on average; `fixed` is the best of the configurations tried, which know the rates."""

    target_ms: float  # the drafter takes 1
    sp: int
    acceptance: float
    runner_up_acceptance: float
    chains: float  # `auto` without trees
    auto: float
    planned: float
    fixed: float
    best: str

    @property
    def over_chains(self) -> float:
        """By what share `auto` with trees is slower than without."""
        return self.auto / self.chains - 1


def tree_rows(group: tuple[float, int]) -> list[TreeRow]:
    return [tree_row(*group, *rates) for rates in product(TREE_RATES, TREE_RUNNER_UPS)]


def tree_row(target_ms: float, sp: int, acceptance: float, runner_up: float) -> TreeRow:
    latency = LatencyModel(target_ms, 1.0, cancel_points=8)
    config = SimulationConfig(latency, acceptance, sp, TOKENS, runner_up_acceptance=runner_up, thread_pool=False)

    def mean(algorithm: Any, case: SimulationConfig = config) -> float:
        return fmean(case.run(algorithm, seed).ms for seed in TREE_SEEDS) / TOKENS

    planned = min((best_dsi_tree(config)[::-1], chain_of(config), *si_tree_of(config)), key=lambda it: it[0])[1]
    fixed = {spec: mean(spec) for spec in {planned, *fixed_specs(config)}}
    best = min(fixed, key=lambda spec: fixed[spec])
    chains, auto = mean("auto"), mean("auto", config.with_spec(tree=1))
    return TreeRow(
        target_ms, sp, acceptance, runner_up, chains, auto, fixed[planned], fixed[best], f"{best.algorithm} {best}"
    )


def chain_of(config: SimulationConfig) -> tuple[float, SpecConfig]:
    return best_config(cached_latency_table(config), config.acceptance)[::-1]


def si_tree_of(config: SimulationConfig) -> list[tuple[float, SpecConfig]]:
    best = best_si_tree(config.latency, config.acceptance, config.runner_up_acceptance)
    return [best[::-1]] if best else []


def fixed_specs(config: SimulationConfig) -> Iterator[SpecConfig]:
    """The chains that are predicted to be fastest, SI with its best tree, and DSI with many trees."""
    table = cached_latency_table(config)
    ms, rate = table.ms[table.scale_index(1.0)], table.rate_index(config.acceptance)
    yield from (table.configs[i] for i in sorted(range(len(table.configs)), key=lambda i: ms[i][rate])[:3])
    yield from (spec for _, spec in si_tree_of(config))
    for spec in dsi_trees(config.latency, config.sp):
        for size, min_draft in product({16, spec.tree}, {0, min(2, spec.lookahead or 1)}):
            yield replace(spec, tree=size, min_draft=min_draft)


def trees(count: int) -> dict[str, Any]:
    groups = TREE_GROUPS[:count]
    with Pool(os.cpu_count()) as pool:
        rows = [row for part in harness.tracked(pool.imap(tree_rows, groups), len(groups), "groups") for row in part]
    return {
        "label": "simulated",
        "cells": len(rows),
        "worst_over_chains": max(row.over_chains for row in rows),
        "median_speedup": median(row.chains / row.auto for row in rows),
        "auto_of_best": spread([row.fixed / row.auto for row in rows]),
        "plan_of_best": spread([row.fixed / row.planned for row in rows]),
        "rows": [asdict(row) for row in rows],
    }


def spread(shares: list[float]) -> dict[str, float]:
    return {"least": min(shares), "median": median(shares)}


def tree_lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"trees, simulated, {result['cells']} cells: speed of auto with trees over auto with chains"
    yield f"  {result['median_speedup']:.2f} (median); at worst {result['worst_over_chains']:+.1%} of its time"
    for name, part in (("auto", result["auto_of_best"]), ("the planner's choice", result["plan_of_best"])):
        yield f"  speed of {name} over the best fixed configuration: {part['median']:.3f}, at least {part['least']:.3f}"


def real_time(count: int) -> dict[str, Any]:
    with Pool(4) as pool:  # a process that waits needs no core
        rows = list(harness.tracked(pool.imap(waited, range(1000, 1000 + count)), count, "settings"))
    simulated_off = [abs((row.simulated_ms or 0) / (row.planned or 1) - 1) for row in rows]
    predicted_off = [abs((row.predicted or 0) / (row.planned or 1) - 1) for row in rows]
    over = [row.over for row in rows]
    return {
        "label": "waited",
        "settings": count,
        "worst": max(over),
        "mean": fmean(over),
        "within_2_percent": sum(share <= 0.02 for share in over),
        "simulation_off": {"median": median(simulated_off), "most": max(simulated_off)},
        "forecast_off": {"median": median(predicted_off), "most": max(predicted_off)},
        "choice_over_best": max(row.best or 0 for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def real_time_lines(result: dict[str, Any]) -> Iterator[str]:
    count, simulation, forecast = result["settings"], result["simulation_off"], result["forecast_off"]
    yield f"waited, {count} settings: auto over the better of non-SI and SI: worst {result['worst']:+.1%}"
    yield f"  within 2%: {result['within_2_percent']} of {count}; mean {result['mean']:+.1%}"
    for name, off in (("a simulation with the same seeds", simulation), ("the forecast of the mean", forecast)):
        yield f"  {name} is off by {off['median']:.1%} (median), {off['most']:.1%} at most"
    yield f"  its choice over the best configuration, each tried (simulated): {result['choice_over_best']:+.1%} at most"


def pair(repeats: int, tokens: int) -> dict[str, Any]:
    """Time the built-in pair, interleaved; ratios are within a prompt and a repeat."""
    result: dict[str, Any] = {"label": "measured"}
    with Engine.load(algorithm="auto") as engine, Engine.load(algorithm="nonsi", threads=cores()) as plain:
        writers: dict[str, Callable[[str], Any]] = {
            "auto": lambda text: engine.generate(text, max_new_tokens=tokens),
            "all_cores": lambda text: plain.generate(text, max_new_tokens=tokens),
            "one_core": lambda text: engine.generate(text, max_new_tokens=tokens, algorithm="nonsi"),
        }
        prompts = [prompt for group in CLASSES.values() for prompt in group]
        texts = harness.interleave(writers, prompts, repeats, agree=lambda done: done.tokens)
    rates = {name: [len(done.tokens) / done.elapsed for done in row] for name, row in texts.items()}
    for name, group in CLASSES.items():
        chosen = [i for i in range(len(rates["auto"])) if prompts[i % len(prompts)] in group]
        over = {key: [rates["auto"][i] / rates[key][i] for i in chosen] for key in ("all_cores", "one_core")}
        result[name] = {key: median(ratios) for key, ratios in over.items()} | {
            "all_cores_range": [min(over["all_cores"]), max(over["all_cores"])],
            "texts": len(chosen),
        }
    return result


def pair_lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"measured: speed of auto over non-SI with all {cores()} cores, and with one; all texts equal"
    for name in CLASSES:
        row = result[name]
        low, high = row["all_cores_range"]
        yield f"  {name:13} {row['all_cores']:.2f} ({low:.2f} to {high:.2f})   {row['one_core']:.2f}"


def cores() -> int:
    return len(os.sched_getaffinity(0))


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], Iterator[str]]]] = {
    "trees": (lambda options: options.trees and trees(options.trees), tree_lines),
    "simulated": (lambda options: options.settings and virtual(options.settings), virtual_lines),
    "waited": (lambda options: options.waited and real_time(options.waited), real_time_lines),
    "measured": (lambda options: options.repeats and pair(options.repeats, options.tokens), pair_lines),
}


def main() -> None:
    parser = harness.arguments(__doc__, "--settings 20 --waited 0 --repeats 0", tokens=96)
    parser.add_argument("--settings", type=harness.count, default=300, help="in virtual time; 0: none")
    parser.add_argument("--waited", type=harness.count, default=30, help="on real threads; 0: none")
    parser.add_argument("--repeats", type=harness.count, default=5, help="of the built-in pair's prompts; 0: none")
    parser.add_argument(
        "--trees", type=harness.count, default=0, help="pairs of target latency and SP degree, of 12; 0: none"
    )
    options = parser.parse_args()
    results = {name: run(options) or None for name, (run, _) in PARTS.items()}
    lines = [line for name, (_, show) in PARTS.items() if results[name] for line in show(results[name])]
    harness.report(options, "simulated, waited and measured", results, lines)


if __name__ == "__main__":
    main()
