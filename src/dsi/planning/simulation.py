"""Simulate toy models under any algorithm: latencies, acceptance, servers and failures of one experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dsi.core.fields import option
from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, TARGET, Sampling, Time
from dsi.core.policies import Load, load_aware, policy_for
from dsi.core.request import Completion, Request
from dsi.core.sequence import Tokens
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import AUTO, SpecConfig, check_algorithm
from dsi.core.tree_shape import TREE_BRANCHES, rank_chances
from dsi.fleets.loop import EngineLoop
from dsi.planning.equation_1 import Number, suitable_lookahead
from dsi.planning.latency import MOST_MS, LatencyModel, check_ranges
from dsi.planning.shared_forwards import draft_ms, forward_ms, shared_spec

if TYPE_CHECKING:  # these import numpy, which the help of a command does without
    from dsi.fleets.servers import Server
    from dsi.fleets.simulated import Outage, SimulatedFleet
    from dsi.fleets.simulated_shared import SharedSimulatedFleet
    from dsi.fleets.spans import Span
    from dsi.fleets.threads import ThreadFleet
    from dsi.models.protocol import Model
    from dsi.models.toy import ToyDrafter, ToyTarget

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
    """One experiment with toy models: latencies, acceptance, servers, and how to speculate."""

    latency: LatencyModel
    acceptance: float = option("How often a draft token is right: 0 to 1.")
    sp: int = option("SP degree: how many target servers.")
    tokens: int = option("Tokens to generate.")
    spec: SpecConfig = field(default_factory=SpecConfig)
    drafters: int = option("Drafter servers, each with errors of its own.", 1)
    drafter_copies: int = option("Servers of each drafter, which draft the same tokens; for many requests.", 1)
    runner_up_acceptance: float = option("How often a runner-up is right where the first choice is wrong: 0 to 1.", 0.0)
    nodes: int | None = option(
        "Machines over which the servers are spread evenly, at most one for each server; the drafter is on the "
        "first, where the text is put together. Without it, every message takes network-ms.",
        None,
    )
    requests: int = option(
        "Texts at once on the same servers; dsi speculates less far the more there are, as in dsi serve.", 1
    )
    share_forwards: bool = option(
        "Requests share the forwards of one target and one drafter, which take turns (virtual time only).", False
    )
    failures_per_hour: float = option("Of each server, at random; its job is asked for again (virtual time only).", 0)
    repair_s: float = option("Seconds until a server that failed is back, with nothing read.", 10)
    detection_ms: Number = option("Milliseconds until a failure is detected.", 0)
    thread_pool: bool = option(
        "A target that has answered takes the next queued job at once, as in a thread pool, or only when its "
        "answer has been handled and stale jobs are gone.",
        True,
    )
    acceptance_change: tuple[int, float] | None = None  # after so many tokens, another acceptance
    rejected_positions: frozenset[int] = frozenset()  # tokens that no drafter drafts correctly

    def __post_init__(self) -> None:
        check_ranges(
            ("acceptance", self.acceptance, 0, 1),
            ("SP degree", self.sp, 1, MOST_SERVERS),
            ("tokens", self.tokens, 1, inf),
            ("drafters", self.drafters, 1, MOST_SERVERS),
            ("drafter copies", self.drafter_copies, 1, MOST_SERVERS),
            ("runner-up acceptance", self.runner_up_acceptance, 0, 1),
            ("nodes (machines, each with a server)", self.nodes, 1, self.count),
            ("requests", self.requests, 1, MOST_REQUESTS),
            ("failures per hour", self.failures_per_hour, 0, MOST_FAILURES),
            ("repair in s", self.repair_s, 0, MOST_MS),
            ("detection in ms", self.detection_ms, 0, MOST_MS),
        )

        if self.share_forwards and (self.sp > 1 or self.drafters * self.drafter_copies > 1 or self.failures_per_hour):
            raise ValueError(
                f"shared forwards with {self.sp} targets, {self.drafters * self.drafter_copies} drafters and "
                f"{self.failures_per_hour:g} failures per hour: must be 1 (--sp 1), 1 and 0"
            )

    def with_latency(self, **changes: Any) -> SimulationConfig:
        return replace(self, latency=replace(self.latency, **changes))

    def with_spec(self, **changes: Any) -> SimulationConfig:
        return replace(self, spec=replace(self.spec, **changes))

    @property
    def count(self) -> int:
        """The number of servers."""
        return self.sp + self.drafters * self.drafter_copies

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return (DRAFTER, *(f"{DRAFTER}-{i}" for i in range(2, self.drafters + 1)))

    def lookahead_for(self, algorithm: str) -> int | None:
        """The lookahead that is set, or the one that suits the algorithm; None where it has none."""
        if algorithm in ("nonsi", AUTO):
            return None
        if self.spec.lookahead is not None:
            return self.spec.lookahead
        return self._shared_lookahead if algorithm == "dsi" and self.requests > 1 else self._suitable(algorithm)

    def _suitable(self, algorithm: str) -> int:
        latency = self.latency.under(algorithm)
        target_ms, drafter_ms = latency.target_ms, latency.drafter_ms
        return suitable_lookahead(algorithm, target_ms, drafter_ms, self.acceptance, self.sp)

    @property
    def _shared_lookahead(self) -> int:
        """As `dsi serve`: what is drafted during a verification by each target, at most SI's block."""
        drafted = self.latency.target_ms * self.drafter_copies / (self.sp * self.latency.drafter_ms)
        return max(1, min(self._suitable("si"), int(drafted)))

    @property
    def sampling(self) -> Sampling:
        """Toy models sample nothing: of a rule they show only that it needs the draft token to verify it."""
        return Sampling(0.0 if self.spec.rule == "match" else 1.0, rule=self.spec.rule)

    def policy(self, algorithm: str, load: Load | None = None, shared: SharedForwards | None = None) -> Policy:
        """The policy of each request; `load` is that of all requests together, as is `shared`."""
        lookahead = self.spec.lookahead or self._suitable(check_algorithm(algorithm))
        spec = replace(self.spec, algorithm=algorithm, lookahead=lookahead, drafters=self.drafter_names)
        if spec.tree and not spec.chances:
            spec = replace(spec, chances=rank_chances(self.acceptance, self.runner_up_acceptance, TREE_BRANCHES))
        alone = policy_for(spec)
        if load is not None and self.share_forwards and algorithm in ("pearl", "dsi"):
            # There is no overlap for a request alone, either.
            spec = shared_spec(self.latency, 1, self.acceptance, self.runner_up_acceptance, self.spec.tree)
            shared = SharedForwards(DRAFTER, load) if shared is None else shared
            return shared.policy(policy_for(spec), self.spec.tree)
        if load is None or algorithm != "dsi":
            return alone
        return self._load_aware(alone, spec, load)

    def _load_aware(self, alone: Policy, spec: SpecConfig, load: Load) -> Policy:
        if self.requests == 1:
            return alone
        return load_aware(alone, replace(spec, lookahead=self.lookahead_for("dsi")), load)

    def servers(self, seed: int, unit: int = 1) -> list[Server]:
        """The targets, then the drafters, each with errors of its own; time is in units of so many ms."""
        from dsi.fleets.servers import Server
        from dsi.models.toy import ToyTarget
        from dsi.models.wait import Wait

        target, latency = ToyTarget(seed), self.latency.target(unit)
        fleet = [Server(f"{TARGET}-{i}", TARGET, Wait(target, latency, seed * 1009 + i)) for i in range(1, self.sp + 1)]
        if self.latency.shared_kv:
            for server in fleet:
                server.prefixes = fleet[0].prefixes
            fleet[0].prefixes.shared_kv = True
        for i, name in enumerate(self.drafter_names):
            fleet += self._drafter_servers(name, self._drafter(target, seed * 1013 + i), ~seed - i, unit)
        return fleet

    def _drafter(self, target: ToyTarget, seed: int) -> ToyDrafter:
        from dsi.models.toy import ToyDrafter

        change = self.acceptance_change and (len(PROMPT) + self.acceptance_change[0], self.acceptance_change[1])
        rejected = frozenset(len(PROMPT) + position for position in self.rejected_positions)
        return ToyDrafter(target, self.acceptance, seed, self.runner_up_acceptance, change, rejected)

    def _drafter_servers(self, name: str, drafter: ToyDrafter, seed: int, unit: int) -> list[Server]:
        from dsi.fleets.servers import Server
        from dsi.models.wait import Wait

        latency = self.latency.drafter(unit)
        copies = range(2, self.drafter_copies + 1)
        return [
            Server(name, name, Wait(drafter, latency, seed)),
            *(Server(f"{name}-copy-{copy}", name, Wait(drafter, latency, seed - 1009 * copy)) for copy in copies),
        ]

    def run(self, algorithm: str | SpecConfig | PolicyFactory, seed: int, real_time: bool = False) -> SimulatedRun:
        """Run all requests at once, in virtual time or on real threads.

        A SpecConfig replaces the one of this config; a policy factory is given the loop and how many ms its
        clock counts as one.
        """
        if isinstance(algorithm, SpecConfig):
            return replace(self, spec=algorithm).run(algorithm.algorithm, seed, real_time)
        if isinstance(algorithm, str) and self.latency.under(algorithm) is not self.latency:
            return replace(self, latency=self.latency.under(algorithm)).run(algorithm, seed, real_time)
        log: list[Span] = []
        fleet = self.real_time(seed, log) if real_time else self.simulated(seed, log)
        loop = EngineLoop(fleet)
        loop.load.targets = self.sp
        unit = SECOND if real_time else 1
        if self.share_forwards:
            loop.load.shared_spec = partial(shared_spec, self.latency)
        try:
            done = loop.run(*self._requests(algorithm, loop, unit))
        finally:
            fleet.close()
        failures = getattr(fleet, "outages", 0)  # only virtual time has them
        return SimulatedRun(tuple(done), dict(fleet.busy), log, unit, failures)

    def _requests(self, algorithm: str | PolicyFactory, loop: EngineLoop, unit: int) -> Iterator[Request]:
        """All requests; each has a policy of its own, but for what they learn together."""
        policy = self._policies(algorithm, loop, unit)
        for i in range(self.requests):
            yield Request(prompt(i), self.tokens, policy(), self.sampling)

    def _policies(self, algorithm: str | PolicyFactory, loop: EngineLoop, unit: int) -> Callable[[], Policy]:
        """Make the policy of one request, and of the next."""
        shared, load = SharedForwards(DRAFTER, loop.load), loop.load
        if algorithm == AUTO:  # is given the latencies, and has to learn the acceptance rate
            from dsi.planning.auto import adaptive, cached_latency_table

            alone = adaptive(cached_latency_table(self), self)(loop, unit)
            if self.share_forwards:
                return lambda: shared.policy(alone, self.spec.tree)
            return lambda: self._load_aware(alone, SpecConfig(drafters=self.drafter_names), load)
        if isinstance(algorithm, str):
            return lambda: self.policy(algorithm, load, shared)
        own = algorithm(loop, unit)
        return lambda: own

    def simulated(self, seed: int, log: list[Span] | None = None) -> SimulatedFleet | SharedSimulatedFleet:
        """A fleet in virtual time, which counts milliseconds, so that whole ones stay exact."""
        from dsi.fleets.simulated import SimulatedFleet

        if self.share_forwards:
            return self._shared(seed, log)
        servers = self.servers(seed)
        names = [server.name for server in servers]
        return SimulatedFleet(
            servers,
            cancel_points=self.latency.cancel_points,
            drafter_cancel_points=self.latency.drafter_cancel_points,
            network=self.delays(names),
            network_jitter=self.latency.network_jitter,
            contention=self.latency.contention,
            thread_pool=self.thread_pool,
            outages={name: self.outages(name, seed) for name in names} if self.failures_per_hour else None,
            log=log,
            seed=seed,
        )

    def _shared(self, seed: int, log: list[Span] | None) -> SharedSimulatedFleet:
        from dsi.fleets.simulated_shared import SharedSimulatedFleet
        from dsi.models.toy import ToyTarget

        target, latency = ToyTarget(seed), self.latency.alone or self.latency
        models: dict[str, Model] = {TARGET: target, DRAFTER: self._drafter(target, seed * 1013)}
        times = {TARGET: partial(forward_ms, latency), DRAFTER: partial(draft_ms, latency)}
        return SharedSimulatedFleet(models, times, log)

    def machines(self, names: list[str]) -> dict[str, int]:
        """The machine of each server, as evenly as possible: drafters first, beside the driver on machine 0."""
        targets, drafters = names[: self.sp], names[self.sp :]
        return {name: i * (self.nodes or 1) // self.count for i, name in enumerate(drafters + targets)}

    def delays(self, names: list[str]) -> dict[str, Number]:
        """The delay of a message between the driver and each server: with nodes, of those on another machine."""
        latency, machines = self.latency, self.machines(names)
        return {
            name: (latency.network_ms if self.nodes is None or machines[name] else 0)
            + (latency.drafter_delay_ms if name in names[self.sp :] else 0)
            for name in names
        }

    def outages(self, name: str, seed: int) -> Iterator[Outage]:
        """The failures of one server, each server with its own. Whole milliseconds are exact in any arithmetic."""
        from dsi.fleets.simulated import Outage

        random, back = Random(f"{seed} {name}"), 0
        while True:
            down = back + round(random.expovariate(self.failures_per_hour / HOUR))
            back = max(down + round(self.repair_s * SECOND), down + ceil(self.detection_ms))
            yield Outage(down, back, self.detection_ms)

    def real_time(self, seed: int, log: list[Span] | None = None) -> ThreadFleet:
        """A fleet of threads that sleep as long as forwards take."""
        from dsi.fleets.threads import ThreadFleet

        network, contention = self.latency.network_ms, self.latency.contention
        if self.latency.shared_kv:
            raise ValueError(f"one KV cache for {self.sp} targets: only virtual time has it")
        if self.failures_per_hour:
            raise ValueError(f"{self.failures_per_hour:g} failures per hour: only virtual time has them")
        if self.share_forwards:
            raise ValueError(f"{self.requests} requests that share forwards: only virtual time has them")
        if network or contention:
            raise ValueError(f"network {network} ms, contention {contention}: only virtual time has them")
        servers, points = self.servers(seed, SECOND), self.latency.cancel_points
        return ThreadFleet(servers, cancel_points=points, thread_pool=self.thread_pool, log=log)


@dataclass(frozen=True)
class SimulatedRun:
    """A finished run; times are in units of so many milliseconds."""

    completions: tuple[Completion, ...]  # of each request; all start at once
    busy: dict[str, Time]
    log: list[Span]
    unit: int
    failures: int = 0  # of servers

    @property
    def completion(self) -> Completion:
        """The completion of the first request."""
        return self.completions[0]

    @property
    def ms(self) -> float:
        """The mean latency of a request."""
        return fmean(float(completion.elapsed) for completion in self.completions) * self.unit

    @property
    def all_ms(self) -> float:
        """The time until the last request is done."""
        return max(float(completion.elapsed) for completion in self.completions) * self.unit

    @property
    def shares(self) -> dict[str, float]:
        """The share of the time that each server computes."""
        elapsed = max(float(completion.elapsed) for completion in self.completions)
        return {name: float(time) / elapsed for name, time in self.busy.items()}


def prompt(i: int) -> Tokens:
    """The prompt of the i-th request: each has its own, and so its own text and accepted draft tokens."""
    return (*PROMPT[:-1], PROMPT[-1] + i)
