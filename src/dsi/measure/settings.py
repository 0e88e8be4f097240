"""One experiment with toy models: its numbers, its servers, and the four algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.engine import Engine
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadFleet
from dsi.fleets.work import Server
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Time, Wait
from dsi.planner import Number, best_si_lookahead, check_latencies, minimal_lookahead
from dsi.request import Completion, Request

TITLES = {"nonsi": "non-SI", "si": "SI", "pearl": "PEARL", "dsi": "DSI"}
PROMPT = (1, 2, 3)
SECOND = 1000  # ms


@dataclass(frozen=True)
class Setting:
    """Latencies are milliseconds. `lookahead` None: the one that suits the algorithm."""

    target_ms: Number
    drafter_ms: Number
    acceptance: float
    sp: int
    tokens: int
    lookahead: int | None = None
    drafters: int = 1
    patience: int = 0
    horizon: float = inf
    pieces: int = 0
    target_ttft_ms: Number | None = None
    drafter_ttft_ms: Number | None = None
    per_token_ms: Number = 0
    jitter: float = 0
    network_ms: Number = 0
    contention: float = 0
    eager: bool = True  # as the paper's thread pool

    def __post_init__(self) -> None:
        check_latencies(self.target_ms, self.drafter_ms)
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance {self.acceptance}: must be between 0 and 1")
        for name, value, least in (
            ("SP degree", self.sp, 1),
            ("tokens", self.tokens, 1),
            ("lookahead", 1 if self.lookahead is None else self.lookahead, 1),
            ("drafters", self.drafters, 1),
            ("patience", self.patience, 0),
            ("horizon", self.horizon, 1),
            ("pieces", self.pieces, 0),
            ("target time to first token in ms", self.target_ttft_ms or self.target_ms, self.target_ms),
            ("drafter time to first token in ms", self.drafter_ttft_ms or self.drafter_ms, self.drafter_ms),
            ("extra ms per token", self.per_token_ms, 0),
            ("network delay in ms", self.network_ms, 0),
            ("contention", self.contention, 0),
        ):
            if not least <= value:
                raise ValueError(f"{name} {value}: must be at least {least}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter {self.jitter}: must be at least 0 and below 1")

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return (DRAFTER, *(f"{DRAFTER}-{i}" for i in range(2, self.drafters + 1)))

    def lookahead_for(self, algorithm: str) -> int | None:
        """What was asked for, or: SI's best block; for PEARL, drafting as long as verifying; Eq. (1)."""
        if algorithm == "nonsi" or self.lookahead is not None:
            return None if algorithm == "nonsi" else self.lookahead
        if algorithm == "si":
            return best_si_lookahead(self.target_ms, self.drafter_ms, self.acceptance)
        return minimal_lookahead(self.target_ms, self.drafter_ms, 1 if algorithm == "pearl" else self.sp)

    def policy(self, algorithm: str) -> Policy:
        lookahead = self.lookahead_for(algorithm) or 1
        makers: dict[str, Callable[[], Policy]] = {
            "nonsi": autoregressive,
            "si": lambda: speculative(lookahead),
            "pearl": lambda: pearl(lookahead),
            "dsi": lambda: distributed(lookahead, self.drafter_names, self.patience, self.horizon),
        }
        return makers[check_algorithm(algorithm)]()

    def servers(self, seed: int, unit: int = 1) -> list[Server]:
        """The targets, then the drafters, each erring on its own; `unit` is how many ms make one of time."""
        target = ToyTarget(seed)
        aim = Latency(
            scaled(self.target_ms, unit),
            scaled(self.target_ttft_ms, unit),
            scaled(self.per_token_ms, unit),
            self.jitter,
        )
        fast = Latency(scaled(self.drafter_ms, unit), scaled(self.drafter_ttft_ms, unit), 0, self.jitter)
        fleet = [
            Server(f"{TARGET}-{i}", TARGET, Wait(target, aim, seed * 1009 + i)) for i in range(1, self.sp + 1)
        ]
        for i, name in enumerate(self.drafter_names):
            drafter = ToyDrafter(target, self.acceptance, seed * 1013 + i)
            fleet.append(Server(name, name, Wait(drafter, fast, ~seed - i)))
        return fleet

    def run(self, algorithm: str, seed: int, waited: bool = False, log: list[Span] | None = None) -> Outcome:
        """One request under one algorithm, in virtual time or on real threads."""
        fleet = self.waited(seed, log) if waited else self.simulated(seed, log)
        try:
            [done] = Engine(fleet).run(Request(PROMPT, self.tokens, self.policy(algorithm)))
        finally:
            fleet.close()
        return Outcome(done, dict(fleet.busy), SECOND if waited else 1)

    def simulated(self, seed: int, log: list[Span] | None = None) -> SimulatedFleet:
        """Virtual time counts milliseconds, so that whole ones stay exact."""
        return SimulatedFleet(
            self.servers(seed),
            pieces=self.pieces,
            network=self.network_ms,
            contention=self.contention,
            eager=self.eager,
            log=log,
        )

    def waited(self, seed: int, log: list[Span] | None = None) -> ThreadFleet:
        if self.network_ms or self.contention:
            raise ValueError(
                f"network {self.network_ms} ms, contention {self.contention}: only virtual time has them"
            )
        return ThreadFleet(self.servers(seed, SECOND), pieces=self.pieces, eager=self.eager, log=log)


@dataclass(frozen=True)
class Outcome:
    """A finished run: multiply its times by `unit` for milliseconds."""

    completion: Completion
    busy: dict[str, Time]
    unit: int

    @property
    def ms(self) -> float:
        return float(self.completion.elapsed) * self.unit

    @property
    def shares(self) -> dict[str, float]:
        """The share of the time that each server computed."""
        return {name: float(time) / float(self.completion.elapsed) for name, time in self.busy.items()}


def scaled(ms: Number | None, unit: int) -> Time:
    """Nothing stays nothing, and whole numbers and Fractions stay exact."""
    return ms / unit if ms and unit != 1 else ms


def check_algorithm(name: str) -> str:
    if name not in TITLES:
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(TITLES)}")
    return name
