"""`dsi serve` on loopback: what it costs over the engine, what it gives under load, and what survives abuse.

Three parts, all measured on the built-in pair: one stream through the server beside the engine alone,
interleaved; many streams at once under DSI beside plain decoding with the same processes; and the same many
streams while clients leave and servers are killed at random, every finished answer compared with plain
decoding's text.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import harness
from dsi.engine.engine import Engine

LOOKAHEAD, MIN_DRAFT = 8, 4  # the same for the engine and the server: each would measure its own
FIXED = ("--sp", "1", "--lookahead", str(LOOKAHEAD), "--min-draft", str(MIN_DRAFT))
WORDS = "fox cat dog girl boy bear tree king bird fish cow hen pig owl car ball".split()  # noqa: SIM905
PROMPTS = [f"Once upon a time there was a little {word}" for word in WORDS]
NEW_TOKENS = 48
LONG = 200  # tokens of one stream alone


@dataclass(frozen=True)
class Case:
    """A request and the text that plain decoding gives it."""

    prompt: str
    temperature: float
    seed: int
    text: str

    def body(self, algorithm: str) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "algorithm": algorithm,
        }


def cases(engine: Engine) -> list[Case]:
    """Half greedy, half sampled, by plain decoding without any server."""
    requests = []
    for i, prompt in enumerate(PROMPTS):
        for temperature, seed in ((0.0, 0), (1.0, i)):
            options = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": seed}
            text = engine.generate(prompt, algorithm="nonsi", **options).text
            requests.append(Case(prompt, temperature, seed, text))
    return requests


@contextmanager
def server(streams: int, *options: str) -> Iterator[tuple[str, int]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "dsi", "serve", "--port", "0", "--max-running", str(streams)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    line = ""
    try:
        for line in process.stderr or ():
            if address := re.search(r"listening on (\S+)", line):
                subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # its log
                yield address[1], process.pid
                break
        else:
            harness.fail(f"the server did not start: {line.strip()}")
    finally:
        process.terminate()
        process.wait(30)


def alone(engine: Engine, prompt: str) -> float:
    began = time.perf_counter()
    done = engine.generate(prompt, max_new_tokens=LONG)
    return len(done.tokens) / (time.perf_counter() - began)


def served(client: httpx.Client, prompt: str) -> float:
    body = {"prompt": prompt, "max_tokens": LONG, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    took = time.perf_counter() - began
    return float(json.loads(lines[-2][6:])["usage"]["completion_tokens"]) / took


def overhead(engine: Engine, url: str, rounds: int) -> dict[str, Any]:
    """One stream: tokens per second of the server over the engine's, round by round."""
    prompts = [f"Story {i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(rounds + 1)]  # which neither has read
    with httpx.Client(base_url=url, timeout=60) as client:
        contenders = {"engine": partial(alone, engine), "server": partial(served, client)}
        speeds = {name: runs[1:] for name, runs in harness.interleave(contenders, prompts).items()}  # 1: warm-up
    ratios = harness.ratios(speeds["server"], speeds["engine"])
    engine_speed, server_speed = median(speeds["engine"]), median(speeds["server"])
    result = {"engine": engine_speed, "server": server_speed, "ratio": median(ratios), "ratios": ratios}
    harness.log(
        f"one stream: {server_speed:.0f} tokens/s served, {engine_speed:.0f} by the engine alone, ratio "
        f"{median(ratios):.3f} (median; {min(ratios):.2f} to {max(ratios):.2f} over {rounds} rounds)"
    )
    return result


@dataclass
class Score:
    """What became of the requests."""

    finished: int = 0
    right: int = 0
    left: int = 0  # clients that went away
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)


@asynccontextmanager
async def clients(url: str, streams: int) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield client


async def one(client: httpx.AsyncClient, case: Case, algorithm: str, score: Score, leave: float) -> None:
    """One request; with `leave`, the client may go away in the middle."""
    text, began = "", time.perf_counter()
    goes = random.random() < leave
    async with client.stream("POST", "/v1/completions", json=case.body(algorithm)) as response:
        if response.status_code != 200:
            score.refused += 1
            await asyncio.sleep(float(response.headers.get("retry-after", 0)))
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    score.failed.append(chunk["error"]["message"])
                    return
                if not text:
                    score.firsts.append(time.perf_counter() - began)
                text += chunk["choices"][0]["text"]
                if goes and random.random() < 0.3:
                    score.left += 1
                    return
    score.finished += 1
    score.right += text == case.text
    score.tokens += NEW_TOKENS


async def load(url: str, cases: list[Case], algorithm: str, streams: int, seconds: float, leave: float = 0.0) -> Score:
    """So many clients, each with one request after the other, until the time is up."""
    score, end = Score(), time.perf_counter() + seconds

    async def go_on(client: httpx.AsyncClient) -> None:
        while time.perf_counter() < end:
            try:
                await one(client, random.choice(cases), algorithm, score, leave)
            except httpx.HTTPError as error:
                score.failed.append(type(error).__name__)

    async with clients(url, streams) as client:
        await asyncio.gather(*(go_on(client) for _ in range(streams)))
    return score


def throughput(url: str, cases: list[Case], streams: int, seconds: float) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"dsi": [], "nonsi": []}
    for _ in range(2):
        for algorithm, rates in speeds.items():
            began = time.perf_counter()
            score = asyncio.run(load(url, cases, algorithm, streams, seconds))
            rates.append(score.tokens / (time.perf_counter() - began))
            if score.right != score.finished or score.failed:
                harness.fail(f"{algorithm}: {score.right} of {score.finished} right, {score.failed[:3]}")
    ratios = harness.ratios(*speeds.values())
    dsi, plain = (median(rates) for rates in speeds.values())
    harness.log(
        f"{streams} streams: {dsi:.0f} tokens/s under dsi, {plain:.0f} by plain decoding, ratios "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )
    return {"streams": streams, "tokens_per_second": speeds, "ratios": ratios}


def family(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [pid, *children]


def memory_mib(pid: int) -> float:
    """Of the server and its processes, shared pages once."""
    total = 0
    for process in family(pid):
        with suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1])  # type: ignore[index]
    return total / 1024


async def abuse(pid: int, end: float, every: float) -> tuple[int, list[float]]:
    """Kill a server now and then; what the memory was, second by second."""
    kills, memory = 0, []
    next_kill = time.perf_counter() + every
    while time.perf_counter() < end:
        await asyncio.sleep(1)
        memory.append(memory_mib(pid))
        if time.perf_counter() > next_kill:
            with suppress(ProcessLookupError):
                os.kill(random.choice(family(pid)[1:]), signal.SIGKILL)
                kills += 1
            next_kill = time.perf_counter() + random.uniform(0.5, 1.5) * every
    return kills, memory


def soak(url: str, pid: int, cases: list[Case], streams: int, seconds: float) -> dict[str, Any]:
    async def both() -> tuple[Score, tuple[int, list[float]]]:
        end = time.perf_counter() + seconds
        return await asyncio.gather(load(url, cases, "dsi", streams, seconds, leave=0.25), abuse(pid, end, every=4.0))

    score, (kills, memory) = asyncio.run(both())
    third = len(memory) // 3
    early, late = median(memory[third : 2 * third]), median(memory[-third:])
    running = httpx.get(url + "/metrics").text
    left = re.search(r"dsi:num_requests_running (\S+)", running)
    harness.log(
        f"{streams} streams for {seconds:.0f} s, {kills} servers killed, {score.left} clients left: "
        f"{score.right} of {score.finished} finished answers are plain decoding's text, {len(score.failed)} "
        f"failed, {score.refused} refused; memory {early:.0f} MiB in the middle third, {late:.0f} in the "
        f"last; first token after {median(score.firsts):.1f} s (median)"
    )
    return {
        "finished": score.finished,
        "right": score.right,
        "failed": score.failed,
        "refused": score.refused,
        "left": score.left,
        "kills": kills,
        "memory_mib": memory,
        "still_running": left[1] if left else None,
        "tokens_per_second": score.tokens / seconds,
    }


def main() -> None:
    parser = harness.arguments(__doc__, "--seconds 6 --streams 8 --rounds 2", streams=64, rounds=12)
    parser.add_argument(
        "--seconds", type=harness.positive, default=60, help="of the abuse; load takes a third, 4 times"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    results: dict[str, Any] = {}
    with Engine.load(lookahead=LOOKAHEAD, min_draft=MIN_DRAFT) as engine, server(options.streams, *FIXED) as (url, pid):
        requests = cases(engine)
        results["one_stream"] = overhead(engine, url, options.rounds)
        results["load"] = throughput(url, requests, options.streams, options.seconds / 3)
        results["abuse"] = soak(url, pid, requests, options.streams, options.seconds)
    harness.report(options, "measured", results, [])
    abused = results["abuse"]
    if abused["right"] != abused["finished"] or abused["failed"]:
        harness.fail("an answer was lost or wrong")


if __name__ == "__main__":
    main()
