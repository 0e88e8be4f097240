"""Never slower: `auto`, which knows no acceptance rate beforehand, beside SI at its best block and non-SI.

`simulated`: random settings (latencies, acceptance, contention, jitter, one to eight targets), in some of
which acceptance changes in the middle or the drafter is slower than the target. `waited`: the same on real
threads, beside what the forecast says. `measured`: the built-in pair on this machine, with prompts it likes
and prompts it does not, beside non-SI with all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from random import Random
from statistics import fmean, median
from typing import Any

from dsi.engine.engine import Engine
from dsi.experiments.compare import CLASSES
from dsi.planning.auto import adaptive, best_config, latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.search import si_block
from dsi.planning.simulation import SimulationConfig

TOKENS = 200
SEEDS = range(16)


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
    setting: SimulationConfig
    nonsi: float
    si: float
    auto: float
    predicted: float | None = None  # of the planner's choice, which knows the acceptance: on average
    rehearsed: float | None = None  # the same in virtual time, with the luck of the texts that are waited for
    planned: float | None = None  # and what that takes
    best: float | None = None  # of all ways, each tried

    @property
    def over(self) -> float:
        """By what share `auto` is slower than the better of the others."""
        return self.auto / min(self.nonsi, self.si) - 1


def rates(setting: SimulationConfig) -> list[float]:
    return (
        [setting.acceptance]
        if setting.acceptance_change is None
        else [setting.acceptance, setting.acceptance_change[1]]
    )


def si_blocks(setting: SimulationConfig) -> list[int]:
    """Those that may be SI's best, knowing the acceptance rates."""
    known = rates(setting)
    return sorted(
        {max(1, round(si_block(setting, rate) * share)) for rate in [*known, fmean(known)] for share in (0.6, 1, 1.4)}
    )


def simulated(number: int) -> Row:
    setting = random_setting(number)

    def mean(algorithm: Any, each: SimulationConfig = setting) -> float:
        return fmean(each.run(algorithm, seed).ms for seed in SEEDS)

    si = min(mean("si", setting.with_spec(lookahead=length)) for length in si_blocks(setting))
    return Row(number, setting, mean("nonsi"), si, mean(adaptive(latency_table(setting), setting)))


def waited(number: int) -> Row:
    """Interleaved; SI has the block that is its best in virtual time. All ways are tried in virtual time."""
    setting = replace(random_setting(number, waited=True), acceptance_change=None, tokens=100)
    known = latency_table(setting)
    length = min(
        si_blocks(setting),
        key=lambda size: sum(setting.with_spec(lookahead=size).run("si", seed).ms for seed in SEEDS),
    )
    si = setting.with_spec(lookahead=length)
    way, predicted = best_config(known, setting.acceptance)
    ms: dict[str, list[float]] = {"nonsi": [], "si": [], "auto": [], "planned": []}
    for seed in range(3):
        ms["nonsi"].append(setting.run("nonsi", seed, True).ms)
        ms["si"].append(si.run("si", seed, True).ms)
        ms["auto"].append(setting.run(adaptive(known, setting), seed, True).ms)
        ms["planned"].append(setting.run(way, seed, True).ms)
    tried = {each: fmean(setting.run(each, seed).ms for seed in SEEDS) for each in known.configs}
    return Row(
        number,
        setting,
        fmean(ms["nonsi"]),
        fmean(ms["si"]),
        fmean(ms["auto"]),
        predicted=predicted * setting.tokens,
        rehearsed=fmean(setting.run(way, seed).ms for seed in range(3)),
        planned=fmean(ms["planned"]),
        best=tried[way] / min(tried.values()) - 1,
    )


def told(rows: Iterable[Row], total: int) -> Iterator[Row]:
    for done, row in enumerate(rows, 1):
        if done % 10 == 0:
            print(f"{done} of {total} settings", file=sys.stderr)
        yield row


def virtual(count: int) -> dict[str, Any]:
    with Pool(os.cpu_count()) as pool:
        rows = list(told(pool.imap(simulated, range(count)), count))
    over = sorted(row.over for row in rows)
    slow = [row for row in rows if row.setting.latency.drafter_ms > row.setting.latency.target_ms]
    changed = [row for row in rows if row.setting.acceptance_change]
    found = {
        "label": "simulated",
        "settings": count,
        "within_2_percent": sum(each <= 0.02 for each in over),
        "worst": over[-1],
        "median_speedup": median(1 / (1 + each) for each in over),
        "slow_drafters": {"settings": len(slow), "worst": max(row.over for row in slow)},
        "changing_acceptance": {"settings": len(changed), "worst": max(row.over for row in changed)},
    }
    print(f"simulated: {found['within_2_percent']} of {count} within 2% of the better of non-SI and SI")
    print(f"  worst {over[-1]:+.1%}; median speed over the better {found['median_speedup']:.2f}")
    for name in ("slow_drafters", "changing_acceptance"):
        part: Any = found[name]
        print(f"  {name.replace('_', ' ')}: {part['settings']} settings, worst {part['worst']:+.1%}")
    for row in sorted(rows, key=lambda row: -row.over)[:3]:
        print(f"  {row.over:+.1%} in setting {row.number}: {brief(row.setting)}")
    return found | {"rows": [asdict(row) | {"over": row.over} for row in rows]}


def brief(setting: SimulationConfig) -> str:
    return (
        f"drafter {setting.latency.drafter_ms / setting.latency.target_ms:.2f} of the target, acceptance "
        f"{' then '.join(f'{rate:.2f}' for rate in rates(setting))}, SP {setting.sp}, contention "
        f"{setting.latency.contention:.2f}, jitter {setting.latency.jitter:.2f}"
    )


def real_time(count: int) -> dict[str, Any]:
    with Pool(4) as pool:  # who waits needs no core
        rows = list(told(pool.imap(waited, range(1000, 1000 + count)), count))
    off = [abs((row.rehearsed or 0) / (row.planned or 1) - 1) for row in rows]
    lucky = [abs((row.predicted or 0) / (row.planned or 1) - 1) for row in rows]
    worse = [row.best or 0 for row in rows]
    over = [row.over for row in rows]
    print(f"waited, {count} settings: auto over the better of non-SI and SI: worst {max(over):+.1%}")
    print(f"  within 2%: {sum(each <= 0.02 for each in over)} of {count}; mean {fmean(over):+.1%}")
    print(f"  a rehearsal with the same luck is off by {median(off):.1%} (median), {max(off):.1%} at most")
    print(f"  the forecast, which knows no luck, by {median(lucky):.1%} and {max(lucky):.1%} over three texts")
    print(f"  its choice over the best of all ways, each tried (simulated): {max(worse):+.1%} at most")
    return {
        "label": "waited",
        "settings": count,
        "worst": max(over),
        "within_2_percent": sum(each <= 0.02 for each in over),
        "rehearsal_off": {"median": median(off), "most": max(off)},
        "forecast_off": {"median": median(lucky), "most": max(lucky)},
        "choice_over_best": max(worse),
        "rows": [asdict(row) for row in rows],
    }


def pair(repeats: int, tokens: int) -> dict[str, Any]:
    """Interleaved, each prompt in turn; ratios within a prompt and a repeat."""
    cores = len(os.sched_getaffinity(0))
    ratios: dict[str, list[float]] = {name: [] for name in CLASSES}
    alone: dict[str, list[float]] = {name: [] for name in CLASSES}
    with Engine.load(algorithm="auto") as engine, Engine.load(algorithm="nonsi", threads=cores) as plain:
        writers: dict[str, Callable[[str], Any]] = {
            "auto": lambda text: engine.generate(text, max_new_tokens=tokens),
            "all cores": lambda text: plain.generate(text, max_new_tokens=tokens),
            "one core": lambda text: engine.generate(text, max_new_tokens=tokens, algorithm="nonsi"),
        }
        for _ in range(repeats):
            for name, prompts in CLASSES.items():
                for prompt in prompts:
                    done = {who: write(prompt) for who, write in writers.items()}
                    if len({each.tokens for each in done.values()}) > 1:
                        raise SystemExit(f"prompt {prompt!r}: different texts were written")
                    rate = {who: len(each.tokens) / each.elapsed for who, each in done.items()}
                    ratios[name].append(rate["auto"] / rate["all cores"])
                    alone[name].append(rate["auto"] / rate["one core"])
            print(f"{len(next(iter(ratios.values())))} texts of each class", file=sys.stderr)
    print(f"measured: speed of auto over non-SI with all {cores} cores, and with one; all texts equal")
    found: dict[str, Any] = {"label": "measured"}
    for name in CLASSES:
        both = [(median(each), *sorted(each)[:: max(1, len(each) - 1)]) for each in (ratios[name], alone[name])]
        found[name] = {"all_cores": both[0][0], "one_core": both[1][0], "texts": len(ratios[name])}
        print(f"  {name:13} {both[0][0]:.2f} ({both[0][1]:.2f} to {both[0][-1]:.2f})   {both[1][0]:.2f}")
    return found


def seconds() -> dict[str, Any]:
    """Eight targets, a drafter of a tenth of their time: with second guesses and without, simulated."""
    found: dict[str, Any] = {"label": "simulated"}
    for rate in (0.4, 0.63, 0.8):
        setting = SimulationConfig(
            LatencyModel(20.0, 2.0, cancel_points=8),
            rate,
            8,
            TOKENS,
            runner_up_acceptance=0.5,
            no_runner_up_rate=0.5,
            thread_pool=False,
        )
        known, without = latency_table(setting), latency_table(setting)
        without.best_with_spares.clear()
        times = [fmean(setting.run(adaptive(each, setting), seed).ms for seed in SEEDS) for each in (known, without)]
        found[str(rate)] = times[0] / times[1]
        print(f"second guesses, half of them right, acceptance {rate}: {times[0] / times[1]:.2f} of the time")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=300, help="in virtual time; 0: none")
    parser.add_argument("--waited", type=int, default=30, help="on real threads; 0: none")
    parser.add_argument("--repeats", type=int, default=5, help="of the built-in pair's prompts; 0: none")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", action="store_true", help="only what second guesses give")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seconds:
        options.settings = options.waited = options.repeats = 0
    found = {
        "seconds": seconds(),
        "simulated": virtual(options.settings) if options.settings else None,
        "waited": real_time(options.waited) if options.waited else None,
        "measured": pair(options.repeats, options.tokens) if options.repeats else None,
    }
    if options.json:
        print(json.dumps(found, default=sorted))  # a setting has a set in it


if __name__ == "__main__":
    main()
