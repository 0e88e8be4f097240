"""What the engine itself adds to a token, where servers are GPU slices: real code, forwards that only wait.

The GPU is replaced by a clock: a part of a forward has ended when its time is over. Everything else is what
runs there: the core, the fleet that polls, the KV caches, the writing of inputs. The same text in virtual
time with the same latencies shows what is beyond. Waited.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import harness
from dsi.core.messages import DRAFTER
from dsi.core.request import Request
from dsi.core.spec import SpecConfig
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import make_servers
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.protocol import CancelFlag
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.search import DeploymentPlan, PairProfile, device_spec
from oracle import Oracle

ROOM, PROMPT, SEGMENTS = 512, 128, 11
# As measured for a target of 1.1B and a drafter of 68M on slices of 8 multiprocessors of an H200.
BY_WIDTH, DRAFTER_MS = {1: 4.17, 8: 4.22, 16: 5.24, 32: 5.48, 64: 6.7, 128: 10.1}, 0.33
LATENCY = LatencyModel.measured(
    BY_WIDTH,
    DRAFTER_MS,
    cancel_points=SEGMENTS // 3,
    drafter_cancel_points=1,
    shared_kv=True,
)
ROWS = {"si": DeploymentPlan(SpecConfig("si", 12)), "dsi": DeploymentPlan(device_spec(3, 4, 3), 3)}


class Clock:
    """A processor that is busy until `free`, in seconds."""

    def __init__(self) -> None:
        self.free = 0.0


@dataclass(frozen=True)
class Due:
    end: float

    def query(self) -> bool:
        return time.perf_counter() >= self.end


class Timed:
    """A forward that takes its time on its processor, one part after the other."""

    logits = None

    def __init__(self, ms: float, segments: int, clock: Clock) -> None:
        self.segments, self._seconds, self._clock = segments, ms / 1000 / segments, clock

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> Due:  # noqa: ARG002
        ready = max(time.perf_counter(), self._clock.free, after.end if after else 0.0)
        self._clock.free = ready + self._seconds
        return Due(self._clock.free)


def timed(
    model: Any,
    by_width: dict[int, float],
    segments: int,
    share_cache_with: CudaGraphModel | None = None,
    guesses: bool = False,
) -> CudaGraphModel:
    server = CudaGraphModel(
        model, ROOM, segments=1, sizes=tuple(by_width), share_cache_with=share_cache_with, drafts=guesses
    )
    clock = Clock()
    server._forwards = {size: Timed(ms, segments, clock) for size, ms in by_width.items()}  # type: ignore[misc]
    server._followers = [Timed(by_width[1], segments, clock) for _ in range(2 * guesses)]
    return server


def servers(sp: int) -> tuple[list[CudaGraphModel], CudaGraphModel]:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, max_position_embeddings=ROOM))
    targets: list[CudaGraphModel] = []
    for _ in range(sp):
        targets.append(timed(model, BY_WIDTH, SEGMENTS, targets[0] if targets else None))
    return targets, timed(model, dict.fromkeys(BY_WIDTH, DRAFTER_MS), 2, guesses=True)


def waited_and_virtual(name: str, tokens: int, acceptance: float, seed: int) -> tuple[float, float]:
    """Return the milliseconds of one text, waited and in virtual time."""
    choice = ROWS[name]
    targets, drafter = servers(choice.sp)
    teacher = ToyTarget(seed)
    pool = [Oracle(model, teacher) for model in targets]
    draft = ToyDrafter(teacher, acceptance, seed * 1013)
    setting = choice.simulation(PairProfile({1: LATENCY}, {"match": acceptance}), tokens)
    request = Request((1,) * PROMPT, tokens, setting.policy(name))
    fleet = CudaFleet(make_servers(pool, {DRAFTER: Oracle(drafter, draft)}, shared_kv=True))
    for model in (*targets, drafter):
        model.cached_tokens[:] = request.prompt  # it is in the caches
    [done] = EngineLoop(fleet).run(request)
    [virtual] = EngineLoop(setting.simulated(seed)).run(request)
    assert done.tokens == virtual.tokens
    return 1000 * float(done.elapsed), float(virtual.elapsed)


def main() -> None:
    parser = harness.arguments(__doc__, "--repeats 1", tokens=200, repeats=4)
    parser.add_argument("--acceptance", type=harness.share, default=0.93)
    options = parser.parse_args()
    contenders = {name: partial(waited_and_virtual, name, options.tokens, options.acceptance) for name in ROWS}
    runs = harness.interleave(contenders, range(options.repeats))
    results, lines = {}, []
    for name, times in runs.items():
        waited, virtual = (sum(column) for column in zip(*times))
        us = 1000 * (waited - virtual) / options.tokens / options.repeats
        results[name] = {"over_virtual": waited / virtual, "beyond_virtual_us_per_token": us}
        lines.append(f"{name}: {waited / virtual:.3f} of virtual time, {us:.0f} us a token beyond it (waited)")
    harness.report(options, "waited", results, lines)


if __name__ == "__main__":
    main()
