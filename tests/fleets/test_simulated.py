"""Virtual time: exact, and able to model what the paper leaves out."""

from fractions import Fraction
from itertools import count

import pytest

from dsi.core.generation import Policy
from dsi.core.messages import Draft, Failed, Job, Time, Verified, Verify
from dsi.core.policies import autoregressive, distributed, speculative
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import Outage, SimulatedFleet
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

TEXT = TokenSequence.of((1, 2, 3))
TARGET = ToyTarget(1)


def make_fleet(targets: int = 1, latency: Latency = Latency(8), **options: object) -> SimulatedFleet:  # noqa: B008
    servers = [Server(f"target-{i}", "target", Wait(TARGET, latency)) for i in range(targets)]
    servers.append(Server("drafter", "drafter", Wait(ToyDrafter(TARGET, 1.0), Latency(1))))
    return SimulatedFleet(servers, **options)  # type: ignore[arg-type]


def answered_at(fleet: SimulatedFleet, *jobs: Job) -> dict[int, Time]:
    """When the last event of each job came."""
    times: dict[int, Time] = {}
    for job in jobs:
        fleet.start(job)
    for _ in range(sum(job.count if isinstance(job, Draft) else 1 for job in jobs)):
        event = fleet.next_event()
        times[event.id] = fleet.now()
    return times


def verify(id: int, context: TokenSequence = TEXT, width: int = 1) -> Verify:
    return Verify(id, context, width)


def test_simulated_forwards_overlap_on_servers_and_queue_on_one() -> None:
    assert answered_at(make_fleet(2), verify(1), verify(2), verify(3)) == {1: 8, 2: 8, 3: 16}


def test_simulated_time_keeps_fractions() -> None:
    third = Latency(Fraction(1, 3))
    times = answered_at(make_fleet(1, third), *(verify(id) for id in range(3)))
    assert times == {0: Fraction(1, 3), 1: Fraction(2, 3), 2: 1}
    assert all(isinstance(time, Fraction) for time in times.values())


@pytest.mark.parametrize(("cancel_points", "free_at"), [(0, 3), (8, 4), (4, 4), (2, 4), (1, 8)])
def test_simulated_cancel_frees_the_server_at_a_cancel_point(cancel_points: int, free_at: int) -> None:
    fleet = make_fleet(1, cancel_points=cancel_points)
    fleet.start(Draft(9, TEXT, 3))
    fleet.start(verify(1))
    for _ in range(3):
        fleet.next_event()
    assert fleet.now() == 3
    fleet.cancel(1)
    assert answered_at(fleet, verify(2)) == {2: free_at + 8}
    assert fleet.busy["target-0"] == free_at + 8


@pytest.mark.parametrize(("cancel_points", "free_at"), [(None, Fraction(3, 4)), (0, Fraction(1, 2)), (1, 1)])
def test_simulated_drafters_have_their_own_cancel_points(cancel_points: int | None, free_at: Time) -> None:
    fleet = make_fleet(1, Latency(Fraction(1, 2)), cancel_points=4, drafter_cancel_points=cancel_points)
    fleet.start(Draft(1, TEXT, 3))
    assert answered_at(fleet, verify(2)) == {2: Fraction(1, 2)}  # in the middle of a guess
    fleet.cancel(1)
    assert answered_at(fleet, Draft(3, TEXT, 1)) == {3: free_at + 1}


@pytest.mark.parametrize(("thread_pool", "second_at"), [(True, 24), (False, 16)])
def test_simulated_thread_pool_starts_jobs_its_answer_makes_stale(thread_pool: bool, second_at: int) -> None:
    fleet = make_fleet(1, cancel_points=1, thread_pool=thread_pool)
    fleet.start(verify(1))
    fleet.start(verify(2, TEXT.then(4)))
    assert fleet.next_event().id == 1
    fleet.cancel(2)  # the answer was another token: what waited is stale
    assert answered_at(fleet, verify(3, TEXT.then(5))) == {3: second_at}


def test_simulated_network_delays_each_way_but_not_a_stream() -> None:
    fleet = make_fleet(1, network=5)
    assert answered_at(fleet, verify(1)) == {1: 5 + 8 + 5}
    assert answered_at(make_fleet(1, network=5), Draft(1, TEXT, 10)) == {1: 5 + 10 + 5}


def test_simulated_draft_goes_on_until_the_cancel_arrives() -> None:
    fleet = make_fleet(1, network=5)
    fleet.start(Draft(1, TEXT, 100))
    fleet.next_event()
    assert fleet.now() == 11
    fleet.cancel(1)
    answered_at(fleet, Draft(2, TEXT, 1))
    assert fleet.busy["drafter"] == 11 + 1  # from 5 to 16, when the cancel arrives; then one more


def test_simulated_root_goes_to_a_server_that_has_prefilled_it() -> None:
    """Every guess is wrong and reading costs: the root's watch must go to a server that has read it."""
    config = SimulationConfig(
        LatencyModel(20.0, 2.0, per_token_ms=1.0), 0.0, sp=5, tokens=20, thread_pool=False, spec=SpecConfig(lookahead=2)
    )
    assert config.run("dsi", seed=0).ms <= config.run("nonsi", seed=0).ms


def test_simulated_contention_slows_busy_targets() -> None:
    fleet = make_fleet(3, contention=0.5)
    assert answered_at(fleet, verify(1), verify(2), verify(3)) == {1: 16, 2: 16, 3: 16}


def test_simulated_contention_lasts_while_both_compute() -> None:
    """Alone for 4 of its 8, the first has 4 more at the slower pace; then the other has 4 left, alone."""
    fleet = make_fleet(2, contention=0.5)
    fleet.start(verify(1))
    assert answered_at(fleet, Draft(2, TEXT, 4)) == {2: 4}
    assert answered_at(fleet, verify(3)) == {1: 10}
    assert (fleet.next_event().id, fleet.now()) == (3, 14)


def test_simulated_contention_ends_with_a_cancel() -> None:
    fleet = make_fleet(2, contention=0.5)
    fleet.start(verify(1))
    fleet.start(verify(2))
    assert answered_at(fleet, Draft(3, TEXT, 6)) == {3: 6}  # when each has 4 left
    fleet.cancel(2)
    assert (fleet.next_event().id, fleet.now()) == (1, 10)


def test_simulated_servers_prefill_a_prompt_once() -> None:
    slow = Latency(tpot=8, ttft=100)
    assert answered_at(make_fleet(1, slow), verify(1), verify(2)) == {1: 100, 2: 108}
    assert answered_at(make_fleet(2, slow), verify(1), verify(2)) == {1: 100, 2: 100}


def test_simulated_targets_prefill_while_another_verifies() -> None:
    """The second verification begins while the first still reads, and pays for no prompt of its own."""
    fleet = make_fleet(2, Latency(tpot=8, ttft=100))
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 3, distributed(1)))
    # The first answer takes 100. Reading alone took the other server 92, so its answer comes with it.
    assert done.times == (100, 100, 108)


def test_simulated_server_computes_tokens_verified_elsewhere() -> None:
    fleet = make_fleet(2, Latency(tpot=8, per_token=1))
    texts = [TEXT]
    for token in range(4):
        texts.append(texts[-1].then(token))
    answered_at(fleet, verify(1), verify(2))  # both have read the prompt
    assert answered_at(fleet, verify(3, texts[4], width=2)) == {3: 8 + 8 + 3}


def test_simulated_jitter_is_reproducible() -> None:
    def run() -> tuple[Time, ...]:
        [done] = EngineLoop(make_fleet(2, Latency(8.0, jitter=0.3))).run(Request((1, 2, 3), 20, distributed(2)))
        return done.times

    assert run() == run()
    assert len(set(run())) > 5


def test_simulated_forwards_can_fail() -> None:
    doomed = {2, 3}
    fleet = make_fleet(1, fails=lambda job: job.id in doomed)
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 4, autoregressive()))
    assert (done.tally.failed, done.elapsed) == (2, 8 * 6)


def test_simulated_fleet_refuses_negative_latencies() -> None:
    with pytest.raises(ValueError, match="network -1"):
        make_fleet(1, network=-1)


def test_simulated_network_latency_per_server() -> None:
    fleet = make_fleet(2, network={"target-1": 5})
    assert answered_at(fleet, verify(1), verify(2), Draft(3, TEXT, 4)) == {3: 4, 1: 8, 2: 5 + 8 + 5}


def test_simulated_network_latency_keeps_fractions() -> None:
    third = Fraction(1, 3)
    times = answered_at(make_fleet(1, network={"target-0": third}), verify(1), verify(2))
    assert times == {1: 8 + 2 * third, 2: 16 + 4 * third}
    assert all(isinstance(time, Fraction) for time in times.values())


def test_simulated_network_jitter_keeps_order_and_is_reproducible() -> None:
    def arrivals(seed: int) -> list[Time]:
        fleet = make_fleet(1, network=50, network_jitter=0.5, seed=seed)
        fleet.start(Draft(1, TEXT, 30))
        times = []
        for _ in range(30):
            fleet.next_event()
            times.append(fleet.now())
        return times

    assert arrivals(1) == sorted(arrivals(1)) == arrivals(1) != arrivals(2)
    assert 25 + 1 + 25 <= arrivals(1)[0] <= 75 + 1 + 75


def test_simulated_fleet_refuses_unknown_servers() -> None:
    with pytest.raises(ValueError, match="there is no server 'target-9'"):
        make_fleet(1, network={"target-9": 1})
    with pytest.raises(ValueError, match="there is no server 'target-9'"):
        make_fleet(1, outages={"target-9": []})


def test_simulated_outage_fails_the_job_when_detected() -> None:
    fleet = make_fleet(2, outages={"target-0": [Outage(down=3, back=100, notice=2)]})
    fleet.start(verify(1))
    assert fleet.next_event() == Failed(1, "server target-0 died")
    assert (fleet.now(), fleet.busy["target-0"], fleet.outages) == (5, 3, 1)
    assert answered_at(fleet, verify(2)) == {2: 5 + 8}  # by the other


def test_simulated_outage_loses_jobs_before_detection() -> None:
    fleet = make_fleet(1, outages={"target-0": [Outage(down=1, back=20, notice=10)]})
    assert answered_at(fleet, Draft(1, TEXT, 2)) == {1: 2}
    fleet.start(verify(2))
    assert isinstance(fleet.next_event(), Failed)
    assert fleet.now() == 11


def test_simulated_outage_of_all_targets_delays_verifications() -> None:
    fleet = make_fleet(1, outages={"target-0": [Outage(Fraction(9, 2), Fraction(41, 2))]})
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 2, autoregressive()))
    assert done.times == (Fraction(41, 2) + 8, Fraction(41, 2) + 16)
    assert (done.tally.failed, all(isinstance(time, Fraction) for time in done.times)) == (1, True)


@pytest.mark.parametrize("policy", [speculative(3), distributed(3)])
def test_simulated_outage_of_the_drafter_leaves_the_targets_speed(policy: Policy) -> None:
    fleet = make_fleet(1, outages={"drafter": [Outage(0, 1000)]})
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 10, policy))
    assert done.elapsed == 80


def test_simulated_outage_empties_the_kv_cache() -> None:
    fleet = make_fleet(1, Latency(tpot=8, ttft=100), outages={"target-0": [Outage(105, 110)]})
    [done] = EngineLoop(fleet).run(Request((1, 2, 3), 2, autoregressive()))
    assert done.times == (100, 110 + 100)


def test_simulated_endless_outages_do_not_hang_an_idle_fleet() -> None:
    fleet = make_fleet(1, outages={"target-0": (Outage(10 * i, 10 * i + 1) for i in count(1))})
    with pytest.raises(RuntimeError, match="nothing to do"):
        fleet.next_event()


def test_simulated_killed_server_does_not_recover() -> None:
    fleet = make_fleet(2, outages={"target-0": [Outage(3, 4)]})
    fleet.kill("target-0")
    assert answered_at(fleet, verify(1), verify(2)) == {1: 8, 2: 16}


def test_outage_times_are_in_order() -> None:
    with pytest.raises(ValueError, match="down at 5, noticed 0 later, back at 4: must be in order"):
        Outage(5, 4)


def test_simulated_answer_at_the_time_of_failure_counts() -> None:
    fleet = make_fleet(1, outages={"target-0": [Outage(8, 50)]})
    fleet.start(verify(1))
    assert isinstance(fleet.next_event(), Verified)
