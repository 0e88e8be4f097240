"""Speculation over engines behind HTTP: milliseconds a token by every algorithm, and by the engine's own streaming.

Three parts. `waiting`: seven engines that wait instead of computing, 20 or 40 ms a forward and 0.5 ms of network each
way, with a local drafter; what DSI gains over SI beside what it gains in virtual time. Waited. `dsi`: `dsi serve` with
the built-in target, and what a round trip to `/v1/verify` adds to its forward. `vllm`: one and two vLLM servers with
the built-in target, which `make test-engines` installs. Both measured, with the built-in drafter in this process, all
of it on the cores of this machine. Every text is compared with the one that the engine streams by itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from http.client import HTTPConnection
from statistics import median
from time import perf_counter
from typing import Any

import httpx

import harness
import vllm_cpu
from dsi.core.generation import Policy
from dsi.core.messages import GREEDY, TARGET, Sampling
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.engine.build import silence_transformers
from dsi.engine.engine import Engine
from dsi.engine.prompts import BUILTIN_PROMPTS
from dsi.fleets.endpoint import Endpoint
from dsi.fleets.event_loop import EventLoopThread
from dsi.fleets.http import HttpFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.models.endpoints.address import parse_address
from dsi.models.names import BUILTIN, model_path
from dsi.planning.auto import adaptive, cached_latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import PROMPT, SECOND, TITLES, PolicyFactory, SimulationConfig
from serve import server as dsi_server
from waiting_engine import WaitingEngine

STREAM = "stream"
ALGORITHMS = ("nonsi", "si", "pearl", "dsi", "auto")
ROWS = {STREAM: "the engine's own streaming", **TITLES}
TARGETS, NETWORK_MS, DRAFTER_MS, ACCEPTANCE = 7, 0.5, 2.0, 0.8
TARGET_MS = (20.0, 40.0)
MAX_DEVIATION = 0.1  # of DSI over SI from that in virtual time
PARTS = ("waiting", "dsi", "vllm")
VERIFIED = (1, 5)  # positions of the round trips that are measured

Run = tuple[float, Tokens]  # milliseconds a token, and the text


# Engines that wait.


class WaitingPool:
    """So many engines that wait, and a drafter that does in a thread of this process."""

    def __init__(self, config: SimulationConfig, stack: ExitStack) -> None:
        self.config, latency = config, config.latency
        engines = [
            stack.enter_context(WaitingEngine(float(latency.target_ms), float(latency.network_ms)))
            for _ in range(config.sp)
        ]
        self.endpoints = connect([engine.url for engine in engines])
        *_, self._drafter = config.servers(0, SECOND)
        self.fleet = HttpFleet([*target_servers(self.endpoints), self._drafter])
        stack.callback(self.fleet.close)
        self._loop = EngineLoop(self.fleet)
        self._loop.load.targets = config.sp

    def run(self, algorithm: str, seed: int) -> Run:
        """One text, of the toy models with this seed."""
        *_, drafter = self.config.servers(seed, SECOND)
        self._drafter.model = drafter.model
        policy = self._policy(algorithm)
        [done] = self._loop.run(Request(PROMPT, self.config.tokens, policy, Sampling(seed=seed)))
        return float(done.elapsed) * SECOND / self.config.tokens, done.tokens

    def _policy(self, algorithm: str) -> Policy:
        self.fleet.observe = None
        made = algorithm_of(self.config, algorithm)
        return self.config.policy(made) if isinstance(made, str) else made(self._loop, SECOND)

    def stream(self, seed: int) -> Run:
        return streamed(self.endpoints[0].url, "toy", PROMPT, self.config.tokens, seed)


def algorithm_of(config: SimulationConfig, algorithm: str) -> str | PolicyFactory:
    """Under `auto`, what learns the acceptance rate; its table counts the network for the drafter, too."""
    if algorithm != "auto":
        return algorithm
    return adaptive(cached_latency_table(replace(config, nodes=None)), config)


def connect(urls: Sequence[str]) -> list[Endpoint]:
    loop = EventLoopThread()
    endpoints = [Endpoint(parse_address(url), loop) for url in urls]
    for endpoint in endpoints:
        loop.run(endpoint.connect())
    return endpoints


def target_servers(endpoints: Sequence[Endpoint]) -> list[Server]:
    return [Server(f"{TARGET}-{i}", TARGET, endpoint) for i, endpoint in enumerate(endpoints, 1)]


def streamed(url: str, model: str, prompt: Tokens, tokens: int, seed: int = 0) -> Run:
    """A text as the engine streams it by itself."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "seed": seed}
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
    text: list[int] = []
    with httpx.Client(trust_env=False, timeout=60) as client:
        client.get(f"{url}/v1/models")  # the connection
        began = perf_counter()
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += [id for choice in json.loads(line[6:])["choices"] for id in choice["token_ids"] or ()]
        return (perf_counter() - began) * SECOND / tokens, tuple(text)


def waiting(target_ms: float, options: Any) -> dict[str, Any]:
    """Milliseconds a token of every algorithm, over HTTP and in virtual time."""
    latency = LatencyModel(target_ms, DRAFTER_MS, network_ms=NETWORK_MS)
    # Every server on a machine of its own, the drafter on that of the engine.
    config = SimulationConfig(latency, ACCEPTANCE, TARGETS, options.tokens, nodes=TARGETS + 1, thread_pool=False)
    with ExitStack() as stack:
        pool = WaitingPool(config, stack)
        contenders: dict[str, Callable[[int], Run]] = {STREAM: pool.stream}
        contenders |= {name: partial(pool.run, name) for name in ALGORITHMS}
        rows = harness.interleave(contenders, range(options.repeats), warm_up=0, agree=lambda run: run[1])
    ms = {name: [run[0] for run in runs] for name, runs in rows.items()}
    virtual = {name: virtual_ms(config, name, options.repeats) for name in ALGORITHMS}
    gain, virtual_gain = harness.ratios(ms["si"], ms["dsi"]), harness.ratios(virtual["si"], virtual["dsi"])
    return {
        "target_ms": target_ms,
        "ms_per_token": ms,
        "virtual_ms_per_token": virtual,
        "dsi_over_si": gain,
        "virtual_dsi_over_si": virtual_gain,
        "of_virtual": harness.ratios(gain, virtual_gain),
    }


def virtual_ms(config: SimulationConfig, algorithm: str, repeats: int) -> list[float]:
    made = algorithm_of(config, algorithm)
    return [config.run(made, seed).ms / config.tokens for seed in range(repeats)]


# Engines that compute.


@contextmanager
def vllm_pool(targets: int, dtype: str) -> Iterator[list[str]]:
    """So many vLLM servers, each with a core of its own, or one with all but one."""
    cores = ["auto"] if targets == 1 else [str(core) for core in sorted(os.sched_getaffinity(0))[:targets]]
    with ExitStack() as stack:
        servers = [vllm_cpu.Vllm(model_path(BUILTIN, TARGET), dtype, cores=core) for core in cores]
        yield [stack.enter_context(server).url for server in servers]


@contextmanager
def dsi_pool(targets: int, dtype: str) -> Iterator[list[str]]:
    """Servers that do not speculate by themselves."""
    with ExitStack() as stack:
        yield [stack.enter_context(dsi_server(64, "--algorithm", "nonsi", "--dtype", dtype))[0] for _ in range(targets)]


def measured(kind: str, urls: Sequence[str], options: Any) -> dict[str, Any]:
    """Milliseconds a token of every algorithm over these engines."""
    with Engine.load(target=",".join(urls), drafter=BUILTIN) as engine:
        prompts = [engine.tokenizer.encode(prompt) for prompt in BUILTIN_PROMPTS[: options.prompts]]
        contenders: dict[str, Callable[[Tokens], Run]] = {
            STREAM: lambda prompt: streamed(urls[0], BUILTIN, prompt, options.tokens)
        }
        contenders |= {name: partial(generated, engine, name, options.tokens) for name in ALGORITHMS}
        rows = harness.interleave(contenders, prompts, options.rounds, warm_up=1, agree=lambda run: run[1])
    ms = {name: [run[0] for run in runs] for name, runs in rows.items()}
    over = {name: harness.ratios(times, ms[STREAM]) for name, times in ms.items()}
    return {"engine": kind, "targets": len(urls), "dtype": options.dtype, "ms_per_token": ms, "over_streaming": over}


def generated(engine: Engine, algorithm: str, tokens: int, prompt: Tokens) -> Run:
    began = perf_counter()
    done = engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True, algorithm=algorithm)
    return (perf_counter() - began) * SECOND / tokens, done.tokens


def verify_times(url: str, options: Any) -> dict[str, Any]:
    """Milliseconds of verifications in this process, over a plain connection and by our client, interleaved."""
    [endpoint] = connect([url])
    times: dict[str, dict[str, list[float]]] = {}
    try:
        with Engine.load(algorithm="nonsi", dtype=options.dtype) as engine:
            prompt = engine.tokenizer.encode(BUILTIN_PROMPTS[0])
            text = (*prompt, *engine.generate(prompt, max_new_tokens=240, ignore_eos=True).tokens)
            for width in VERIFIED:
                blocks = [(text[:end], width) for end in range(len(prompt) + width, len(text), width)]
                here = partial(verified_here, engine, len(prompt))
                http = partial(verified_over_http, url, len(prompt))
                client = partial(verified_by_client, endpoint, len(prompt))
                contenders = {"here": here, "http": http, "client": client}
                rows = harness.interleave(contenders, blocks, quiet=True, agree=lambda run: run[1])
                times[str(width)] = {name: [run[0] for run in runs] for name, runs in rows.items()}
    finally:
        endpoint.loop.close()
    return times


def verified_here(engine: Engine, prompt_length: int, block: tuple[Tokens, int]) -> Run:
    began = perf_counter()
    [done] = engine.loop.run(engine.verify_request(*block, GREEDY, prompt_length))
    return (perf_counter() - began) * SECOND, done.tokens


@cache
def connection(url: str) -> HTTPConnection:
    made = HTTPConnection(url.removeprefix("http://"))
    made.connect()
    made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def verified_over_http(url: str, prompt_length: int, block: tuple[Tokens, int]) -> Run:
    (prompt, num_positions), connected = block, connection(url)
    began = perf_counter()
    body = json.dumps({"prompt": prompt, "num_positions": num_positions, "prompt_length": prompt_length})
    connected.request("POST", "/v1/verify", body, {"content-type": "application/json"})
    tokens = json.loads(connected.getresponse().read())["tokens"]
    return (perf_counter() - began) * SECOND, tuple(tokens)


def verified_by_client(endpoint: Endpoint, prompt_length: int, block: tuple[Tokens, int]) -> Run:
    began = perf_counter()
    tokens = endpoint.loop.run(endpoint.verify(*block, GREEDY, prompt_length))
    return (perf_counter() - began) * SECOND, tokens


# What is shown.


def lines(results: dict[str, Any]) -> Iterator[str]:
    for row in results["waiting"]:
        yield f"{TARGETS} engines that wait {row['target_ms']:g} ms, ms a token, waited:"
        yield from harness.table(("", "waited", "virtual time"), waiting_rows(row))
        yield f"DSI over SI: {gains(row)}"
    for row in results["measured"]:
        yield f"{row['targets']} {row['engine']}, {row['dtype']}, ms a token, measured:"
        yield from harness.table(("", "median", "over its own streaming"), measured_rows(row))
    for width, times in results["verify"].items():
        yield f"/v1/verify, {width} positions: {round_trip(times)}"


def waiting_rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, ms in row["ms_per_token"].items():
        virtual = row["virtual_ms_per_token"].get(name)
        yield ROWS[name], f"{median(ms):.2f}", f"{median(virtual):.2f}" if virtual else ""


def gains(row: dict[str, Any]) -> str:
    gain, virtual = median(row["dsi_over_si"]), median(row["virtual_dsi_over_si"])
    return f"{gain:.2f}, in virtual time {virtual:.2f}: {harness.extremes(row['of_virtual'])} of it"


def measured_rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, ms in row["ms_per_token"].items():
        yield ROWS[name], f"{median(ms):.2f}", harness.extremes(row["over_streaming"][name])


def round_trip(times: dict[str, list[float]]) -> str:
    http, client = ([there - here for here, there in zip(times["here"], times[name])] for name in ("http", "client"))
    here = f"{median(times['here']):.2f} ms in this process"
    return f"{here}, {harness.spread(http, 2)} more over HTTP, {harness.spread(client, 2)} more by our client"


def check(results: dict[str, Any]) -> None:
    for row in results["waiting"]:
        if abs(median(row["of_virtual"]) - 1) > MAX_DEVIATION:
            harness.fail(f"{row['target_ms']:g} ms: DSI over SI is {median(row['of_virtual']):.2f} of virtual time")


def main() -> None:
    parser = harness.arguments(__doc__, "--parts waiting --repeats 3", tokens=64, repeats=8, prompts=6, rounds=1)
    parser.add_argument("--parts", type=harness.names(*PARTS), default=list(PARTS), help="default: all of them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--check", action="store_true", help="exit with status 1 unless virtual time is near")
    options = parser.parse_args()
    silence_transformers()
    results: dict[str, Any] = {"tokens": options.tokens, "waiting": [], "measured": [], "verify": {}}
    if "waiting" in options.parts:
        results["waiting"] = [waiting(target_ms, options) for target_ms in TARGET_MS]
    if "dsi" in options.parts:
        with dsi_pool(1, options.dtype) as urls:
            results["verify"] = verify_times(urls[0], options)
            results["measured"].append(measured("dsi serve", urls, options))
    if "vllm" in options.parts and not vllm_cpu.is_installed():
        harness.log("vLLM is not installed, and left out: make test-engines")
    elif "vllm" in options.parts:
        for targets in (1, 2):
            with vllm_pool(targets, options.dtype) as urls:
                results["measured"].append(measured("vLLM", urls, options))
    harness.report(options, "waited and measured", results, lines(results))
    if options.check:
        check(results)


if __name__ == "__main__":
    main()
