"""Eq. (1) of the paper in exact arithmetic: how many targets, and which lookahead."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil

PARALLEL_FRACTION = 0.8  # of a target forward, by Amdahl's law, unless another is given

Number = int | float | Fraction


def to_fraction(value: Number) -> Fraction:
    """The number as it is written: 0.05 is a twentieth, not the nearest binary fraction."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def check_latencies(target: Number, drafter: Number) -> None:
    for name, value in (("target", target), ("drafter", drafter)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} latency {value} ms: must be above 0")


def servers_needed(target: Number, drafter: Number, lookahead: int) -> int:
    """The left side of Eq. (1): how many targets are busy at once when every block is verified."""
    check_latencies(target, drafter)
    if lookahead < 1:
        raise ValueError(f"lookahead {lookahead}: must be at least 1")
    return ceil(to_fraction(target) / (lookahead * to_fraction(drafter)))


def minimal_lookahead(target: Number, drafter: Number, sp: int) -> int:
    """The smallest lookahead with which no verification waits for one of `sp` targets."""
    check_latencies(target, drafter)
    if sp < 1:
        raise ValueError(f"SP degree {sp}: must be at least 1")
    return ceil(to_fraction(target) / (sp * to_fraction(drafter)))


@lru_cache(maxsize=1024)  # an engine asks for every request
def best_si_lookahead(target: Number, drafter: Number, acceptance: float, most: int = 200) -> int:
    """The lookahead with the least time per token under SI in a long text (Leviathan et al., 2023)."""
    check_latencies(target, drafter)

    def per_token(lookahead: int) -> float:
        tokens = sum(acceptance**i for i in range(lookahead + 1))
        return float(lookahead * drafter + target) / tokens

    return min(range(1, most + 1), key=per_token)


def suitable_lookahead(algorithm: str, target: Number, drafter: Number, acceptance: float, sp: int) -> int:
    """The lookahead that is best for SI, drafted during a verification for PEARL, or by Eq. (1) for DSI."""
    if algorithm == "si":
        return best_si_lookahead(target, drafter, acceptance)
    return minimal_lookahead(target, drafter, sp if algorithm == "dsi" else 1)


@dataclass(frozen=True)
class Allocation:
    """An allocation of processors, and the smallest lookahead with which no verification waits."""

    target_ms: Number
    drafter_ms: Number
    gpus: int
    target_gpus: int
    drafter_gpus: int
    sp: int
    lookahead: int

    @property
    def busy(self) -> int:
        """Targets busy at once, by Eq. (1)."""
        return servers_needed(self.target_ms, self.drafter_ms, self.lookahead)

    @property
    def gpus_used(self) -> int:
        return self.sp * self.target_gpus + self.drafter_gpus

    @property
    def inequality(self) -> str:
        return f"ceil({self.target_ms:g} / ({self.lookahead} * {self.drafter_ms:g})) = {self.busy} <= {self.sp}"


def plan(target_ms: Number, drafter_ms: Number, gpus: int, target_gpus: int = 1, drafter_gpus: int = 1) -> Allocation:
    """Give the drafter its processors, and the rest to as many targets as can be busy at once."""
    check_latencies(target_ms, drafter_ms)
    if target_gpus < 1 or drafter_gpus < 1:
        raise ValueError(f"{target_gpus} GPUs per target, {drafter_gpus} per drafter: each needs at least 1")
    if gpus < target_gpus + drafter_gpus:
        raise ValueError(
            f"{gpus} GPUs: one target ({target_gpus}) and one drafter ({drafter_gpus}) need "
            f"{target_gpus + drafter_gpus}"
        )
    possible = (gpus - drafter_gpus) // target_gpus
    sp = min(possible, servers_needed(target_ms, drafter_ms, 1))
    lookahead = minimal_lookahead(target_ms, drafter_ms, sp)
    return Allocation(target_ms, drafter_ms, gpus, target_gpus, drafter_gpus, sp, lookahead)


def amdahl(parallel_fraction: float, processors: float) -> float:
    """The relative time of a forward on so many times as many processors, by Amdahl's law."""
    return 1 - parallel_fraction + parallel_fraction / processors
