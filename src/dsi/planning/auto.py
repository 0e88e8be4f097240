"""The latency table that `auto` chooses from, predicted from a latency model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AdaptiveController, LatencyMonitor
from dsi.core.generation import Policy
from dsi.core.latency_table import BackgroundResults, LatencyTable
from dsi.core.spec import SpecConfig
from dsi.fleets.base import BaseFleet
from dsi.fleets.loop import EngineLoop
from dsi.planning.background import Results
from dsi.planning.forecast import LAST_RUN, Array, renewal_model
from dsi.planning.latency import LatencyModel
from dsi.planning.search import spec_candidates
from dsi.planning.simulation import PolicyFactory, SimulationConfig
from dsi.planning.trees import TreePredictions

RATES = np.arange(51) / 50  # acceptance rates
DRAFTER_SCALES = (0.5, 1.0, 2.0)  # how slow a drafter may turn out to be
CAUTION = 0.02  # added to predictions with contention, which are often too fast

Predictions = tuple[tuple[float, ...], ...]  # ms per token by config and acceptance rate


class ScaledPredictions(Sequence[Predictions]):
    """The predictions for each speed of the drafter; most drafters are as fast as measured, so the others can wait."""

    def __init__(
        self,
        config: SimulationConfig,
        specs: Sequence[SpecConfig],
        scales: Sequence[float],
        plain_ms: float | None = None,
    ) -> None:
        self._config, self._specs, self._scales, self._plain_ms = config, specs, scales, plain_ms
        self.results: Results[int, Predictions] = Results(self._predict)

    def __len__(self) -> int:
        return len(self._scales)

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def _predict(self, index: int) -> Predictions:
        slower = replace(self._config, latency=self._config.latency.scaled(drafter=self._scales[index]))
        return tuple(self._ms(slower, spec) for spec in self._specs)

    def _ms(self, config: SimulationConfig, spec: SpecConfig) -> tuple[float, ...]:
        if self._plain_ms is not None and not spec.speculates:
            return (self._plain_ms,) * len(RATES)
        return tuple(_cautious_ms(config, spec, RATES).tolist())


def latency_table(
    config: SimulationConfig,
    drafter_scales: Sequence[float] = DRAFTER_SCALES,
    specs: Sequence[SpecConfig] | None = None,
    in_background: bool = False,
    trees: bool = False,
    simulates: bool = True,
    plain_ms: float | None = None,
) -> LatencyTable:
    """Predict each candidate at each acceptance rate and each speed of the drafter; `plain_ms` is known of non-SI.

    In virtual time the table must not depend on when its predictions come; in real time they should not be waited for.
    Trees under DSI are left out unless it `simulates`.
    """
    specs, latency = specs or spec_candidates(config), config.latency
    predictions = ScaledPredictions(config, specs, drafter_scales, plain_ms)
    alone = latency.alone
    trees = trees and config.drafters == 1 and config.spec.rule == "match"
    tree_predictions = TreePredictions(config, in_background or not simulates, simulates) if trees else None
    results: list[BackgroundResults] = [predictions.results]
    if tree_predictions is not None:
        results.append(tree_predictions.simulated)
    return LatencyTable(
        tuple(specs),
        tuple(drafter_scales),
        predictions,
        float(latency.drafter_ms),
        _steps_ms(latency),
        config.sp,
        latency.contention,
        alone_drafter_ms=None if alone is None else float(alone.drafter_ms),
        alone_steps_ms=() if alone is None else _steps_ms(alone),
        trees=tree_predictions,
        plain_ms=plain_ms,
        is_ready=predictions.results.is_ready if in_background else (lambda _: True),
        background=tuple(results) if in_background else (),
    )


def _steps_ms(latency: LatencyModel) -> tuple[tuple[int, float], ...]:
    """Forwards by width as they are observed, without what the engine adds."""
    widths = latency.by_width or ((1, latency.target_ms),)
    return tuple((width, float(ms - latency.engine_ms)) for width, ms in widths)


def _cautious_ms(config: SimulationConfig, spec: SpecConfig, rates: Array) -> Array:
    targets = spec.max_targets or config.sp
    factor = 1 + CAUTION if config.latency.contention and targets > 1 else 1
    return factor * renewal_model(replace(config, sp=targets), spec).ms(rates)


def cached_latency_table(config: SimulationConfig) -> LatencyTable:
    """The table for tokens after the first, at any acceptance rate: it does not depend on text or request."""
    steady = replace(
        config,
        acceptance=0.5,
        tokens=LAST_RUN,
        spec=SpecConfig(rule=config.spec.rule, tree=config.spec.tree),
        acceptance_change=None,
        requests=1,
        failures_per_hour=0,
    )
    return _cached_latency_table(steady.with_latency(target_ttft_ms=None, drafter_ttft_ms=None))


@lru_cache
def _cached_latency_table(config: SimulationConfig) -> LatencyTable:
    return latency_table(config, trees=config.spec.tree > 0)


def best_config(table: LatencyTable, acceptance: float, speculating: bool = False) -> tuple[SpecConfig, float]:
    """The fastest config with the drafter as fast as measured, or that speculates, and its predicted ms per token."""
    ms, rate = table.ms[table.scale_index(1.0)], table.rate_index(acceptance)
    candidates = [i for i, spec in enumerate(table.configs) if spec.speculates or not speculating]
    best = min(candidates, key=lambda i: ms[i][rate])
    return table.configs[best], ms[best][rate]


def adaptive(table: LatencyTable, config: SimulationConfig, prior: float = PRIOR_ACCEPTANCE) -> PolicyFactory:
    """A policy that learns acceptance and latencies while it runs and switches configs by the table."""

    def policy(loop: EngineLoop, unit: int) -> Policy:
        monitor = LatencyMonitor(table, unit)
        if isinstance(loop.fleet, BaseFleet):
            loop.fleet.observe = monitor.observe
        return AdaptiveController(table, config.drafter_names, prior, monitor)

    return policy
