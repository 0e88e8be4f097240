"""Ways to go, and what is known beforehand of how long a token takes by each."""

from __future__ import annotations

from dataclasses import dataclass, field

# Targets that look past second guesses, and for what share of the right ones the next token is then known in
# time: what `benchmarks/branches.py` gives.
ASIDES = {1: 0.45, 2: 0.62, 4: 0.72}


@dataclass(frozen=True)
class SpecConfig:
    """How to go: at most so many targets at once; without a lookahead, one token after the other."""

    targets: int = 1
    lookahead: int = 0
    patience: int = 0
    spare: int = 0  # targets besides, which look past second guesses

    @property
    def speculates(self) -> bool:
        return self.lookahead > 0

    @property
    def horizon(self) -> int:
        """One block for each target and one more: further ahead, a drafter takes more than it gives."""
        return max(self.patience + 1, (self.targets + 1) * self.lookahead)

    def __str__(self) -> str:
        if not self.speculates:
            return "no speculation"
        aside = f", {self.spare} for second guesses" if self.spare else ""
        return f"SP {self.targets}, lookahead {self.lookahead}, patience {self.patience}{aside}"


@dataclass(frozen=True)
class LatencyTable:
    """What a token is expected to take under each way, by the drafter's speed and how often it is right.

    `ms[s][w][r]`: with a drafter `scales[s]` times as slow as it was when measured, by `ways[w]`, at a rate
    of r parts of as many as there are.
    """

    ways: tuple[SpecConfig, ...]
    scales: tuple[float, ...]
    ms: tuple[tuple[tuple[float, ...], ...], ...]
    drafter_ms: float = 1.0
    steps_ms: tuple[tuple[int, float], ...] = ((1, 1.0),)  # target forwards of up to so many new tokens
    targets: int = 1  # that there are
    contention: float = 0.0
    best: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    sparing: dict[int, tuple[tuple[int, ...], ...]] = field(init=False, repr=False)  # with targets to spare

    def __post_init__(self) -> None:
        object.__setattr__(self, "best", self._best(self.targets))
        sparing = {spare: self._best(self.targets - spare) for spare in ASIDES if spare < self.targets}
        object.__setattr__(self, "sparing", sparing)

    def _best(self, most: int) -> tuple[tuple[int, ...], ...]:
        """The way with no more targets than these, by scale and rate."""
        order = [i for i, way in enumerate(self.ways) if way.targets <= most] or [0]
        return tuple(
            tuple(min(order, key=lambda way: table[way][part]) for part in range(len(table[0]))) for table in self.ms
        )

    def forward_ms(self, width: int) -> float:
        return next((ms for most, ms in self.steps_ms if width <= most), self.steps_ms[-1][1])

    def part(self, rate: float) -> int:
        return round(rate * (len(self.best[0]) - 1))

    def scale(self, factor: float) -> int:
        """The nearest that is known, by ratio."""
        return min(
            range(len(self.scales)),
            key=lambda i: max(self.scales[i], factor) / max(1e-9, min(self.scales[i], factor)),
        )


@dataclass(frozen=True)
class Decision:
    """From so many sure tokens on, another way; `cause` is what had changed."""

    tokens: int
    way: SpecConfig
    drafters: tuple[str, ...]
    cause: str  # start, acceptance (of first or second guesses) or latency
    rate: float  # what acceptance was taken to be

    def json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "way": str(self.way),
            "speculates": self.way.speculates,
            "drafters": list(self.drafters),
            "cause": self.cause,
            "acceptance": self.rate,
        }
