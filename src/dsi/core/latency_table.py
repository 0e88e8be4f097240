"""Predicted latency per token of each speculation config, by acceptance rate and drafter speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsi.core.spec import SpecConfig


class TreeForecast(Protocol):
    """Predicts configurations with trees, for a drafter that is so many times as slow as measured."""

    def best(self, scale: float, acceptance: float, runner_up: float, limit_ms: float) -> SpecConfig | None:
        """The fastest tree where first choices and runner-ups are right so often; None where there is none.

        One that takes more than `limit_ms` per token need not be looked for.
        """
        ...

    def ms(self, spec: SpecConfig, scale: float, acceptance: float, runner_up: float) -> float:
        """The predicted milliseconds per token with this tree."""
        ...


class BackgroundResults(Protocol):
    """Predictions that are made while texts go on."""

    def num_computed(self) -> int:
        """How many there are by now."""
        ...

    def close(self) -> None:
        """Make no more."""
        ...


@dataclass(frozen=True)
class LatencyTable:
    """Predicted milliseconds per token.

    `ms[s][c][r]` is for a drafter that is `drafter_scales[s]` times as slow as measured, under `configs[c]`, at
    the r-th of the acceptance rates, which are evenly spaced from 0 to 1. A scale may be predicted when it is first
    asked for.
    """

    configs: tuple[SpecConfig, ...]
    drafter_scales: tuple[float, ...]
    ms: Sequence[tuple[tuple[float, ...], ...]]
    drafter_ms: float = 1.0
    steps_ms: tuple[tuple[int, float], ...] = ((1, 1.0),)  # target forwards of up to so many new tokens
    targets: int = 1  # in the fleet
    contention: float = 0.0
    alone_drafter_ms: float | None = None  # of forwards that take turns on every core, where that is faster
    alone_steps_ms: tuple[tuple[int, float], ...] = ()
    plain_ms: float | None = None  # per token that a target streams, where it does so without speculation
    trees: TreeForecast | None = field(default=None, repr=False, compare=False)  # None: there are only chains
    greedy_trees: bool = False  # whether trees are for greedy requests alone
    is_ready: Callable[[int], bool] = field(default=lambda _: True, repr=False, compare=False)  # whether a scale is
    background: tuple[BackgroundResults, ...] = field(default=(), repr=False, compare=False)
    num_rates: int = field(init=False)
    _best: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _best_speculating: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rates", len(self.ms[self.scale_index(1.0)][0]))

    def num_predicted(self) -> int:
        """How many predictions there are by now, of those that come while texts go on."""
        return sum(results.num_computed() for results in self.background)

    def close(self) -> None:
        """Make no more predictions beside texts."""
        for results in self.background:
            results.close()

    def best(self, scale: int, rate: int) -> int:
        """The index of the fastest config."""
        if scale not in self._best:
            self._best[scale] = self._fastest(self.ms[scale])
        return self._best[scale][rate]

    @property
    def plain(self) -> int:
        """The index of the config without speculation."""
        return next(i for i, config in enumerate(self.configs) if not config.speculates)

    def best_speculating(self, scale: int, rate: int) -> int:
        """The index of the fastest config that speculates."""
        if scale not in self._best_speculating:
            self._best_speculating[scale] = self._fastest(self.ms[scale], speculating=True)
        return self._best_speculating[scale][rate]

    def _fastest(self, ms: Sequence[Sequence[float]], speculating: bool = False) -> tuple[int, ...]:
        """The fastest config that needs no more targets than there are, by rate index."""
        fitting = (i for i, config in enumerate(self.configs) if (config.max_targets or 1) <= self.targets)
        indices = [i for i in fitting if self.configs[i].speculates or not speculating] or [0]
        return tuple(min(indices, key=lambda i: ms[i][rate]) for rate in range(self.num_rates))

    def forward_ms(self, width: int, alone: bool = False) -> float:
        """The latency of a target forward over this many new tokens."""
        steps = (alone and self.alone_steps_ms) or self.steps_ms
        return next((ms for most, ms in steps if width <= most), steps[-1][1])

    def draft_ms(self, alone: bool = False) -> float:
        """The latency of a drafter forward."""
        return (alone and self.alone_drafter_ms) or self.drafter_ms

    def rate_index(self, acceptance: float) -> int:
        return round(acceptance * (self.num_rates - 1))

    def scale_index(self, slowdown: float) -> int:
        """The drafter scale nearest to this slowdown, by ratio."""
        return min(
            range(len(self.drafter_scales)),
            key=lambda i: max(self.drafter_scales[i], slowdown) / max(1e-9, min(self.drafter_scales[i], slowdown)),
        )
