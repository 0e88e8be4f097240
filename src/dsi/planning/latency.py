"""How long forwards take: one latency model, measured or given, for simulator, forecast, planner and theory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from dsi.core.fields import option
from dsi.core.spec import TURN_TAKING
from dsi.planning.equation_1 import Number, check_latencies

if TYPE_CHECKING:
    from dsi.models.wait import Latency  # imports numpy

LEAST_MS, MOST_MS = 1e-6, 1e9  # what a latency can plausibly be

Curve = tuple[tuple[int, Number], ...]  # ms by width in new tokens, or by number of busy targets
CURVES = ("by_width", "by_busy_targets", "drafter_by_busy_targets")


@dataclass(frozen=True)
class LatencyModel:
    """Latencies of a target and its drafter in milliseconds, and how servers delay one another."""

    target_ms: Number = option("A target forward, in milliseconds.")
    drafter_ms: Number = option("A drafter forward, in milliseconds.")
    target_ttft_ms: Number | None = option("The target's first forward, over the prompt.", None)
    drafter_ttft_ms: Number | None = option("The drafter's first forward, over the prompt.", None)
    per_token_ms: Number = option("What each further new token adds to a target forward.", 0)
    drafter_per_token_ms: Number = option("What each further node of a tree adds to a drafter forward.", 0)
    drafter_level_ms: Number = 0  # that a forward over a level of a tree takes beyond one token's
    drafter_shared_ms: Number = 0  # that a forward over several texts takes beyond one token's
    shared_text_ms: Number = 0  # that a target forward over several texts takes for the keys and values of each
    shared_rows: int = 0  # new tokens of a shared forward, beyond which another is launched behind it; 0: none is
    tree_ms: Number = 0  # that the engine does for each turn of SI with a tree...
    tree_node_ms: Number = 0  # ...and for each node of it
    by_width: Curve = ()  # instead: target forwards of up to so many new tokens, padded to that width
    jitter: float = option("Each forward takes evenly up to this share more or less: 0 to 0.99, by seed.", 0)
    contention: float = option("Share by which each other busy target slows one (virtual time only).", 0)
    by_busy_targets: Curve = ()  # instead: a target forward by the number of targets that compute at once
    drafter_by_busy_targets: Curve = ()  # a drafter forward by the number of targets that compute beside it
    cancel_points: int = option("Points at which a cancelled forward can end; 0: it ends at once.", 0)
    drafter_cancel_points: int | None = None  # None: as many as a target's
    shared_kv: bool = option(
        "The targets fill one KV cache: none computes what another is computing (virtual time only).", False
    )
    network_ms: Number = option(
        "Delay of a message, each way (virtual time only): of every one, or with nodes of those between machines.", 0
    )
    drafter_delay_ms: Number = 0  # that messages to and from a drafter take more (virtual time only)
    network_jitter: float = option("Each message is delayed evenly up to this share more or less: 0 to 0.99.", 0)
    engine_ms: Number = 0  # of every target forward, what the engine does for it
    alone: LatencyModel | None = None  # forwards that take turns and so use every core, where that is faster

    def __post_init__(self) -> None:
        check_latencies(self.target_ms, self.drafter_ms)
        check_ranges(
            ("cancel points", self.cancel_points, 0, inf),
            ("drafter cancel points", self.drafter_cancel_points, 0, inf),
            ("target latency in ms", self.target_ms, LEAST_MS, MOST_MS),
            ("drafter latency in ms", self.drafter_ms, LEAST_MS, MOST_MS),
            ("target time to first token in ms", self.target_ttft_ms, self.target_ms, MOST_MS),
            ("drafter time to first token in ms", self.drafter_ttft_ms, self.drafter_ms, MOST_MS),
            ("extra ms per token", self.per_token_ms, 0, MOST_MS),
            ("extra ms per token of the drafter", self.drafter_per_token_ms, 0, MOST_MS),
            ("extra ms per level of the drafter", self.drafter_level_ms, 0, MOST_MS),
            ("extra ms per forward of several texts of the drafter", self.drafter_shared_ms, 0, MOST_MS),
            ("extra ms per text of a shared forward", self.shared_text_ms, 0, MOST_MS),
            ("new tokens of a shared forward", self.shared_rows, 0, inf),
            ("ms per tree", self.tree_ms, 0, MOST_MS),
            ("ms per node of a tree", self.tree_node_ms, 0, MOST_MS),
            ("network delay in ms", self.network_ms, 0, MOST_MS),
            ("drafter delay in ms", self.drafter_delay_ms, 0, MOST_MS),
            ("network jitter", self.network_jitter, 0, 0.99),
            ("contention", self.contention, 0, MOST_MS),
            ("jitter", self.jitter, 0, 0.99),
        )

    @classmethod
    def measured(cls, by_width: Mapping[int, float], drafter_ms: float, **fields: Any) -> LatencyModel:
        """Derives the narrowest forward and the slope to the widest from a curve over new tokens."""
        narrow, wide = min(by_width), max(by_width)
        slope = max(0.0, by_width[wide] - by_width[narrow]) / max(1, wide - narrow)
        widths = tuple(by_width.items())
        return cls(by_width[narrow], drafter_ms, per_token_ms=slope, by_width=widths, **fields)

    @property
    def prefill_ms(self) -> tuple[Number, Number]:
        """The first forwards of the target and of the drafter."""
        return (
            self.target_ms if self.target_ttft_ms is None else self.target_ttft_ms,
            self.drafter_ms if self.drafter_ttft_ms is None else self.drafter_ttft_ms,
        )

    def under(self, algorithm: str) -> LatencyModel:
        """The latencies under an algorithm: under non-SI and SI one server computes at a time."""
        return self.alone if self.alone is not None and algorithm in TURN_TAKING else self

    def drafter_beside(self, targets: int) -> Number:
        """The drafter's forward while so many targets compute."""
        return max([self.drafter_ms, *(ms for busy, ms in self.drafter_by_busy_targets if busy <= targets)])

    def contention_of(self, targets: int) -> float:
        """The share by which each other busy target slows one down, where there are so many."""
        if not self.by_busy_targets:
            return self.contention
        ms = dict(self.by_busy_targets)
        busy = min((count for count in ms if count >= targets), default=max(ms))
        return max(0.0, float(ms[busy] / ms[1]) - 1) / max(1, busy - 1)

    def with_targets(self, sp: int) -> LatencyModel:
        """The same servers with `sp` targets at work: their contention and the drafter beside them.

        Where they take turns, nothing computes beside the drafter.
        """
        idle = replace(self, by_busy_targets=(), drafter_by_busy_targets=())
        at_work = replace(idle, drafter_ms=self.drafter_beside(sp), contention=self.contention_of(sp))
        return at_work if at_work.drafter_ms == self.drafter_ms else replace(at_work, alone=self.alone or idle)

    def scaled(self, target: Number = 1, drafter: Number = 1) -> LatencyModel:
        """All forwards of the target and of the drafter so many times as slow."""
        ttft, drafter_ttft = self.target_ttft_ms, self.drafter_ttft_ms
        return replace(
            self,
            target_ms=self.target_ms * target,
            drafter_ms=self.drafter_ms * drafter,
            target_ttft_ms=None if ttft is None else ttft * target,
            drafter_ttft_ms=None if drafter_ttft is None else drafter_ttft * drafter,
            per_token_ms=self.per_token_ms * target,
            shared_text_ms=self.shared_text_ms * target,
            drafter_per_token_ms=self.drafter_per_token_ms * drafter,
            drafter_level_ms=self.drafter_level_ms * drafter,
            drafter_shared_ms=self.drafter_shared_ms * drafter,
            by_width=tuple((width, ms * target) for width, ms in self.by_width),
            by_busy_targets=tuple((busy, ms * target) for busy, ms in self.by_busy_targets),
            drafter_by_busy_targets=tuple((busy, ms * drafter) for busy, ms in self.drafter_by_busy_targets),
            alone=None if self.alone is None else self.alone.scaled(target, drafter),
        )

    def with_engine_ms(self, ms: Number) -> LatencyModel:
        """Every target forward so much longer, as what the engine does for each of them takes."""
        by_width = tuple((width, forward + ms) for width, forward in self.by_width)
        return replace(self, target_ms=self.target_ms + ms, by_width=by_width, engine_ms=self.engine_ms + ms)

    def target(self, unit: int = 1) -> Latency:
        """A target's forwards in units of so many milliseconds."""
        from dsi.models.wait import Latency

        return Latency(
            in_unit(self.target_ms, unit),
            in_unit(self.target_ttft_ms, unit),
            in_unit(self.per_token_ms, unit),
            self.jitter,
            tuple((width, in_unit(ms, unit)) for width, ms in self.by_width),
        )

    def drafter(self, unit: int = 1) -> Latency:
        """A drafter's forwards in units of so many milliseconds."""
        from dsi.models.wait import Latency

        per_token = in_unit(self.drafter_per_token_ms, unit)
        return Latency(in_unit(self.drafter_ms, unit), in_unit(self.drafter_ttft_ms, unit), per_token, self.jitter)

    def json(self) -> dict[str, Any]:
        """Curves as objects with the width or the number of busy targets as key."""
        curves = {name: dict(getattr(self, name)) for name in CURVES}
        return asdict(self) | curves | {"alone": None if self.alone is None else self.alone.json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LatencyModel:
        """Read what `json` returned, through a JSON file, too."""
        curves = {name: tuple((int(key), ms) for key, ms in document[name].items()) for name in CURVES}
        alone = document["alone"] and cls.from_json(document["alone"])
        return cls(**{**document, **curves, "alone": alone})


def monotone(by_width: Mapping[int, Number]) -> Curve:
    """The curve in order of width, where a wider forward that was measured as faster takes as long."""
    return tuple((width, max(ms for w, ms in by_width.items() if w <= width)) for width in sorted(by_width))


def without_noise(by_load: Mapping[int, Number]) -> Curve:
    """The curve in order of load, where less that was measured as slower than more takes as long.

    What else a machine does can only add time: one slow measurement must not make a loaded one look fast beside it.
    """
    return tuple((load, min(ms for more, ms in by_load.items() if more >= load)) for load in sorted(by_load))


def in_unit(ms: Number | None, unit: int) -> Any:
    """Whole numbers and Fractions stay exact."""
    return ms / unit if ms and unit != 1 else ms


def check_ranges(*rows: tuple[str, Number | None, Number, Number]) -> None:
    """Raises for the first number, given with its name and bounds, that is outside them; None is not checked."""
    for name, value, least, most in rows:
        if value is not None and not least <= value <= most:
            bounds = f"at least {least}" if most == inf else f"between {least:g} and {most:g}"
            raise ValueError(f"{name} {value}: must be {bounds}")
