"""One experiment with toy models: its numbers, its servers, and the four algorithms by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from random import Random
from statistics import fmean
from typing import Any

from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, TARGET, Sampling, Time, check_rule
from dsi.core.policies import Load, load_aware, policy_for
from dsi.core.request import Completion, Request
from dsi.core.sequence import Tokens
from dsi.core.spec import AUTO, SpecConfig, check_algorithm
from dsi.fleets.loop import EngineLoop
from dsi.fleets.simulated import Outage, SimulatedFleet
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadFleet
from dsi.fleets.worker import Server
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Wait
from dsi.planning.equation_1 import Number, suitable_lookahead
from dsi.planning.latency import MOST_MS, LatencyModel, check_ranges

TITLES = {"nonsi": "non-SI", "si": "SI", "pearl": "PEARL", "dsi": "DSI", "auto": "auto"}
PROMPT = (1, 2, 3)
SECOND = 1000  # ms
HOUR = 3600 * SECOND
MOST_SERVERS = 1000
MOST_REQUESTS = 10_000
PolicyFactory = Callable[[EngineLoop, int], Policy]
MOST_FAILURES = 100_000  # of a server in an hour: one in 36 ms


@dataclass(frozen=True)
class SimulationConfig:
    """What is simulated. `lookahead` None: the one that suits the algorithm."""

    latency: LatencyModel
    acceptance: float
    sp: int
    tokens: int
    lookahead: int | None = None
    drafters: int = 1
    drafter_copies: int = 1  # servers of each drafter, which guess alike
    patience: int = 0
    horizon: float = inf
    branches: int = 1  # guesses for each place
    second_hit: float = 0.0  # where the first is wrong: how often the second is right
    sure: float = 0.0  # where the first is right: how often there is no second
    spare: int = 0  # targets, of the SP degree, that look past second guesses
    nodes: int | None = None  # machines: only messages between them take latency.network_ms. None: all messages do
    requests: int = 1  # at once
    failures_per_hour: float = 0  # of each server
    repair_s: float = 10
    notice_ms: Number = 0  # after which a failure is known
    eager: bool = True  # as the paper's thread pool
    rule: str = "match"
    later: tuple[int, float] | None = None  # after so many tokens, another acceptance
    wrong: frozenset[int] = frozenset()  # tokens that no drafter guesses

    def __post_init__(self) -> None:
        check_rule(self.rule)
        check_ranges(
            ("acceptance", self.acceptance, 0, 1),
            ("SP degree", self.sp, 1, MOST_SERVERS),
            ("tokens", self.tokens, 1, inf),
            ("lookahead", self.lookahead, 1, inf),
            ("drafters", self.drafters, 1, MOST_SERVERS),
            ("drafter copies", self.drafter_copies, 1, MOST_SERVERS),
            ("patience", self.patience, 0, inf),
            ("horizon", self.horizon, 1, inf),
            ("branches", self.branches, 1, inf),
            ("second hit", self.second_hit, 0, 1),
            ("sure", self.sure, 0, 1),
            ("spare targets", self.spare, 0, self.sp - 1),
            ("nodes (machines, each with a server)", self.nodes, 1, self.count),
            ("requests", self.requests, 1, MOST_REQUESTS),
            ("failures per hour", self.failures_per_hour, 0, MOST_FAILURES),
            ("repair in s", self.repair_s, 0, MOST_MS),
            ("notice in ms", self.notice_ms, 0, MOST_MS),
        )

    def with_latency(self, **changes: Any) -> SimulationConfig:
        return replace(self, latency=replace(self.latency, **changes))

    @property
    def count(self) -> int:
        """Of servers."""
        return self.sp + self.drafters * self.drafter_copies

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return (DRAFTER, *(f"{DRAFTER}-{i}" for i in range(2, self.drafters + 1)))

    def lookahead_for(self, algorithm: str) -> int | None:
        """What was asked for, or what suits the algorithm."""
        if algorithm in ("nonsi", AUTO) or self.lookahead is not None:
            return None if algorithm in ("nonsi", AUTO) else self.lookahead
        if algorithm == "dsi" and self.requests > 1:
            return self._shared_block
        return self._suitable(algorithm)

    def _suitable(self, algorithm: str) -> int:
        sp = self.sp - self.spare
        return suitable_lookahead(algorithm, self.latency.target_ms, self.latency.drafter_ms, self.acceptance, sp)

    @property
    def _shared_block(self) -> int:
        """As `dsi serve`: what the drafter guesses while each target is at its work, at most SI's block."""
        often = self.latency.target_ms * self.drafter_copies / (self.sp * self.latency.drafter_ms)
        return max(1, min(self._suitable("si"), int(often)))

    @property
    def sampling(self) -> Sampling:
        """Toy models draw nothing: of a rule they show only that it needs the guess before it can judge."""
        return Sampling(0.0 if self.rule == "match" else 1.0, rule=self.rule)

    def policy(self, algorithm: str, crowd: Load | None = None) -> Policy:
        """Of one request; `crowd` is the company it is in."""
        lookahead = self.lookahead or self._suitable(check_algorithm(algorithm))
        spec = SpecConfig(
            algorithm,
            lookahead,
            self.patience,
            self.horizon,
            branches=self.branches,
            spare_targets=self.spare,
            drafters=self.drafter_names,
        )
        alone = policy_for(spec)
        if crowd is None or self.requests == 1 or algorithm != "dsi":
            return alone
        return load_aware(alone, replace(spec, lookahead=self.lookahead or self._shared_block), crowd)

    def servers(self, seed: int, unit: int = 1) -> list[Server]:
        """The targets, then the drafters, each erring on its own; `unit` is how many ms make one of time."""
        target = ToyTarget(seed)
        aim, fast = self.latency.target(unit), self.latency.drafter(unit)
        fleet = [Server(f"{TARGET}-{i}", TARGET, Wait(target, aim, seed * 1009 + i)) for i in range(1, self.sp + 1)]
        if self.latency.shared_kv:
            for server in fleet:
                server.prefixes = fleet[0].prefixes
            fleet[0].prefixes.shared_kv = True
        for i, name in enumerate(self.drafter_names):
            later = self.later and (len(PROMPT) + self.later[0], self.later[1])
            wrong = frozenset(len(PROMPT) + place for place in self.wrong)
            drafter = ToyDrafter(target, self.acceptance, seed * 1013 + i, self.second_hit, self.sure, later, wrong)
            fleet.append(Server(name, name, Wait(drafter, fast, ~seed - i)))
            for copy in range(2, self.drafter_copies + 1):
                alike = Wait(drafter, fast, ~seed - i - 1009 * copy)
                fleet.append(Server(f"{name}-copy-{copy}", name, alike))
        return fleet

    def run(self, algorithm: str | PolicyFactory, seed: int, waited: bool = False) -> SimulatedRun:
        """All requests at once under one algorithm, in virtual time or on real threads.

        Instead of its name there may be what makes a policy, given the loop and how many ms its clock
        counts as one.
        """
        log: list[Span] = []
        fleet = self.waited(seed, log) if waited else self.simulated(seed, log)
        loop = EngineLoop(fleet)
        loop.current_load.targets = self.sp
        unit = SECOND if waited else 1
        how = self._learning() if algorithm == AUTO else algorithm
        policy = self.policy(how, loop.current_load) if isinstance(how, str) else how(loop, unit)
        try:
            done = loop.run(*(Request(prompt(i), self.tokens, policy, self.sampling) for i in range(self.requests)))
        finally:
            fleet.close()
        failures = fleet.outages if isinstance(fleet, SimulatedFleet) else 0
        return SimulatedRun(tuple(done), dict(fleet.busy), log, unit, failures)

    def _learning(self) -> PolicyFactory:
        """`auto`, which is told the latencies and has to find out the rest."""
        from dsi.planning.forecast import adaptive, foreseen

        return adaptive(foreseen(self), self)

    def simulated(self, seed: int, log: list[Span] | None = None) -> SimulatedFleet:
        """Virtual time counts milliseconds, so that whole ones stay exact."""
        servers = self.servers(seed)
        names = [server.name for server in servers]
        return SimulatedFleet(
            servers,
            cancel_points=self.latency.cancel_points,
            drafter_cancel_points=self.latency.drafter_cancel_points,
            network=self.latency.network_ms if self.nodes is None else self.delays(names),
            network_jitter=self.latency.network_jitter,
            contention=self.latency.contention,
            thread_pool=self.eager,
            outages={name: self.outages(name, seed) for name in names} if self.failures_per_hour else None,
            log=log,
            seed=seed,
        )

    def machines(self, names: list[str]) -> dict[str, int]:
        """Where each server is, as evenly as possible: drafters first, beside the driver on machine 0."""
        targets, drafters = names[: self.sp], names[self.sp :]
        return {name: i * (self.nodes or 1) // self.count for i, name in enumerate(drafters + targets)}

    def delays(self, names: list[str]) -> dict[str, Number]:
        """Of a message between the driver and each server on another machine."""
        return {name: self.latency.network_ms for name, machine in self.machines(names).items() if machine}

    def outages(self, name: str, seed: int) -> Iterator[Outage]:
        """A life of its own for each server. Whole milliseconds are exact in any arithmetic."""
        dice, back = Random(f"{seed} {name}"), 0
        while True:
            down = back + round(dice.expovariate(self.failures_per_hour / HOUR))
            back = max(down + round(self.repair_s * SECOND), down + ceil(self.notice_ms))
            yield Outage(down, back, self.notice_ms)

    def waited(self, seed: int, log: list[Span] | None = None) -> ThreadFleet:
        if self.latency.shared_kv:
            raise ValueError(f"one cache for {self.sp} targets: only virtual time has it")
        if self.failures_per_hour:
            raise ValueError(f"{self.failures_per_hour:g} failures per hour: only virtual time has them")
        network, contention = self.latency.network_ms, self.latency.contention
        if network or contention:
            raise ValueError(f"network {network} ms, contention {contention}: only virtual time has them")
        servers = self.servers(seed, SECOND)
        return ThreadFleet(servers, cancel_points=self.latency.cancel_points, thread_pool=self.eager, log=log)


@dataclass(frozen=True)
class SimulatedRun:
    """A finished run: multiply its times by `unit` for milliseconds."""

    completions: tuple[Completion, ...]  # of each request; all began at once
    busy: dict[str, Time]
    log: list[Span]
    unit: int
    failures: int = 0  # of servers

    @property
    def completion(self) -> Completion:
        """Of the first request, which may be the only one."""
        return self.completions[0]

    @property
    def ms(self) -> float:
        """What a request took, in the mean."""
        return fmean(float(done.elapsed) for done in self.completions) * self.unit

    @property
    def all_ms(self) -> float:
        """Until the last request was done."""
        return max(float(done.elapsed) for done in self.completions) * self.unit

    @property
    def shares(self) -> dict[str, float]:
        """The share of the time that each server computed."""
        elapsed = max(float(done.elapsed) for done in self.completions)
        return {name: float(time) / elapsed for name, time in self.busy.items()}


def prompt(i: int) -> Tokens:
    """Of the request with this number: each has its own, and so a text and luck of its own."""
    return (*PROMPT[:-1], PROMPT[-1] + i)
