"""The contract of a fleet: what the engine loop relies on. Every fleet passes these tests."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from dsi.core.generation import Policy
from dsi.core.messages import (
    WOKEN,
    Draft,
    Drafted,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    TopLogprobs,
    Verified,
    Verify,
)
from dsi.core.policies import autoregressive, distributed, pearl, policy_for, speculative
from dsi.core.request import Request
from dsi.core.scheduler import Scheduler
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.spec import SpecConfig
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.endpoint import Endpoint
from dsi.fleets.event_loop import EventLoopThread
from dsi.fleets.http import HttpFleet
from dsi.fleets.loop import EngineLoop, Fleet, FleetError
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.ray_actors import RayFleet, ResourceRequest
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadFleet
from dsi.models.endpoints.address import KINDS, parse_address
from dsi.models.endpoints.wire import position_seed
from dsi.models.protocol import Answer, Cancelled, ForwardRequest, tree_answer
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait

TARGET = ToyTarget(3)
TEXT = TokenSequence.of((1, 2, 3))
SMALL = ResourceRequest(cpus=0.01)
POLICIES = [autoregressive(), speculative(3), pearl(3), distributed(2)]


def target_tokens(text: TokenSequence, width: int) -> Tokens:
    tokens = list(text)
    return TARGET.answer(ForwardRequest(tokens, len(tokens) + 1 - width))


def make_servers(targets: int = 2, acceptance: float = 0.7, slow: float = 0.004, quick: float = 0.001) -> list[Server]:
    drafter = ToyDrafter(TARGET, acceptance)
    return [
        *(Server(f"target-{i}", "target", Wait(TARGET, Latency(slow))) for i in range(1, targets + 1)),
        Server("drafter", "drafter", Wait(drafter, Latency(quick))),
    ]


class Broken:
    """A model that fails at every forward."""

    def answer(self, request: ForwardRequest) -> Tokens:
        raise MemoryError(f"no room for {len(request.tokens)} tokens")


class HalfSure:
    """A model that always answers five, with probability 0.6."""

    def answer(self, request: ForwardRequest) -> Tokens:
        return (5,) * request.num_positions

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        return self.answer(request), (((5, -0.5),),) * request.num_positions


class KillableFleet(Fleet):
    _scheduler: Scheduler

    def kill(self, name: str) -> None: ...


Make = Callable[..., KillableFleet]


@dataclass
class PolledWait:
    """A model that waits, and can be polled meanwhile."""

    waiting: Wait

    def answer(self, request: ForwardRequest) -> Tokens:
        return self.waiting.answer(request)

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        end = time.perf_counter() + self.waiting.latency.forward(request)
        while time.perf_counter() < end:
            if request.cancelled.is_set():
                raise Cancelled
            yield None
        return self.waiting.model.answer(request) if request.num_positions else ()

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        text = list(request.tokens)
        for _ in range(count):
            drafted = yield from self.poll_answer(
                ForwardRequest(text, len(text), request.num_cached, request.sampling, request.cancelled)
            )
            yield from drafted
            text += drafted


@dataclass
class PackedWait:
    """The same for forwards over several texts and trees, which take as long as the longest of them alone."""

    waiting: Wait
    can_pack = computes_trees = True
    forwards_at_once = 1

    def answer(self, request: ForwardRequest) -> Tokens:
        return self.waiting.answer(request)

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:  # noqa: ARG002
        model = self.waiting.model
        return [tree_answer(model, request) if request.num_positions else Answer() for request in requests]

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        end = time.perf_counter() + max(map(self.waiting.latency.forward, requests))
        while time.perf_counter() < end:
            yield None
        return self.answer_packed(requests)


def process_fleet(servers: list[Server], **options: Any) -> ProcessFleet:
    """Make a fleet whose dead workers are not replaced, as in the other fleets."""
    return ProcessFleet(servers, restart=False, **options)


def cuda_fleet(servers: list[Server], **options: Any) -> CudaFleet:
    models = [PolledWait(server.model) if isinstance(server.model, Wait) else server.model for server in servers]
    polled = [Server(server.name, server.role, model) for server, model in zip(servers, models)]
    packed = {
        server.name: Server(server.name, server.role, PackedWait(server.model))
        for server in servers
        if isinstance(server.model, Wait)
    }
    return CudaFleet(polled, packed=packed, **options)


def ray_fleet(servers: list[Server], **options: Any) -> RayFleet:
    """Make a fleet whose dead actors are not replaced, and wait until all are there."""
    fleet = RayFleet(servers, restart=False, resources={server.name: SMALL for server in servers}, **options)
    fleet.wait_until_ready()
    return fleet


class EngineFleet(HttpFleet):
    """A fleet of stand-in engines over real sockets, one for each server; dead ones do not come back."""

    def __init__(self, kind: str, servers: list[Server], **options: Any) -> None:
        from stand_in_engine import StandInEngine  # which workers on Ray, that import this file, cannot find

        self.engines = [StandInEngine(kind, server.model).start() for server in servers]
        loop = EventLoopThread()
        endpoints = [Endpoint(parse_address(engine.url), loop) for engine in self.engines]
        for endpoint in endpoints:
            loop.run(endpoint.connect())
        remote = [Server(server.name, server.role, endpoint) for server, endpoint in zip(servers, endpoints)]
        super().__init__(remote, restart=False, **options)

    def close(self) -> None:
        super().close()
        for engine in self.engines:
            engine.stop()
        self.engines = []


FLEETS: dict[str, Callable[..., Any]] = {
    "simulated": SimulatedFleet,
    "threads": ThreadFleet,
    "processes": process_fleet,
    "polling": cuda_fleet,
    **{kind: partial(EngineFleet, kind) for kind in KINDS},
    "actors": ray_fleet,
}


@pytest.fixture(scope="module", params=[*list(FLEETS)[:-1], pytest.param("actors", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "actors":
        request.getfixturevalue("cluster")
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Iterator[Make]:
    made: list[KillableFleet] = []

    def build(servers: list[Server], **options: object) -> KillableFleet:
        made.append(FLEETS[kind](servers, **options))
        return made[-1]

    yield build
    for fleet in made:
        fleet.close()


@pytest.fixture(scope="module")
def fleet(kind: str) -> Iterator[KillableFleet]:
    """One fleet for the tests that leave two targets alive and idle."""
    fleet: KillableFleet = FLEETS[kind](make_servers())
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def loop(kind: str) -> Iterator[EngineLoop]:
    """One loop for the tests that only generate: starting workers takes longer than their texts."""
    fleet = FLEETS[kind](make_servers(targets=3))
    yield EngineLoop(fleet)
    fleet.close()


def events(fleet: Fleet, count: int) -> list[Event]:
    return [fleet.next_event() for _ in range(count)]


def started(fleet: Fleet, *jobs: Job) -> None:
    for job in jobs:
        fleet.start(job)


def test_fleet_streams_draft_tokens_in_order(make: Make) -> None:
    fleet = make(make_servers(acceptance=1.0))
    fleet.start(Draft(5, TEXT, 6))
    expected, text = [], TEXT
    for _ in range(6):
        expected.append(Drafted(5, target_tokens(text, 1)[0]))
        text = text.then(expected[-1].token)
    assert events(fleet, 6) == expected


def test_fleet_verifies_every_position(fleet: KillableFleet) -> None:
    text = TEXT.then(4).then(5)
    fleet.start(Verify(1, text, 3))
    assert fleet.next_event() == Verified(1, target_tokens(text, 3))


def test_fleet_prefills_every_idle_target(make: Make) -> None:
    fleet = make(make_servers(targets=3))
    fleet.start(Prefill(1, TEXT))
    assert events(fleet, 3) == [Prefilled(1)] * 3


def test_fleet_answers_more_jobs_than_servers(fleet: KillableFleet) -> None:
    started(fleet, *(Verify(id, TEXT, 1) for id in range(7)))
    assert sorted(event.id for event in events(fleet, 7)) == list(range(7))


def test_fleet_verifies_the_root_before_deeper_jobs(make: Make) -> None:
    fleet = make(make_servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1, 4), Verify(3, TEXT, 1, 4), Verify(4, TEXT, 1))
    fleet.promote(3)
    assert [event.id for event in events(fleet, 4)] == [1, 4, 3, 2]


def test_fleet_frees_the_server_of_a_cancelled_job(make: Make) -> None:
    fleet = make(make_servers(targets=1, slow=0.5))
    fleet.start(Verify(1, TEXT, 1))
    fleet.cancel(1)
    fleet.start(Verify(2, TEXT, 2))
    assert next_events_of(2, fleet) == [Verified(2, target_tokens(TEXT, 2))]
    assert fleet.now() < 0.9  # not both of them, one after the other


def test_fleet_ends_a_cancelled_draft(make: Make) -> None:
    fleet = make(make_servers())
    fleet.start(Draft(1, TEXT, 10**6))
    fleet.next_event()
    fleet.cancel(1)
    fleet.start(Draft(2, TEXT, 3))
    assert len(next_events_of(2, fleet, 3)) == 3


def test_fleet_cancels_a_queued_job(make: Make) -> None:
    fleet = make(make_servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1), Verify(3, TEXT, 1))
    fleet.cancel(2)
    assert [event.id for event in events(fleet, 2)] == [1, 3]


def test_fleet_ignores_cancels_of_unknown_and_finished_jobs(fleet: KillableFleet) -> None:
    fleet.cancel(99)
    fleet.promote(99)
    fleet.start(Verify(1, TEXT, 1))
    fleet.next_event()
    fleet.cancel(1)
    fleet.cancel(1)
    fleet.start(Verify(2, TEXT, 1))
    assert fleet.next_event().id == 2


def test_fleet_fails_the_job_of_a_dead_server(make: Make) -> None:
    fleet = make(make_servers(targets=2))
    fleet.start(Verify(1, TEXT, 1))
    [busy] = fleet._scheduler.running
    fleet.kill(busy)
    assert fleet.next_event() == Failed(1, f"server {busy} died")
    fleet.start(Verify(2, TEXT, 1))
    assert fleet.next_event() == Verified(2, target_tokens(TEXT, 1))


def test_fleet_without_servers_fails_jobs_at_once(make: Make) -> None:
    fleet = make(make_servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1))
    fleet.kill("target-1")
    fleet.start(Verify(3, TEXT, 1))
    assert events(fleet, 3) == [
        Failed(1, "server target-1 died"),
        Failed(2, "no target server is left"),
        Failed(3, "no target server is left"),
    ]


def test_fleet_survives_a_model_that_raises(make: Make) -> None:
    fleet = make([Server("target-1", "target", Broken()), *make_servers(targets=0)])
    fleet.start(Verify(1, TEXT, 1))
    failure = fleet.next_event()
    assert isinstance(failure, Failed)
    assert failure.reason.endswith("MemoryError: no room for 3 tokens")
    fleet.start(Draft(2, TEXT, 1))
    assert fleet.next_event().id == 2


def test_fleet_with_nothing_to_do_raises_instead_of_hanging(fleet: KillableFleet) -> None:
    with pytest.raises(RuntimeError, match="nothing to do"):
        fleet.next_event()


def test_fleet_can_be_woken_by_another_thread(make: Make) -> None:
    fleet = make(make_servers(targets=1, slow=0.2))
    fleet.start(Verify(1, TEXT, 1))
    threading.Timer(0.02, fleet.wake).start() if not isinstance(fleet, SimulatedFleet) else fleet.wake()
    assert fleet.next_event() is WOKEN
    assert fleet.next_event() == Verified(1, target_tokens(TEXT, 1))


def test_fleet_returns_top_logprobs_with_verified_tokens(kind: str, make: Make) -> None:
    if kind in KINDS:
        pytest.skip("endpoints are not asked for them")
    fleet = make([Server("target-1", "target", HalfSure())])
    fleet.start(Verify(1, TEXT, 2, sampling=Sampling(logprobs=1)))
    assert fleet.next_event() == Verified(1, (5, 5), (((5, -0.5),), ((5, -0.5),)))
    fleet.start(Verify(2, TEXT, 2))
    assert fleet.next_event() == Verified(2, (5, 5))


def test_fleet_can_be_closed_twice(make: Make) -> None:
    fleet = make(make_servers())
    started(fleet, Verify(1, TEXT, 1), Draft(2, TEXT, 1000))
    fleet.close()
    fleet.close()
    fleet.cancel(1)
    assert {type(event) for event in events(fleet, 2)} == {Failed}
    with pytest.raises(RuntimeError, match="nothing to do"):
        fleet.next_event()


def test_fleet_refuses_to_kill_an_unknown_server(fleet: KillableFleet) -> None:
    with pytest.raises(ValueError, match="no server 'nobody'"):
        fleet.kill("nobody")


def test_fleet_verifies_a_new_root_before_queued_jobs(make: Make) -> None:
    fleet = make(make_servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1, 4))
    assert fleet.next_event().id == 1
    fleet.start(Verify(3, TEXT, 1))
    assert [event.id for event in events(fleet, 2)] == [3, 2]


def test_fleet_logs_one_forward_at_a_time_per_server(make: Make) -> None:
    log: list[Span] = []
    EngineLoop(make(make_servers(targets=3), log=log)).run(Request((1, 2, 3), 30, distributed(2)))
    assert {span.kind for span in log} == {"draft", "verify", "warm"}
    for name in {span.server for span in log}:
        intervals = sorted((span.start, span.end) for span in log if span.server == name)
        assert all(start <= end for start, end in intervals)
        assert all(end <= start for (_, end), (start, _) in pairwise(intervals))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=8)])
def test_fleet_output_equals_the_targets_own(kind: str, loop: EngineLoop, policy: Policy, sampling: Sampling) -> None:
    if sampling.temperature and kind in ("llama.cpp", "sglang"):
        pytest.skip("it cannot sample each position with a seed of its own")
    [completion] = loop.run(Request((1, 2, 3), 25, policy, sampling))
    assert completion.tokens == plain_decoding(25, sampling, seeds_by_position=kind == "vllm")


@pytest.mark.parametrize("algorithm", ["si", "pearl", "dsi"])
def test_fleet_output_with_trees_equals_the_targets_own(kind: str, loop: EngineLoop, algorithm: str) -> None:
    if kind in KINDS:
        pytest.skip("endpoints have no trees")
    [completion] = loop.run(Request((1, 2, 3), 25, policy_for(SpecConfig(algorithm, 3, tree=8))))
    assert (completion.tokens, completion.tally.failed) == (plain_decoding(25), 0)
    assert completion.tally.accepted > 0


@pytest.mark.parametrize("policy", [speculative(3), distributed(2)])
def test_fleet_output_is_not_harmed_by_what_another_loop_cancelled(make: Make, policy: Policy) -> None:
    fleet, request = make(make_servers(targets=1)), Request((1, 2, 3), 25, policy)
    for _ in range(3):
        loop = EngineLoop(fleet)
        active = loop.submit(request)
        while not active.tokens:
            loop.step()
        loop.cancel(active)
    [completion] = EngineLoop(fleet).run(request)
    assert (completion.tokens, completion.tally.failed) == (plain_decoding(25), 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=8)])
@pytest.mark.parametrize("options", [{"cancel_points": 2}, {"cancel_points": 1, "thread_pool": True}])
@pytest.mark.parametrize("fleet_class", [SimulatedFleet, ThreadFleet])
def test_fleet_output_equals_the_targets_own_with_cancel_points(
    fleet_class: type[SimulatedFleet | ThreadFleet], options: dict[str, Any], sampling: Sampling, policy: Policy
) -> None:
    fleet = fleet_class(make_servers(targets=3), **options)
    [completion] = EngineLoop(fleet).run(Request((1, 2, 3), 25, policy, sampling))
    assert completion.tokens == plain_decoding(25, sampling)
    fleet.close()


@pytest.mark.parametrize("policy", [speculative(3), distributed(2)])
def test_fleet_output_survives_the_loss_of_all_but_one_target(make: Make, policy: Policy) -> None:
    fleet = make(make_servers(targets=3))
    text: list[int] = []
    deaths = {"target-1": 10, "drafter": 20, "target-2": 30}
    for tokens in EngineLoop(fleet).tokens(Request((1, 2, 3), 40, policy)):
        text += tokens
        for name in [name for name, at in deaths.items() if len(text) >= at]:
            del deaths[name]
            fleet.kill(name)
    assert deaths == {}
    assert tuple(text) == plain_decoding(40)


def test_fleet_that_loses_its_last_target_raises(make: Make) -> None:
    fleet = make(make_servers(targets=1))
    stream = EngineLoop(fleet).tokens(Request((1, 2, 3), 40, distributed(2)))
    next(stream)
    fleet.kill("target-1")
    with pytest.raises(FleetError, match="no target server is left"):
        list(stream)


def plain_decoding(count: int, sampling: Sampling = Sampling(), seeds_by_position: bool = False) -> Tokens:  # noqa: B008
    tokens = [1, 2, 3]
    for _ in range(count):
        seed = position_seed(sampling, len(tokens)) if seeds_by_position else sampling.seed
        tokens += TARGET.answer(ForwardRequest(tokens, len(tokens), sampling=replace(sampling, seed=seed)))
    return tuple(tokens[3:])


def next_events_of(id: int, fleet: Fleet, count: int = 1) -> list[Event]:
    """Return the next events of one job, skipping those of cancelled ones."""
    matching: list[Event] = []
    for _ in range(1000):
        event = fleet.next_event()
        matching += [event] if event.id == id else []
        if len(matching) == count:
            return matching
    raise AssertionError(f"only {len(matching)} of {count} events came for job {id}")
