"""What faults of worker processes cost: targets and drafters that are killed, stopped, slowed or in a crash loop.

Measured: the built-in pair with two targets, in processes and on Ray. Each text is written once without and once
with a fault that begins in its first third; both must be plain decoding's. Then a server under load, whose
processes are killed, stopped and slowed at random. `--only` picks parts: processes, ray, server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import harness
from dsi.engine.engine import Engine
from dsi.fleets.ray_actors import ResourceRequest
from serve import Score, cases, load, server

ALGORITHMS = ("nonsi", "si", "pearl", "dsi", "auto")
ROLES = ("target", "drafter")
PROMPT = "Once upon a time there was a little girl who"
TOKENS = 200
LOOP_SECONDS, LOOP_EVERY = 2.0, 0.25  # of a crash loop, and between two of its kills
SLOW_STEP = 0.005  # a slowed process runs for one step out of ten
RESOURCES = {"target": ResourceRequest(cpus=0.01), "drafter": ResourceRequest(cpus=0.01)}
PARTS = ("processes", "ray", "server")


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            with suppress(OSError):
                yield from descendants(int(child))


def workers(pid: int, name: str) -> list[int]:
    """The worker processes under a process whose server's name begins like this."""
    found = []
    for child in descendants(pid):
        with suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().startswith(f"dsi {name}"):
                found.append(child)
    return found


def send(pids: Iterable[int], what: signal.Signals) -> int:
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            sent += 1
    return sent


def kill(name: str, _: threading.Event) -> None:
    send(workers(os.getpid(), name), signal.SIGKILL)


def stop(name: str, _: threading.Event) -> None:
    send(workers(os.getpid(), name), signal.SIGSTOP)


def slow(name: str, done: threading.Event) -> None:
    """Let a process run for a tenth of the time until the text is written."""
    slow_down(workers(os.getpid(), name), done)


def slow_down(pids: list[int], done: threading.Event) -> None:
    while not done.is_set():
        send(pids, signal.SIGSTOP)
        done.wait(9 * SLOW_STEP)
        send(pids, signal.SIGCONT)
        time.sleep(SLOW_STEP)


def crash_loop(name: str, _: threading.Event) -> None:
    """Kill all processes of a role again and again."""
    end = time.monotonic() + LOOP_SECONDS
    while time.monotonic() < end:
        send(workers(os.getpid(), name.partition("-")[0]), signal.SIGKILL)
        time.sleep(LOOP_EVERY)


FAULTS: dict[str, Callable[[str, threading.Event], None]] = {
    "killed": kill,
    "stopped": stop,
    "slowed tenfold": slow,
    "crash loop": crash_loop,
}


def busy_server(engine: Engine, role: str) -> str:
    """The server of a role that computes now, or else the first."""
    fleet: Any = engine.fleet
    servers = [name for name, own, _ in fleet.servers() if own == role]
    return str(next((name for name in servers if name in fleet._scheduler.running), servers[0]))


def generate(
    engine: Engine, algorithm: str, fault: Callable[[threading.Event], None] | None = None
) -> tuple[str, float]:
    """Write the text, with a fault that begins after a tenth of its tokens; return it and the seconds it took."""
    done = threading.Event()
    thread = threading.Thread(target=fault, args=(done,)) if fault else None
    text, began = "", time.perf_counter()
    for i, part in enumerate(engine.stream(PROMPT, max_new_tokens=TOKENS, algorithm=algorithm)):
        text += part
        if i == 4 and thread:
            thread.start()
    took = time.perf_counter() - began
    done.set()
    if thread:
        thread.join()
    return text, took


def settle(engine: Engine) -> None:
    """Wait until every server is up again."""
    fleet: Any = engine.fleet
    end = time.monotonic() + 120
    while not all(alive for *_, alive in fleet.servers()):
        if time.monotonic() > end:
            harness.fail("a server did not come back within 120 s")
        fleet.check_workers()
        time.sleep(0.05)
    for _ in range(2):  # a new process reads its weights
        engine.generate(PROMPT, max_new_tokens=16, algorithm="dsi")


def disturbed(fleet: str, repeats: int) -> list[dict[str, Any]]:
    """Every role, fault and algorithm on one kind of fleet."""
    options: dict[str, Any] = {"fleet": "ray", "resources": RESOURCES} if fleet == "ray" else {}
    cells = [(role, fault, name) for role in ROLES for fault in FAULTS for name in ALGORITHMS]
    rows = []
    with Engine.load(sp=2, **options) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=TOKENS, algorithm="nonsi").text
        for role, fault, algorithm in harness.tracked(cells, len(cells), f"cells on {fleet}"):
            rows.append(cell(engine, expected, role, fault, algorithm, repeats) | {"fleet": fleet})
    return rows


def cell(engine: Engine, expected: str, role: str, fault: str, algorithm: str, repeats: int) -> dict[str, Any]:
    fleet: Any = engine.fleet
    before, lost, right = sum(fleet.deaths.values()), [], 0
    for _ in range(repeats):
        settle(engine)
        plain, plain_seconds = generate(engine, algorithm)
        text, seconds = generate(engine, algorithm, lambda done: FAULTS[fault](busy_server(engine, role), done))
        right += plain == text == expected
        lost.append(seconds - plain_seconds)
    deaths = sum(fleet.deaths.values()) - before
    names = {"role": role, "fault": fault, "algorithm": algorithm}
    return names | {"texts": repeats, "equal": right, "lost_seconds": lost, "deaths": deaths}


@contextmanager
def random_faults(pid: int, every: float, seed: int) -> Iterator[Counter[str]]:
    """Kill, stop or slow a random worker process of a server every so often."""
    done, counts, choose = threading.Event(), Counter[str](), random.Random(seed)

    def inject() -> None:
        while not done.wait(choose.uniform(0.5, 1.5) * every):
            fault, role = choose.choice(("killed", "stopped", "slowed tenfold")), choose.choice(ROLES)
            pids = workers(pid, role)
            if not pids:
                continue
            chosen = [choose.choice(pids)]
            if fault == "slowed tenfold":
                over = threading.Event()
                threading.Timer(1.0, over.set).start()
                slow_down(chosen, over)
            else:
                send(chosen, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            counts[f"{role} {fault}"] += 1

    thread = threading.Thread(target=inject)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()


def under_load(streams: int, faults: int, seed: int) -> dict[str, Any]:
    """Streams of a server until so many faults have happened; then all of them must end."""
    with Engine.load() as engine:
        requests = cases(engine)
    score, began = Score(), time.perf_counter()
    with server(streams, "--sp", "2") as (url, pid), random_faults(pid, 0.5, seed) as counts:
        while counts.total() < faults:
            for algorithm in ALGORITHMS:
                part = asyncio.run(load(url, requests, algorithm, streams, 3.0))
                score.finished += part.finished
                score.right += part.right
                score.refused += part.refused
                score.failed += part.failed
            harness.progress(min(counts.total(), faults), faults, "faults on the server")
    return {
        "streams": streams,
        "faults": dict(counts),
        "seconds": time.perf_counter() - began,
        "finished": score.finished,
        "right": score.right,
        "refused": score.refused,
        "failed": score.failed,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each fleet, role and fault: the most time that was lost, by algorithm."""
    heads = ("fleet", "server", "fault", "texts equal", *(f"{name}, s" for name in ALGORITHMS))
    lines = []
    for key in dict.fromkeys((row["fleet"], row["role"], row["fault"]) for row in rows):
        of = [row for row in rows if (row["fleet"], row["role"], row["fault"]) == key]
        equal = f"{sum(row['equal'] for row in of)} of {sum(row['texts'] for row in of)}"
        lost = {row["algorithm"]: max(0.0, *row["lost_seconds"]) for row in of}
        lines.append((*key, equal, *(f"{lost[name]:.1f}" for name in ALGORITHMS)))
    return harness.markdown(heads, lines)


def main() -> None:
    parser = harness.arguments(__doc__, "--only processes --repeats 1", repeats=3, streams=16, faults=200)
    parser.add_argument("--only", type=harness.names(*PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [row for fleet in PARTS[:2] if fleet in options.only for row in disturbed(fleet, options.repeats)]
    results: dict[str, Any] = {"rows": rows}
    if "server" in options.only:
        results["server"] = under_load(options.streams, options.faults, options.seed)
    lines = [*table(rows)] if rows else []
    harness.report(options, "measured", results, [*lines, *([str(results["server"])] if "server" in results else [])])
    if any(row["equal"] < row["texts"] for row in rows):
        harness.fail("a text was not equal")
    if "server" in results and (
        results["server"]["right"] < results["server"]["finished"] or results["server"]["failed"]
    ):
        harness.fail("an answer was lost or wrong")


if __name__ == "__main__":
    main()
