"""Endpoints that fail in every way: the text is the same, or there is a clear error in time."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dsi.core.generation import Policy
from dsi.core.messages import GREEDY, Draft, Sampling, Verified, Verify
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request
from dsi.core.sequence import Tokens, TokenSequence
from dsi.fleets import worker_restarts
from dsi.fleets.endpoint import RESTART_SECONDS, Endpoint
from dsi.fleets.event_loop import EventLoopThread
from dsi.fleets.http import HttpFleet
from dsi.fleets.loop import EngineLoop, FleetError
from dsi.fleets.servers import Server
from dsi.models.endpoints.address import KINDS, parse_address
from dsi.models.protocol import ForwardRequest, Model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait
from stand_in_engine import FAULTS, StandInEngine

TARGET, OTHER = ToyTarget(3), ToyTarget(4)
DRAFTER = ToyDrafter(TARGET, 0.8)
POLICIES = {"nonsi": autoregressive(), "si": speculative(3), "pearl": pearl(3), "dsi": distributed(2)}
PROMPT = (1, 2, 3)
NUM_FAULTS = 60  # of each kind, at least

TEXT = TokenSequence.of(PROMPT)
SAMPLED = Sampling(temperature=1.0, seed=8)

Make = Callable[..., HttpFleet]
Start = Callable[..., StandInEngine]


def plain_text(count: int, sampling: Sampling = GREEDY) -> Tokens:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens += TARGET.answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
    return tuple(tokens[len(PROMPT) :])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_restarts, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(worker_restarts, "MAX_PAUSE", 0.05)


@pytest.fixture
def make() -> Iterator[Make]:
    """Make a fleet of target engines and a drafter, which is an engine as well or a local model."""
    made: list[HttpFleet] = []

    def build(*targets: StandInEngine, drafter: StandInEngine | Model = DRAFTER, **options: Any) -> HttpFleet:
        loop = EventLoopThread()

        def connected(engine: StandInEngine) -> Endpoint:
            endpoint = Endpoint(parse_address(engine.url), loop)
            loop.run(endpoint.connect())
            return endpoint

        servers = [Server(f"target-{i}", "target", connected(engine)) for i, engine in enumerate(targets, 1)]
        model = connected(drafter) if isinstance(drafter, StandInEngine) else drafter
        made.append(HttpFleet([*servers, Server("drafter", "drafter", model)], **options))
        return made[-1]

    yield build
    for fleet in made:
        fleet.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., StandInEngine]]:
    with ExitStack() as stack:
        yield lambda *arguments, **fields: stack.enter_context(StandInEngine(*arguments, **fields))


class RandomFaults:
    """Strikes requests at random, and counts."""

    def __init__(self, seed: int, rate: float, faults: tuple[str, ...]) -> None:
        self.rng, self.rate, self.faults = random.Random(seed), rate, faults
        self.count: Counter[str] = Counter()

    def __call__(self, path: str) -> str | None:  # noqa: ARG002
        if self.rng.random() >= self.rate:
            return None
        fault = self.rng.choice(self.faults)
        self.count[fault] += 1
        return fault


@pytest.mark.parametrize("kind", KINDS)
def test_http_fleet_output_is_the_same_with_random_faults(kind: str, make: Make, engine: Start) -> None:
    """Faults of all sorts for each kind, under every algorithm, greedy and sampled: 240 in all."""
    faults = tuple(fault for fault in FAULTS if kind in ("vllm", "dsi") or fault != "another model")
    strike, samplings = RandomFaults(5, 0.12, faults), [GREEDY] + [SAMPLED] * (kind == "dsi")
    targets, drafter = [engine(kind, TARGET) for _ in range(3)], engine(kind, DRAFTER)
    fleet = make(*targets, drafter=drafter, hang_seconds=0.1)
    for each in (*targets, drafter):
        each.fault, each.slow_seconds = strike, 0.3
    while strike.count.total() < NUM_FAULTS:
        for policy in POLICIES.values():
            for sampling in samplings:
                [completion] = EngineLoop(fleet).run(Request(PROMPT, 20, policy, sampling))
                assert completion.tokens == plain_text(20, sampling)
    assert set(strike.count) == set(faults)
    assert fleet.restarts.total() > 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_http_fleet_output_survives_the_death_and_return_of_engines(policy: Policy, make: Make, engine: Start) -> None:
    engines = [engine("vllm", TARGET), engine("vllm", TARGET)]
    fleet, text = make(*engines), list[int]()
    events = [(10, engines[0].stop), (20, engines[0].start), (25, engines[1].stop)]
    for tokens in EngineLoop(fleet).tokens(Request(PROMPT, 40, policy)):
        text += tokens
        while events and len(text) >= events[0][0]:
            events.pop(0)[1]()
    assert tuple(text) == plain_text(40)


def test_http_fleet_waits_for_the_only_target_to_restart(make: Make, engine: Start) -> None:
    only = engine("dsi", TARGET)
    fleet, text = make(only), list[int]()
    for tokens in EngineLoop(fleet).tokens(Request(PROMPT, 20, autoregressive())):
        text += tokens
        if len(text) == 10:
            only.stop()
            threading.Timer(0.1, only.start).start()
    assert tuple(text) == plain_text(20)
    assert fleet.restarts["target-1"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_http_fleet_never_uses_another_model_after_a_restart(kind: str, make: Make, engine: Start) -> None:
    first, second = engine(kind, TARGET), engine(kind, TARGET)
    fleet, text = make(first, second), list[int]()
    for tokens in EngineLoop(fleet).tokens(Request(PROMPT, 40, distributed(2))):
        text += tokens
        if len(text) >= 10 and first.model is TARGET:
            first.stop()
            time.sleep(RESTART_SECONDS)  # no engine is back any sooner
            first.model, first.name = OTHER, "other"
            first.start()
    assert tuple(text) == plain_text(40)


def test_http_fleet_with_another_model_alone_raises_in_time(make: Make, engine: Start) -> None:
    only = engine("llama.cpp", TARGET)
    stream = EngineLoop(make(only, outage_seconds=0.2)).tokens(Request(PROMPT, 40, autoregressive()))
    next(stream)
    only.stop()
    only.model, only.name = OTHER, "other"
    only.start()
    began = time.monotonic()
    with pytest.raises(FleetError, match="has another model, other, no longer toy"):
        list(stream)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "status 429"])
def test_http_fleet_that_always_fails_raises_in_time(fault: str, make: Make, engine: Start) -> None:
    broken = engine("vllm", TARGET, slow_seconds=0.2)
    fleet = make(broken, hang_seconds=0.05, outage_seconds=0.2)
    broken.fault = lambda path: fault if path == "/v1/completions" else None
    began = time.monotonic()
    with pytest.raises(FleetError, match=f"no target server is left .{broken.url}: "):
        EngineLoop(fleet).run(Request(PROMPT, 4, autoregressive()))
    assert time.monotonic() - began < 3


def test_http_fleet_goes_on_without_a_dead_drafter(make: Make, engine: Start) -> None:
    drafter = engine("llama.cpp", DRAFTER)
    fleet = make(engine("dsi", TARGET), drafter=drafter)
    drafter.stop()
    [completion] = EngineLoop(fleet).run(Request(PROMPT, 10, distributed(2, min_draft=2)))
    assert completion.tokens == plain_text(10)


def test_http_fleet_retries_a_request_that_came_too_soon(make: Make, engine: Start) -> None:
    busy = engine("vllm", TARGET)
    fleet, answers = make(busy), iter(["status 429", "status 429"])
    busy.fault = lambda path: next(answers, None) if path == "/v1/completions" else None
    fleet.start(Verify(1, TEXT, 2))
    assert isinstance(fleet.next_event(), Verified)
    assert fleet.deaths == {}


def test_http_fleet_closes_the_connection_of_a_cancelled_job(make: Make, engine: Start) -> None:
    drafter = engine("vllm", Wait(DRAFTER, Latency(0.005)))
    fleet = make(engine("vllm", TARGET), drafter=drafter)
    fleet.start(Draft(1, TEXT, 10**6))
    fleet.next_event()
    fleet.cancel(1)
    fleet.start(Draft(2, TEXT, 1))
    while fleet.next_event().id != 2:
        pass
    deadline = time.monotonic() + 2
    while not drafter.num_cancelled and time.monotonic() < deadline:
        time.sleep(0.005)
    assert drafter.num_cancelled == 1


def test_http_fleet_keeps_its_connections(make: Make, engine: Start) -> None:
    target = engine("vllm", TARGET)
    EngineLoop(make(target)).run(Request(PROMPT, 40, autoregressive()))
    assert target.num_connections <= 2  # one, and one to ask which model it has


def test_http_fleet_readmits_an_endpoint_while_no_job_runs(make: Make, engine: Start) -> None:
    target = engine("vllm", TARGET)
    fleet = make(target)
    fleet.kill("target-1")
    deadline = time.monotonic() + 2
    while not fleet.servers()[0][2] and time.monotonic() < deadline:
        time.sleep(0.005)
        fleet.check_workers()
    fleet.start(Verify(1, TEXT, 1))
    assert isinstance(fleet.next_event(), Verified)


@pytest.mark.parametrize("kind", KINDS)
def test_http_fleet_streams_a_text_that_is_not_speculated_on(kind: str, make: Make, engine: Start) -> None:
    target = engine(kind, TARGET)
    fleet = make(target)
    for sampling in [GREEDY] + [SAMPLED] * (kind == "dsi"):
        target.requests.clear()
        [completion] = EngineLoop(fleet).run(Request(PROMPT, 30, autoregressive(), sampling, streams=True))
        assert completion.tokens == plain_text(30, sampling)
        assert completion.tally.forwards == completion.tally.useful == 30
        assert len(target.requests) == 1


def test_http_fleet_streams_on_from_another_target(make: Make, engine: Start) -> None:
    engines = [engine("vllm", Wait(TARGET, Latency(0.002))), engine("vllm", Wait(TARGET, Latency(0.002)))]
    fleet, text = make(*engines), list[int]()
    events = [(10, engines[0].stop), (20, engines[0].start), (25, engines[1].stop)]
    for tokens in EngineLoop(fleet).tokens(Request(PROMPT, 40, autoregressive(), streams=True)):
        text += tokens
        while events and len(text) >= events[0][0]:
            events.pop(0)[1]()
    assert tuple(text) == plain_text(40)


def test_http_fleet_streams_up_to_a_stop_token(make: Make, engine: Start) -> None:
    fleet, text = make(engine("vllm", TARGET)), plain_text(40)
    stop = frozenset({next(token for i, token in enumerate(text) if i >= 5 and token not in text[:i])})
    [completion] = EngineLoop(fleet).run(Request(PROMPT, 40, autoregressive(), stop=stop, streams=True))
    assert completion.tokens == text[: text.index(next(iter(stop))) + 1]
    assert completion.finish_reason == "stop"
