"""What the engine may rely on, whatever a fleet is made of. Every fleet passes this suite."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise

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
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request
from dsi.core.scheduler import Scheduler
from dsi.core.sequence import Tokens, TokenSequence
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop, Fleet, FleetError
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.ray_actors import RayFleet, ResourceRequest
from dsi.fleets.simulated import SimulatedFleet
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadFleet
from dsi.fleets.worker import Server
from dsi.models.protocol import Cancelled, ForwardRequest
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait

TARGET = ToyTarget(3)
TEXT = TokenSequence.of((1, 2, 3))
LITTLE = ResourceRequest(cpus=0.01)


def truths(text: TokenSequence, width: int) -> Tokens:
    tokens = list(text)
    return TARGET.answer(ForwardRequest(tokens, len(tokens) + 1 - width))


def servers(targets: int = 2, acceptance: float = 0.7, slow: float = 0.004, quick: float = 0.001) -> list[Server]:
    drafter = ToyDrafter(TARGET, acceptance)
    return [
        *(Server(f"target-{i}", "target", Wait(TARGET, Latency(slow))) for i in range(1, targets + 1)),
        Server("drafter", "drafter", Wait(drafter, Latency(quick))),
    ]


class Broken:
    """A model that fails at every forward."""

    def answer(self, request: ForwardRequest) -> Tokens:
        raise MemoryError(f"no room for {len(request.tokens)} tokens")


class Noting:
    """A model that says five, and is half sure."""

    def answer(self, request: ForwardRequest) -> Tokens:
        return (5,) * request.num_positions

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        return self.answer(request), (((5, -0.5),),) * request.num_positions


class KillableFleet(Fleet):
    _scheduler: Scheduler

    def kill(self, name: str) -> None: ...


Make = Callable[..., KillableFleet]


def lasting(crew: list[Server], **options: object) -> ProcessFleet:
    """Processes that stay dead when they die, as the other fleets' servers do."""
    options.pop("cancel_points", None), options.pop("thread_pool", None)  # real forwards stop where they can
    return ProcessFleet(crew, restart=False, **options)  # type: ignore[arg-type]


@dataclass
class Afar:
    """A model that is looked at while it waits."""

    near: Wait

    def answer(self, request: ForwardRequest) -> Tokens:
        return self.near.answer(request)

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        end = time.perf_counter() + self.near.latency.forward(request)
        while time.perf_counter() < end:
            if request.cancelled.is_set():
                raise Cancelled
            yield None
        return self.near.model.answer(request) if request.num_positions else ()

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        text = list(request.tokens)
        for _ in range(count):
            found = yield from self.poll_answer(
                ForwardRequest(text, len(text), request.num_cached, request.sampling, request.cancelled)
            )
            yield from found
            text += found


def polling(crew: list[Server], **options: object) -> CudaFleet:
    options.pop("cancel_points", None), options.pop("thread_pool", None)
    models = [Afar(server.model) if isinstance(server.model, Wait) else server.model for server in crew]
    afar = [Server(server.name, server.role, model) for server, model in zip(crew, models)]
    return CudaFleet(afar, **options)  # type: ignore[arg-type]


def on_ray(crew: list[Server], **options: object) -> RayFleet:
    """Actors that stay dead when they die, all of them there."""
    options.pop("cancel_points", None), options.pop("thread_pool", None)
    fleet = RayFleet(crew, restart=False, resources={server.name: LITTLE for server in crew}, **options)  # type: ignore[arg-type]
    fleet.wait_until_ready()
    return fleet


@pytest.fixture(
    params=[SimulatedFleet, ThreadFleet, lasting, polling, on_ray],
    ids=["simulated", "threads", "processes", "polling", "actors"],
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[KillableFleet] = []
    if request.param is on_ray:
        request.getfixturevalue("cluster")

    def build(crew: list[Server], **options: object) -> KillableFleet:
        made.append(request.param(crew, **options))
        return made[-1]

    yield build
    for fleet in made:
        fleet.close()


def events(fleet: Fleet, count: int) -> list[Event]:
    return [fleet.next_event() for _ in range(count)]


def started(fleet: Fleet, *jobs: Job) -> None:
    for job in jobs:
        fleet.start(job)


def test_a_draft_streams_its_tokens_in_order(make: Make) -> None:
    fleet = make(servers(acceptance=1.0))
    fleet.start(Draft(5, TEXT, 6))
    expected, text = [], TEXT
    for _ in range(6):
        expected.append(Drafted(5, truths(text, 1)[0]))
        text = text.then(expected[-1].token)
    assert events(fleet, 6) == expected


def test_a_verification_answers_every_place(make: Make) -> None:
    fleet = make(servers())
    text = TEXT.then(4).then(5)
    fleet.start(Verify(1, text, 3))
    assert fleet.next_event() == Verified(1, truths(text, 3))


def test_every_idle_target_is_warmed(make: Make) -> None:
    fleet = make(servers(targets=3))
    fleet.start(Prefill(1, TEXT))
    assert events(fleet, 3) == [Prefilled(1)] * 3


def test_more_jobs_than_servers_are_all_answered(make: Make) -> None:
    fleet = make(servers(targets=2))
    started(fleet, *(Verify(id, TEXT, 1) for id in range(7)))
    assert sorted(event.id for event in events(fleet, 7)) == list(range(7))


def test_the_watch_on_a_root_is_answered_before_deeper_jobs(make: Make) -> None:
    fleet = make(servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1, 4), Verify(3, TEXT, 1, 4), Verify(4, TEXT, 1))
    fleet.promote(3)
    assert [event.id for event in events(fleet, 4)] == [1, 4, 3, 2]


def test_a_cancelled_job_frees_its_server(make: Make) -> None:
    fleet = make(servers(targets=1, slow=0.5))
    fleet.start(Verify(1, TEXT, 1))
    fleet.cancel(1)
    fleet.start(Verify(2, TEXT, 2))
    assert of(2, fleet) == [Verified(2, truths(TEXT, 2))]
    assert fleet.now() < 0.9  # not both of them, one after the other


def test_a_cancelled_stream_ends(make: Make) -> None:
    fleet = make(servers())
    fleet.start(Draft(1, TEXT, 10**6))
    fleet.next_event()
    fleet.cancel(1)
    fleet.start(Draft(2, TEXT, 3))
    assert len(of(2, fleet, 3)) == 3


def test_a_waiting_job_can_be_cancelled(make: Make) -> None:
    fleet = make(servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1), Verify(3, TEXT, 1))
    fleet.cancel(2)
    assert [event.id for event in events(fleet, 2)] == [1, 3]


def test_cancelling_what_is_unknown_or_over_is_harmless(make: Make) -> None:
    fleet = make(servers())
    fleet.cancel(99)
    fleet.promote(99)
    fleet.start(Verify(1, TEXT, 1))
    fleet.next_event()
    fleet.cancel(1)
    fleet.cancel(1)
    fleet.start(Verify(2, TEXT, 1))
    assert fleet.next_event().id == 2


def test_the_job_of_a_dying_server_fails_and_can_go_elsewhere(make: Make) -> None:
    fleet = make(servers(targets=2))
    fleet.start(Verify(1, TEXT, 1))
    [at_it] = fleet._scheduler.running  # who came first
    fleet.kill(at_it)
    assert fleet.next_event() == Failed(1, f"server {at_it} died")
    fleet.start(Verify(2, TEXT, 1))
    assert fleet.next_event() == Verified(2, truths(TEXT, 1))


def test_without_any_server_left_jobs_fail_at_once(make: Make) -> None:
    fleet = make(servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1))
    fleet.kill("target-1")
    fleet.start(Verify(3, TEXT, 1))
    assert events(fleet, 3) == [
        Failed(1, "server target-1 died"),
        Failed(2, "no target server is left"),
        Failed(3, "no target server is left"),
    ]


def test_a_model_that_raises_fails_its_job_and_no_more(make: Make) -> None:
    fleet = make([Server("target-1", "target", Broken()), *servers(targets=0)])
    fleet.start(Verify(1, TEXT, 1))
    assert fleet.next_event() == Failed(1, "MemoryError: no room for 3 tokens")
    fleet.start(Draft(2, TEXT, 1))
    assert fleet.next_event().id == 2


def test_a_fleet_with_nothing_to_do_says_so_instead_of_hanging(make: Make) -> None:
    fleet = make(servers())
    with pytest.raises(RuntimeError, match="nothing to do"):
        fleet.next_event()


def test_another_thread_can_wake_a_fleet_that_waits(make: Make) -> None:
    fleet = make(servers(targets=1, slow=0.2))
    fleet.start(Verify(1, TEXT, 1))
    threading.Timer(0.02, fleet.wake).start() if not isinstance(fleet, SimulatedFleet) else fleet.wake()
    assert fleet.next_event() is WOKEN
    assert fleet.next_event() == Verified(1, truths(TEXT, 1))


def test_notes_come_with_what_was_verified(make: Make) -> None:
    fleet = make([Server("target-1", "target", Noting())])
    fleet.start(Verify(1, TEXT, 2, sampling=Sampling(logprobs=1)))
    assert fleet.next_event() == Verified(1, (5, 5), (((5, -0.5),), ((5, -0.5),)))
    fleet.start(Verify(2, TEXT, 2))
    assert fleet.next_event() == Verified(2, (5, 5))


def test_closing_twice_is_closing_once(make: Make) -> None:
    fleet = make(servers())
    started(fleet, Verify(1, TEXT, 1), Draft(2, TEXT, 1000))
    fleet.close()
    fleet.close()
    fleet.cancel(1)
    assert {type(event) for event in events(fleet, 2)} == {Failed}
    with pytest.raises(RuntimeError, match="nothing to do"):
        fleet.next_event()


def test_killing_what_is_not_there_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="no server 'nobody'"):
        make(servers()).kill("nobody")


def test_a_new_root_is_answered_before_what_waited_for_the_same_server(make: Make) -> None:
    fleet = make(servers(targets=1))
    started(fleet, Verify(1, TEXT, 1), Verify(2, TEXT, 1, 4))
    assert fleet.next_event().id == 1
    fleet.start(Verify(3, TEXT, 1))
    assert [event.id for event in events(fleet, 2)] == [3, 2]


def test_the_log_has_one_forward_at_a_time_on_each_server(make: Make) -> None:
    log: list[Span] = []
    EngineLoop(make(servers(targets=3), log=log)).run(Request((1, 2, 3), 30, distributed(2)))
    assert {span.kind for span in log} == {"draft", "verify", "warm"}
    for name in {span.server for span in log}:
        mine = sorted((span.start, span.end) for span in log if span.server == name)
        assert all(start <= end for start, end in mine)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))


@pytest.mark.parametrize("policy", [autoregressive(), speculative(3), pearl(3), distributed(2)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=8)])
@pytest.mark.parametrize("options", [{}, {"cancel_points": 2}, {"cancel_points": 1, "thread_pool": True}])
def test_the_text_is_the_targets_own(
    make: Make, policy: Policy, sampling: Sampling, options: dict[str, object]
) -> None:
    fleet = make(servers(targets=3), **options)
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 25, policy, sampling))
    assert done.tokens == alone(25, sampling)


@pytest.mark.parametrize("policy", [speculative(3), distributed(2)])
def test_the_text_survives_the_loss_of_all_but_one_target(make: Make, policy: Policy) -> None:
    fleet = make(servers(targets=3))
    text: list[int] = []
    deaths = {"target-1": 10, "drafter": 20, "target-2": 30}
    for tokens in EngineLoop(fleet).tokens(Request((1, 2, 3), 40, policy)):
        text += tokens
        for name in [name for name, at in deaths.items() if len(text) >= at]:
            del deaths[name]
            fleet.kill(name)
    assert deaths == {}
    assert tuple(text) == alone(40)


def test_losing_the_last_target_is_a_clear_error(make: Make) -> None:
    fleet = make(servers(targets=1))
    stream = EngineLoop(fleet).tokens(Request((1, 2, 3), 40, distributed(2)))
    next(stream)
    fleet.kill("target-1")
    with pytest.raises(FleetError, match="no target server is left"):
        list(stream)


def alone(count: int, sampling: Sampling = Sampling()) -> Tokens:  # noqa: B008
    tokens = [1, 2, 3]
    for _ in range(count):
        tokens += TARGET.answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
    return tuple(tokens[3:])


def of(id: int, fleet: Fleet, count: int = 1) -> list[Event]:
    """The next events of one job; those of cancelled ones may come between them."""
    found: list[Event] = []
    for _ in range(1000):
        event = fleet.next_event()
        found += [event] if event.id == id else []
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of {count} events came for job {id}")
