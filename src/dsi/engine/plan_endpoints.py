"""Whether speculation over engines behind URLs pays, by what is measured through them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsi.core.generation import ACCEPTED, CORRECTED
from dsi.core.spec import ALGORITHMS, SpecConfig
from dsi.engine.deployment import SIMULATED_TOKENS
from dsi.engine.engine import Engine
from dsi.engine.prompts import BUILTIN_PROMPTS, sample_prompts
from dsi.planning.auto import latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.search import spec_candidates
from dsi.planning.simulation import SimulationConfig

PROMPTS, TOKENS, LOOKAHEAD = 8, 32, 4  # by which acceptance is measured
BLOCKS = (2, 3, 5, 8, 12, 16, 24, 32)  # of SI and PEARL
DELAYS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # that are tried, of each verification


@dataclass(frozen=True)
class PlannedSpec:
    """A configuration, and its predicted milliseconds per token."""

    spec: SpecConfig
    ms: float

    def json(self) -> dict[str, Any]:
        spec = self.spec
        numbers = {"lookahead": spec.lookahead, "min_draft": spec.min_draft, "targets": spec.max_targets}
        return {"algorithm": spec.algorithm, **numbers, "ms": self.ms}


@dataclass(frozen=True)
class EndpointPlan:
    sp: int
    acceptance: float
    latency: LatencyModel
    stream_ms: float | None  # per token of a text that a target streams
    best: tuple[PlannedSpec, ...]  # of each algorithm, the fastest first
    turning_ms: (
        float | None
    )  # a delay of each verification that changes whether to speculate; None: none of those tried

    @property
    def speculates(self) -> bool:
        return self.best[0].spec.speculates

    def json(self) -> dict[str, Any]:
        return {
            "sp": self.sp,
            "acceptance": self.acceptance,
            "latency": self.latency.json(),
            "stream_ms": self.stream_ms,
            "offers": [planned.json() for planned in self.best],
            "turning_ms": self.turning_ms,
        }


def plan_endpoints(engine: Engine, acceptance: float | None = None) -> EndpointPlan:
    """Measure the acceptance rate, unless it is given, and predict the time per token of every algorithm."""
    deployment = engine.deployment
    rate = measured_acceptance(engine) if acceptance is None else acceptance
    best = best_specs(engine, deployment.latency, rate)
    return EndpointPlan(
        deployment.sp, rate, deployment.latency, deployment.stream_ms, best, turning_delay(engine, rate, best)
    )


def measured_acceptance(engine: Engine) -> float:
    """The share of draft tokens that are accepted, over texts after some of the built-in prompts."""
    context = engine.deployment.context
    sample = sample_prompts(BUILTIN_PROMPTS, engine.tokenizer, PROMPTS, 0, TOKENS, context)
    spec, origins = SpecConfig("si", LOOKAHEAD), Counter[str]()
    for prompt in sample.prompts:
        origins.update(engine.generate(prompt, max_new_tokens=TOKENS, spec=spec).origins)
    drafted = origins[ACCEPTED] + origins[CORRECTED]
    return origins[ACCEPTED] / drafted if drafted else 0.0


def best_specs(engine: Engine, latency: LatencyModel, acceptance: float) -> tuple[PlannedSpec, ...]:
    """The fastest configuration of each algorithm, by the predictions that `auto` uses."""
    config = replace(engine.deployment.simulation(engine.deployment.sp, SIMULATED_TOKENS), latency=latency)
    blocks = [SpecConfig(algorithm, block, max_targets=1) for algorithm in ("si", "pearl") for block in BLOCKS]
    planned = _predicted(engine, config, [*spec_candidates(config), *blocks], acceptance)
    fastest = [min(planned, key=lambda each: (each.spec.algorithm != name, each.ms)) for name in ALGORITHMS]
    return tuple(sorted(fastest, key=lambda each: each.ms))


def _predicted(
    engine: Engine, config: SimulationConfig, specs: Sequence[SpecConfig], acceptance: float
) -> list[PlannedSpec]:
    table = latency_table(config, (1.0,), specs, plain_ms=engine.deployment.stream_ms)
    rate = table.rate_index(acceptance)
    return [PlannedSpec(spec, ms[rate]) for spec, ms in zip(table.configs, table.ms[0])]


def turning_delay(engine: Engine, acceptance: float, best: Sequence[PlannedSpec]) -> float | None:
    """The smallest delay more, or less, of each verification with which it pays to speculate, or no longer does."""
    latency, speculates = engine.deployment.latency, best[0].spec.speculates
    config = engine.deployment.simulation(engine.deployment.sp, SIMULATED_TOKENS)
    specs = [*(each.spec for each in best), *(SpecConfig("si", block, max_targets=1) for block in BLOCKS)]

    def turns(delay: float) -> bool:
        delayed = replace(config, latency=latency.with_engine_ms(delay))
        planned = _predicted(engine, delayed, specs, acceptance)
        return min(planned, key=lambda each: each.ms).spec.speculates != speculates

    delays = DELAYS_MS if speculates else [-ms for ms in DELAYS_MS if ms < float(latency.target_ms)]
    first = bisect_left(delays, True, key=turns)
    return delays[first] if first < len(delays) else None
