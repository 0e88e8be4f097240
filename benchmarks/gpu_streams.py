"""Many requests on one whole GPU: real forwards that texts and draft trees share. Measured.

Models of real shapes with random weights; an oracle accepts draft tokens at a chosen rate, and the drafter's next
choice where the one before is wrong. The tokens per second of all requests at once, under plain decoding and under
the policy that `auto` has there, beside one request alone under plain decoding; texts are compared. The prompts are
in the KV caches before, in the drafter's where it is used: each policy begins its texts twice. How long the first time
takes, which reads them, is measured as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

import harness
from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.policies import autoregressive, policy_for
from dsi.core.request import Request
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.engine.build import silence_transformers
from dsi.engine.build_cuda import packed_servers
from dsi.engine.profile_cuda import latency_model, with_packed_forwards
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import PrefixTable, Server, make_servers
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.process_utils import freeze_objects
from dsi.models.protocol import Model, SamplingModel
from dsi.models.shapes import SHAPES, random_model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import shared_spec
from oracle import Oracle, PackedOracle

LABEL = "measured, random weights, acceptance by an oracle"
PROMPT, ROOM = 128, 512
MAX_TREE = 32  # of requests at once
READING = 2  # tokens of the texts by which prompts are read: before the last one there is something to draft


@dataclass
class Pair:
    """A target and a drafter on one device, each with forwards of one text and of several."""

    target: CudaGraphModel
    drafter: CudaGraphModel
    packed: dict[str, PackedCudaModel]
    latency: LatencyModel

    @classmethod
    def of(cls, shape: str, drafter_shape: str, device: str, streams: int) -> Pair:
        target, drafter = (random_model(name, "bfloat16", device, ROOM) for name in (shape, drafter_shape))
        single = CudaGraphModel(target, ROOM, segments=1), CudaGraphModel(drafter, ROOM, segments=1, drafts=True)
        packed = {
            role: PackedCudaModel(model, ROOM, (streams + 2) * ROOM, streams + 2, drafts=role == DRAFTER)
            for role, model in ((TARGET, target), (DRAFTER, drafter))
        }
        latency = latency_model(single[:1], single[1], PROMPT, context=ROOM)
        trial = CudaFleet(make_servers(single[:1], {DRAFTER: single[1]}), packed=packed_servers(packed))
        return cls(*single, packed, with_packed_forwards(latency, trial, packed, PROMPT).with_targets(1))

    def loop(self, acceptance: float, runner_up: float, seed: int) -> EngineLoop:
        teacher = ToyTarget(seed)
        guess = ToyDrafter(teacher, acceptance, seed * 1013, runner_up)
        models: dict[str, Model] = {TARGET: teacher, DRAFTER: guess}
        packed = {
            name: Server(name, role, PackedOracle(SamplingModel(self.packed[role]), models[role]), PrefixTable(256))
            for name, role in ((f"{TARGET}-1", TARGET), (DRAFTER, DRAFTER))
        }
        servers = make_servers([Oracle(self.target, teacher)], {DRAFTER: Oracle(self.drafter, guess)})
        fleet = CudaFleet(servers, packed=packed)
        fleet.limit_rows(self.latency.shared_rows or self.packed[TARGET].max_rows)
        loop = EngineLoop(fleet)
        loop.load.shared_spec = self.shared_spec
        return loop

    def shared_spec(self, requests: int, acceptance: float, runner_up: float, tree: int) -> SpecConfig:
        """As a deployment chooses."""
        return spec_for(self.latency, requests, round(acceptance, 1), round(runner_up, 1), tree)


spec_for = cache(shared_spec)


def prompt(seed: int, number: int) -> tuple[int, ...]:
    return (1 + seed, 2 + number, *[3] * (PROMPT - 2))


def run(
    loop: EngineLoop, seed: int, tokens: int, policies: Callable[[], Sequence[Policy]]
) -> tuple[float, float, list[Any]]:
    """The seconds that it takes to read the prompts, and to generate the texts with such policies; the texts."""
    reading, _ = timed(loop, requests(seed, READING, policies()))
    seconds, texts = timed(loop, requests(seed, tokens, policies()))
    loop.fleet.close()
    return reading, seconds, texts


def requests(seed: int, tokens: int, policies: Sequence[Policy]) -> list[Request]:
    return [Request(prompt(seed, number), tokens, policy) for number, policy in enumerate(policies)]


def timed(loop: EngineLoop, requests: Sequence[Request]) -> tuple[float, list[Any]]:
    began = perf_counter()
    done = loop.run(*requests)
    return perf_counter() - began, [completion.tokens for completion in done]


def plain_policies(count: int, loop: EngineLoop) -> list[Policy]:
    shared = SharedForwards(DRAFTER, loop.load)
    return [shared.plain(autoregressive()) for _ in range(count)]


def chosen_policies(count: int, loop: EngineLoop, lookahead: int) -> list[Policy]:
    """What an engine with `auto` gives to requests at once; one alone has SI."""
    shared, alone = SharedForwards(DRAFTER, loop.load), policy_for(SpecConfig("si", lookahead))
    return [shared.policy(alone, MAX_TREE) for _ in range(count)]


def stream_row(pair: Pair, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one request alone, of all under plain decoding, and of all as the engine chooses."""
    speeds: dict[str, list[float]] = {"one": [], "plain": [], "chosen": []}
    prompt_ms: list[float] = []
    for seed in range(options.repeats + 1):  # the first warms up
        texts, readings = [], []
        for name in speeds if seed % 2 else reversed(speeds):
            loop = pair.loop(options.acceptance, options.runner_up, seed)
            count = 1 if name == "one" else streams
            policies = partial(plain_policies, count, loop)
            if name == "chosen":
                policies = partial(chosen_policies, count, loop, options.lookahead)
            reading, seconds, written = run(loop, seed, options.tokens, policies)
            texts.append(written[0])
            if seed:
                speeds[name].append(count * options.tokens / seconds)
            readings.append(reading)
        if seed:
            prompt_ms.append(1000 * max(readings))  # the others found them in the KV cache
        if len(set(texts)) > 1:
            harness.fail(f"seed {seed}, {streams} streams: different texts")
    return {"streams": streams, "tokens_per_second": speeds, "prompts_ms": prompt_ms}


def lines(results: dict[str, Any]) -> Iterator[str]:
    rows = []
    for shape, part in results["shapes"].items():
        for row in part["streams"]:
            one, plain, chosen = row["tokens_per_second"].values()
            over = (harness.spread(harness.ratios(*pair), 2) for pair in ((plain, one), (chosen, one), (chosen, plain)))
            rows.append([shape, row["streams"], *over, f"{median(row['prompts_ms']):.0f}"])
    heads = ["shape", "streams", "plain over one", "chosen over one", "chosen over plain", "reading prompts, ms"]
    return harness.table(heads, rows)


def measured(shape: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of a target, as far as they are there."""
    part: dict[str, Any] = {"streams": []}
    pair = Pair.of(shape, options.drafter, options.device, max(options.streams))
    part["latency"] = pair.latency.json()
    harness.log(f"{shape}: {part['latency']}")
    freeze_objects()
    for streams in options.streams:
        part["streams"].append(stream_row(pair, streams, options))
        harness.log(f"  {part['streams'][-1]}")
        yield part


def numbers(text: str) -> Sequence[int]:
    return [harness.positive(number) for number in text.split(",")]


def main() -> None:
    parser = harness.arguments(__doc__, "--shapes vicuna-13b --streams 64", tokens=200, repeats=3, lookahead=4)
    parser.add_argument("--shapes", type=harness.names(*SHAPES), default=["vicuna-7b"])
    parser.add_argument("--drafter", choices=list(SHAPES), default="vicuna-68m")
    parser.add_argument("--device", default="cuda:0", help="cpu: the same in torch, to try the script")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--acceptance", type=harness.share, default=0.8, help="of first choices")
    parser.add_argument("--runner-up", type=harness.share, default=0.5)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if PROMPT + options.tokens + MAX_TREE > ROOM:
        parser.error(f"--tokens {options.tokens}: must be at most {ROOM - PROMPT - MAX_TREE}")
    silence_transformers()
    device = torch.cuda.get_device_name(0) if options.device != "cpu" else "CPU"
    results: dict[str, Any] = {"device": device, "tokens": options.tokens, "shapes": {}}

    for shape in harness.tracked(options.shapes, len(options.shapes), "shapes"):
        for part in measured(shape, options):
            results["shapes"][shape] = part
            harness.save(options, LABEL, results)  # a run may be cut off
    harness.report(options, LABEL, results, lines(results))


if __name__ == "__main__":
    main()
