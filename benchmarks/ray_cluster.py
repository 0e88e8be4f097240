"""Servers on Ray: what a job costs over a process on the same machine, DSI over SI, and what faults cost.

Waited: models that wait instead of computing, on real actors. `--only` picks parts: latency, speed, faults.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
from dsi.core.messages import Verify
from dsi.core.policies import autoregressive, distributed, policy_for
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.ray_actors import RayFleet, ResourceRequest, ray, silence_ray
from dsi.fleets.servers import make_servers
from dsi.models.toy import ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SECOND, SimulationConfig
from ray_faults import faulty_worker

RESOURCES = {"target": ResourceRequest(cpus=0.01), "drafter": ResourceRequest(cpus=0.01)}
PAPER = SimulationConfig(LatencyModel(37.7, 2.5), 0.8, sp=7, tokens=100)
QUICK = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=60)
FAULTS = [  # what, how, every how many of them, how often
    ("answer", "twice", 3, 150),
    ("cancel", "lose", 1, 100),
    ("answer", "late", 9, 60),
    ("verify", "late", 9, 40),
    ("draft", "late", 2, 20),
    ("verify", "die", 12, 40),
    ("draft", "die", 3, 25),
    ("answer", "die", 15, 25),
    ("cancel", "die", 3, 15),
    ("prefill", "die", 2, 10),
    ("verify", "hang", 14, 15),
    ("answer", "hang", 25, 10),
]
TEXT = TokenSequence.of((1, 2, 3))


def latency(jobs: int) -> dict[str, Any]:
    """A job that takes no time, on a process and on an actor, in turn."""
    servers = make_servers([ToyTarget(3)], {})
    actors, processes = RayFleet(servers, resources=RESOURCES), ProcessFleet(servers)
    actors.wait_until_ready()
    contenders = {"actor": partial(job_ms, actors), "process": partial(job_ms, processes)}
    times = harness.interleave(contenders, range(jobs), quiet=True)
    actors.close()
    processes.close()
    ms = {name: (median(runs), sorted(runs)[int(0.99 * len(runs))]) for name, runs in times.items()}
    added = [a - b for a, b in zip(ms["actor"], ms["process"])]
    harness.log(
        f"a job of no time, {jobs} of each: actor {ms['actor'][0]:.2f} ms (99%: {ms['actor'][1]:.2f}), "
        f"process {ms['process'][0]:.2f} ({ms['process'][1]:.2f}): adds {added[0]:.2f} ({added[1]:.2f})"
    )
    return {"median_and_p99_ms": ms, "added_ms": added}


def job_ms(fleet: RayFleet | ProcessFleet, id: int) -> float:
    began = time.perf_counter()
    fleet.start(Verify(id, TEXT, 1))
    fleet.next_event()
    return 1000 * (time.perf_counter() - began)


def speed(repeats: int) -> dict[str, Any]:
    """The paper's wait models on seven targets: on actors beside virtual time, with the same seeds."""
    times: dict[str, list[float]] = {"si": [], "dsi": []}
    virtual: dict[str, list[float]] = {"si": [], "dsi": []}
    blocks = {"si": 5, "dsi": 3}
    for seed in range(repeats):
        fleet = RayFleet(PAPER.servers(seed, SECOND), resources=RESOURCES)
        fleet.wait_until_ready()
        loop = EngineLoop(fleet)
        for name in ("si", "dsi", "si", "dsi"):  # the first of each warms up
            policy = policy_for(SpecConfig(name, blocks[name]))
            [done] = loop.run(Request((1, 2, 3), PAPER.tokens, policy))
            [free] = EngineLoop(PAPER.simulated(seed)).run(Request((1, 2, 3), PAPER.tokens, policy))
            if done.tokens != free.tokens:
                harness.fail("different texts")
            times[name].append(1000 * float(done.elapsed))
            virtual[name].append(float(free.elapsed))
        fleet.close()
    over = {name: sum(times[name][1::2]) / sum(virtual[name][1::2]) for name in times}
    ratio = sum(times["si"][1::2]) / sum(times["dsi"][1::2])
    free_ratio = sum(virtual["si"]) / sum(virtual["dsi"])
    harness.log(
        f"37.7 and 2.5 ms, acceptance 0.8, seven targets, {repeats} seeds: DSI over SI {ratio:.2f} on actors "
        f"(waited), {free_ratio:.2f} in virtual time; over virtual time SI {over['si']:.3f}, DSI "
        f"{over['dsi']:.3f}"
    )
    return {"dsi_over_si": ratio, "simulated": free_ratio, "over_virtual": over}


def ordinary(requests: int = 10) -> float:
    fleet = RayFleet(QUICK.servers(3, SECOND), resources=RESOURCES)
    fleet.wait_until_ready()
    loop = EngineLoop(fleet)
    seconds = [float(loop.run(request())[0].elapsed) for _ in range(requests)]
    fleet.close()
    return median(seconds)


def request() -> Request:
    return Request((1, 2, 3), QUICK.tokens, distributed(2))


def faults(share: float) -> dict[str, Any]:
    """Every kind of fault at every kind of message, until each has happened often enough."""
    [plain] = EngineLoop(QUICK.simulated(3)).run(Request((1, 2, 3), QUICK.tokens, autoregressive()))
    usual, rows = ordinary(), []
    for kind, effect, every, often in FAULTS:
        row = fault(kind, effect, every, max(1, round(often * share)), plain.tokens)
        row["ms_lost"] = 1000 * (row.pop("seconds") - row["texts"] * usual) / row["faults"]
        rows.append(row)
        harness.log(f"  {kind} {effect}: {row['faults']} faults, {row['equal']} of {row['texts']} texts equal, "
            f"{row['ms_lost']:.0f} ms lost by each")  # fmt: skip
    total = Counter[str]()
    for row in rows:
        total.update({name: row[name] for name in ("faults", "texts", "equal")})
    harness.log(f"{total['faults']} faults: {total['equal']} of {total['texts']} texts equal")
    return {"rows": rows, **total}


def fault(kind: str, effect: str, every: int, often: int, plain: tuple[int, ...]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as record:
        fleet = RayFleet(
            QUICK.servers(3, SECOND),
            resources=RESOURCES,
            hang_seconds=1.0,
            worker=faulty_worker(kind, effect, every, Path(record.name)),
        )
        fleet.wait_until_ready()
        loop, texts, equal, seconds, seen = EngineLoop(fleet), 0, 0, 0.0, 0
        while seen < often:
            [done] = loop.run(request())
            texts, equal, seconds = texts + 1, equal + (done.tokens == plain), seconds + float(done.elapsed)
            seen = len(Path(record.name).read_text().splitlines())
        fleet.close()
    return {"kind": kind, "effect": effect, "faults": seen, "texts": texts, "equal": equal, "seconds": seconds}


def main() -> None:
    parser = harness.arguments(__doc__, "--only latency --jobs 100", jobs=1000, repeats=3)
    parser.add_argument("--only", type=harness.names("latency", "speed", "faults"), default="latency,speed,faults")
    parser.add_argument("--share", type=harness.share, default=1.0, help="of the 510 faults")
    options = parser.parse_args()
    ray().init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    silence_ray()
    parts = {
        "latency": partial(latency, options.jobs),
        "speed": partial(speed, options.repeats),
        "faults": partial(faults, options.share),
    }
    results = {name: parts[name]() for name in options.only}
    ray().shutdown()
    harness.report(options, "waited", results, [])


if __name__ == "__main__":
    main()
