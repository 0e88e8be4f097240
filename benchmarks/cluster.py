"""Planning past one machine: what delay, more processors, many streams and failures do to DSI. Simulated.

The latencies are those of whole H200s (`benchmarks/results` of 2026-11-15: a target's forward by its new
tokens, and the drafter's) and of one pair of the paper's Table 2. SI and non-SI stay on one GPU, where
nothing delays them. DSI has the lookahead and the minimum draft that are fastest in a
short simulation. docs/cluster.md shows what comes out; `--svg FILE` draws it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import harness
from dsi.core.spec import default_max_lead
from dsi.fleets.simulated import Outage
from dsi.planning.equation_1 import minimal_lookahead, servers_needed
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.plot import style

PAPER = "paper"  # Vicuna-13B and 68M as published
DELAYS = (0, 0.05, 0.2, 0.5, 1, 2, 5, 10)
ACCEPTANCES = (0.63, 0.8, 0.93)
SPS = (1, 2, 3, 4, 7, 11, 16, 22, 34, 63)
MACHINES = (2, 4, 8)  # GPUs of one
PROCESSORS = (8, 64, 512)
STREAMS = (1, 8, 64)
RATES = (0, 1, 10, 100, 1000)  # failures per hour of each server
NOTICES = (0, 100, 1000)  # ms
SI_BLOCKS = (3, 5, 7, 9, 11, 15)
TOKENS, SEEDS, TRIES = 100, 10, 2
LONG = 8_000  # tokens, in which servers have the time to fail
REPAIR_S = 10
RACK_MS = 0.05  # between two machines of one rack
ENOUGH = 0.98  # of the speed that any number of targets gives
COLOURS = {"vicuna-7b": "#3b6fb6", "vicuna-13b": "#4c9f70", PAPER: "#d1495b"}
NAMES = {"vicuna-7b": "7B, H200", "vicuna-13b": "13B, H200", PAPER: "paper's 37.7 and 2.5 ms"}
Row = dict[str, Any]
Results = dict[str, list[Row]]


@cache
def pairs() -> dict[str, SimulationConfig]:
    """Of each pair, a setting with its latencies; a forward that is cancelled ends within an eighth."""
    settings = {}
    for path in sorted(harness.RESULTS.glob("h200-2026-11-15-*.json")):
        for target in json.loads(path.read_text())["targets"]:
            if target["shape"] in COLOURS and "whole_gpu" in target:
                settings[target["shape"]] = measured(target["whole_gpu"]["costs"])
    basis = SimulationConfig(LatencyModel(37.7, 2.5, cancel_points=8), 0.8, sp=7, tokens=TOKENS, thread_pool=False)
    return {**{name: settings[name] for name in COLOURS if name in settings}, PAPER: basis}


def measured(costs: Row) -> SimulationConfig:
    steps = tuple((int(width), round(ms, 2)) for width, ms in costs["by_width"].items())
    drafter = round(costs["drafter_ms"], 3)
    return SimulationConfig(
        LatencyModel(steps[0][1], drafter, cancel_points=8, by_width=steps), 0.8, sp=7, tokens=TOKENS, thread_pool=False
    )


def ms_per_token(setting: SimulationConfig, algorithm: str, seeds: Iterable[int] = range(SEEDS)) -> float:
    return fmean(setting.run(algorithm, seed).ms for seed in seeds) / setting.tokens


@cache
def alone(setting: SimulationConfig, algorithm: str) -> float:
    """Milliseconds a token of SI at its best block, or of non-SI: on one GPU, without a network."""
    here = replace(setting, sp=1, nodes=None).with_latency(network_ms=0)
    blocks = SI_BLOCKS if algorithm == "si" else (None,)
    return min(ms_per_token(here.with_spec(lookahead=block), algorithm) for block in blocks)


@cache
def fastest(setting: SimulationConfig) -> SimulationConfig:
    """Return the setting with what is fastest for DSI on a few texts; a target is busy for two messages more."""
    away = setting.latency.target_ms + 2 * setting.latency.network_ms
    block = minimal_lookahead(away, setting.latency.drafter_ms, setting.sp)
    tried = [
        setting.with_spec(lookahead=k, min_draft=wait, max_lead=default_max_lead(setting.sp, k))
        for k, wait in product(sorted({block, block + 1, 2 * block, 7}), (0, 3))
    ]
    return min(tried, key=lambda choice: ms_per_token(choice, "dsi", range(TRIES)))


def dsi(setting: SimulationConfig) -> float:
    return ms_per_token(fastest(setting), "dsi")


def apart(setting: SimulationConfig, delay: float) -> SimulationConfig:
    """A machine for each server."""
    return replace(setting, nodes=setting.count).with_latency(network_ms=delay)


def by_delay() -> list[Row]:
    """DSI on eight machines of one GPU each, against SI and non-SI on one."""
    rows = []
    for (name, pair), acceptance in product(pairs().items(), ACCEPTANCES):
        setting = replace(pair, acceptance=acceptance)
        ms = [dsi(apart(setting, delay)) for delay in DELAYS]
        over_si = [alone(setting, "si") / time for time in ms]
        rows.append(
            {
                "pair": name,
                "acceptance": acceptance,
                "delays_ms": DELAYS,
                "dsi_ms": ms,
                "over_si": over_si,
                "over_nonsi": [alone(setting, "nonsi") / time for time in ms],
                "half_gone_ms": crossing(over_si, (1 + over_si[0]) / 2),
                "gone_ms": crossing(over_si, 1),
            }
        )
    return rows


def by_jitter() -> list[Row]:
    """The 7B pair half a millisecond apart, where messages vary by 90%, forwards by 30%, or both."""
    plan = fastest(apart(pairs()["vicuna-7b"], 0.5))
    even = ms_per_token(plan, "dsi")
    return [
        {"network_jitter": network, "jitter": forwards, "time_over_even": ms / even}
        for network, forwards in ((0.9, 0.0), (0.0, 0.3), (0.9, 0.3))
        if (ms := ms_per_token(plan.with_latency(network_jitter=network, jitter=forwards), "dsi"))
    ]


def crossing(ratios: Sequence[float], level: float) -> float | None:
    """At which delay the ratio falls to this level, on a straight line between two that were tried."""
    for (a, above), (b, below) in pairwise(zip(DELAYS, ratios)):
        if above > level >= below:
            return a + (b - a) * (above - level) / (above - below)
    return None


def second_machine() -> list[Row]:
    """DSI on two machines over DSI on one of them, by what a machine holds."""
    delays = (0.05, 0.5, 2)
    rows = []
    for (name, pair), gpus in product(pairs().items(), MACHINES):
        one = dsi(replace(pair, sp=gpus - 1))
        two = replace(pair, sp=2 * gpus - 1, nodes=2)
        gains = [one / dsi(two.with_latency(network_ms=delay)) for delay in delays]
        over_si = alone(pair, "si") / one
        rows.append({"pair": name, "gpus": gpus, "delays_ms": delays, "gain": gains, "one_over_si": over_si})
    return rows


def by_sp() -> list[Row]:
    """One stream by its SP degree, without a network; what Eq. (1) says is the most that can be busy."""
    rows = []
    for name, pair in pairs().items():
        ms = [dsi(replace(pair, sp=sp)) for sp in SPS]
        enough = next(sp for sp, time in zip(SPS, ms) if min(ms) / time >= ENOUGH)
        most = servers_needed(pair.latency.target_ms, pair.latency.drafter_ms, 1)
        over_si = [alone(pair, "si") / time for time in ms]
        rows.append({"pair": name, "sp": SPS, "ms": ms, "over_si": over_si, "enough": enough, "eq1": most})
    return rows


def by_streams() -> list[Row]:
    """The 7B pair: all processors one pool for DSI, or groups of eight, or each by itself under SI."""
    pair = pairs()["vicuna-7b"]
    return [streams_row(pair, processors, streams) for processors, streams in product(PROCESSORS, STREAMS)]


def streams_row(pair: SimulationConfig, processors: int, streams: int) -> Row:
    groups = min(processors // 8, streams)
    figures = {name: by_itself(pair, name, processors, streams) for name in ("nonsi", "si")}
    figures["dsi"] = together(pair, processors, streams)
    if processors > 8:
        ms, speed = together(pair, 8, streams // groups)
        figures["dsi in groups"] = ms, speed * groups
    return {
        "processors": processors,
        "streams": streams,
        "ms_per_token": {name: ms for name, (ms, _) in figures.items()},
        "tokens_per_second": {name: speed for name, (_, speed) in figures.items()},
    }


def by_itself(pair: SimulationConfig, algorithm: str, processors: int, streams: int) -> tuple[float, float]:
    """Each GPU has streams of its own, which take turns."""
    ms = alone(pair, algorithm)
    return ms * max(1, streams / processors), 1000 * min(streams, processors) / ms


@cache
def together(pair: SimulationConfig, processors: int, streams: int) -> tuple[float, float]:
    """One pool, with the better of a drafter for every eight processors and one for every four."""
    ms = min(pooled(pair, processors, min(processors // share, streams), streams) for share in (8, 4))
    return ms, 1000 * streams / ms  # as if a new text took the place of each that ends


def pooled(pair: SimulationConfig, processors: int, drafters: int, streams: int) -> float:
    pool = replace(
        pair, sp=processors - drafters, drafter_copies=drafters, requests=streams, nodes=processors // 8
    ).with_latency(network_ms=RACK_MS)
    return dsi(pool) if streams == 1 else ms_per_token(pool, "dsi", range(1))


def by_failures() -> list[Row]:
    """One long text of the paper's pair on eight processors, by failures per hour of each."""
    pair = fastest(pairs()[PAPER])
    return [
        failures_row(pair.with_spec(lookahead=None), "nonsi"),
        failures_row(pair.with_spec(lookahead=None), "si"),
        failures_row(pair, "dsi"),
        failures_row(replace(pair, drafter_copies=2), "dsi"),
    ]


def failures_row(setting: SimulationConfig, algorithm: str) -> Row:
    """Tokens per second: put together from parts, and, where failures are frequent, one long run."""
    return {
        "algorithm": algorithm,
        "drafters": setting.drafter_copies,
        "rates": RATES,
        "by_parts": [by_parts(setting, algorithm, rate) for rate in RATES],
        "in_one_run": in_one_run(setting, algorithm, RATES[-1]),
    }


def by_parts(setting: SimulationConfig, algorithm: str, rate: float) -> float:
    """The speed with so many targets and with or without a drafter, by how often that is so.

    Without a drafter it is non-SI's. What the change from one to the other costs is left out.
    """
    up = 1 / (1 + rate * REPAIR_S / 3600)
    guessed = 1 - (1 - up) ** setting.drafter_copies
    slow = speed(setting, "nonsi", 1)
    return sum(
        comb(setting.sp, targets)
        * up**targets
        * (1 - up) ** (setting.sp - targets)
        * (guessed * speed(setting, algorithm, targets) + (1 - guessed) * slow)
        for targets in range(1, setting.sp + 1)
    )


@cache
def speed(setting: SimulationConfig, algorithm: str, targets: int) -> float:
    """Tokens per second; only DSI has a use for more than one target."""
    sp = targets if algorithm == "dsi" else 1
    return 1000 / ms_per_token(replace(setting, sp=sp, drafter_copies=1), algorithm)


def in_one_run(setting: SimulationConfig, algorithm: str, rate: float) -> float:
    frail = replace(setting, tokens=LONG, failures_per_hour=rate, repair_s=REPAIR_S)
    return 1000 * LONG / fmean(frail.run(algorithm, seed).ms for seed in range(TRIES))


@dataclass(frozen=True)
class OneFailure(SimulationConfig):
    """One server fails once, and is not back before the text is done."""

    victim: str = ""
    at_ms: float = 0

    def outages(self, name: str, seed: int) -> Iterator[Outage]:  # noqa: ARG002
        down = self.at_ms
        return iter([Outage(down, down + 1000 * REPAIR_S, self.detection_ms)] if name == self.victim else [])


def by_notice() -> list[Row]:
    """What the failure of one target costs one text, by when it is noticed."""
    return [
        {"pair": name, "notices_ms": NOTICES, "cost_ms": [one_failure(pair, notice) for notice in NOTICES]}
        for name, pair in pairs().items()
    ]


def one_failure(pair: SimulationConfig, notice: float) -> float:
    """Each target in turn, in the middle of a text."""
    plan = fastest(pair)
    costs = []
    for seed, target in product(range(TRIES), range(1, plan.sp + 1)):
        sound = plan.run("dsi", seed).ms
        failing = {"failures_per_hour": 1, "detection_ms": notice, "victim": f"target-{target}"}
        costs.append(OneFailure(**vars(plan) | failing, at_ms=sound / 2).run("dsi", seed).ms - sound)
    return fmean(costs)


# What is printed and drawn.


def lines(results: Results) -> Iterator[str]:
    for title, table in (
        ("DSI on eight machines of one GPU each, by delay of a message in ms", delay_table),
        ("7B, acceptance 0.8, 0.5 ms: time if messages and forwards vary, over time if not", jitter_table),
        ("DSI on two machines over DSI on one, acceptance 0.8, by delay", machine_table),
        ("one stream by SP degree, no network, acceptance 0.8", sp_table),
        (f"7B, acceptance 0.8, {RACK_MS} ms between machines of eight: ms a token, tokens/s", streams_table),
        (f"tokens/s by failures per hour of each server, repaired in {REPAIR_S} s", failures_table),
        ("ms that the failure of one of seven targets costs a text, noticed after so many ms", notice_table),
    ):
        yield f"\n{title} (simulated)"
        heads, *rows = table(results)
        yield from harness.markdown(heads, rows)


def head(*cells: object) -> list[list[str]]:
    return [[str(cell) for cell in cells]]


def delay_table(results: Results) -> list[list[str]]:
    lines = head("pair", "acceptance", "DSI's speed over", *DELAYS, "half gone at", "gone at")
    for row in results["by_delay"]:
        ends = ["-" if (at := row[key]) is None else f"{at:.2g}" for key in ("half_gone_ms", "gone_ms")]
        first = [NAMES[row["pair"]], str(row["acceptance"])]
        lines.append([*first, "SI", *(f"{value:.2f}" for value in row["over_si"]), *ends])
        lines.append([*first, "non-SI", *(f"{value:.2f}" for value in row["over_nonsi"]), "", ""])
    return lines


def jitter_table(results: Results) -> list[list[str]]:
    lines = head("messages vary by", "forwards by", "time")
    for row in results["by_jitter"]:
        lines.append([str(row["network_jitter"]), str(row["jitter"]), f"{row['time_over_even']:.3f}"])
    return lines


def machine_table(results: Results) -> list[list[str]]:
    delays = results["second_machine"][0]["delays_ms"]
    lines = head("pair", "GPUs of a machine", "one machine over SI", *delays)
    for row in results["second_machine"]:
        gains = (f"{value:.2f}" for value in row["gain"])
        lines.append([NAMES[row["pair"]], str(row["gpus"]), f"{row['one_over_si']:.2f}", *gains])
    return lines


def sp_table(results: Results) -> list[list[str]]:
    lines = head("pair", *(f"SP {sp}" for sp in SPS), "enough", "most by Eq. (1)")
    for row in results["by_sp"]:
        speeds = (f"{value:.2f}" for value in row["over_si"])
        lines.append([NAMES[row["pair"]], *speeds, str(row["enough"]), str(row["eq1"])])
    return lines


def streams_table(results: Results) -> list[list[str]]:
    names = list(results["by_streams"][-1]["ms_per_token"])
    lines = head("processors", "streams", *names)
    for row in results["by_streams"]:
        cells = [
            f"{row['ms_per_token'][name]:.2f}, {row['tokens_per_second'][name]:,.0f}"
            if name in row["ms_per_token"]
            else ""
            for name in names
        ]
        lines.append([str(row["processors"]), str(row["streams"]), *cells])
    return lines


def failures_table(results: Results) -> list[list[str]]:
    lines = head("algorithm", "drafters", *RATES, f"{RATES[-1]}, in one run")
    for row in results["by_failures"]:
        speeds = (f"{value:.1f}" for value in (*row["by_parts"], row["in_one_run"]))
        lines.append([row["algorithm"], str(row["drafters"]), *speeds])
    return lines


def notice_table(results: Results) -> list[list[str]]:
    lines = head("pair", *NOTICES)
    for row in results["by_notice"]:
        lines.append([NAMES[row["pair"]], *(f"{value:.1f}" for value in row["cost_ms"])])
    return lines


def draw(results: Results, path: Path) -> None:
    picture = Figure(figsize=(10, 7.2), layout="constrained")
    panels = picture.subplots(2, 2).ravel()
    for axes, acceptance in zip(panels, ACCEPTANCES):
        rows = [row for row in results["by_delay"] if row["acceptance"] == acceptance]
        draw_delays(axes, rows)
        axes.set_title(f"acceptance {acceptance}: a machine for each of 8 GPUs", fontsize=10)
    for row in results["by_sp"]:
        panels[3].plot(SPS, row["over_si"], "o-", color=COLOURS[row["pair"]])
    panels[3].set_xscale("log", base=2)
    panels[3].set_xticks(SPS, [str(sp) for sp in SPS])
    panels[3].set_xlabel("SP degree (target servers), no network")
    panels[3].set_title("acceptance 0.8: one stream, by SP degree", fontsize=10)
    for axes in panels:
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel("DSI's speed over SI's (simulated)")
        style.hide_frame(axes)
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    style.save(picture, path)


def draw_delays(axes: Axes, rows: list[Row]) -> None:
    for row in rows:
        axes.plot(DELAYS, row["over_si"], "o-", color=COLOURS[row["pair"]], label=NAMES[row["pair"]])
    axes.set_xscale("symlog", linthresh=0.05, linscale=0.5)
    axes.set_xticks(DELAYS, [str(delay) for delay in DELAYS], fontsize=8)
    axes.set_xlabel("delay of a message, each way (ms)")


def main() -> None:
    parser = harness.arguments(__doc__, "--svg docs/cluster.svg")
    parser.add_argument("--svg", type=harness.writable, metavar="FILE", help="also draw it")
    options = parser.parse_args()
    parts = (by_delay, by_jitter, second_machine, by_sp, by_streams, by_failures, by_notice)
    results = {part.__name__: part() for part in harness.tracked(parts, len(parts), "tables")}
    if options.svg:
        draw(results, options.svg)
    harness.report(options, "simulated", results, lines(results))


if __name__ == "__main__":
    main()
