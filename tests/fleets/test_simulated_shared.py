"""Shared forwards in virtual time."""

from dataclasses import replace
from statistics import fmean

import pytest

from command import dsi_here
from dsi.core.policies import autoregressive, pearl, policy_for, speculative
from dsi.core.request import Request
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.fleets.loop import EngineLoop
from dsi.fleets.simulated_shared import SharedSimulatedFleet
from dsi.models.protocol import Model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

TARGET = ToyTarget(2)
LATENCY = LatencyModel(10, 1, per_token_ms=2)
CURVE = {1: 20.0, 2: 20.2, 4: 20.4, 8: 21.0, 16: 22.0, 32: 30.0, 64: 60.0}


def fleet() -> SharedSimulatedFleet:
    """A forward takes 10 and 2 for each new token, a draft token 1 however many share its forward."""
    models: dict[str, Model] = {"target": TARGET, "drafter": ToyDrafter(TARGET, 0.8, 3, runner_up_acceptance=0.5)}
    return SharedSimulatedFleet(models, {"target": lambda tokens: 10 + 2 * tokens, "drafter": lambda _: 1}, log=[])


def texts(*requests: Request) -> list[tuple[int, ...]]:
    return [EngineLoop(fleet()).run(request)[0].tokens for request in requests]


def test_shared_simulated_fleet_adds_up_the_forwards_of_plain_decoding() -> None:
    made = fleet()
    requests = [Request((i,), 5, autoregressive()) for i in range(3)]
    done = EngineLoop(made).run(*requests)
    assert [completion.tokens for completion in done] == texts(*requests)
    assert [completion.elapsed for completion in done] == [5 * 16] * 3
    assert made.busy == {"target-1": 80, "drafter": 0}
    assert len({span.start for span in made.log or ()}) == 5


@pytest.mark.parametrize(
    "turns", [SpecConfig("nonsi"), SpecConfig("si", 2), SpecConfig("si", 5), SpecConfig("si", 3, tree=7)]
)
def test_shared_simulated_fleet_keeps_texts_under_every_policy(turns: SpecConfig) -> None:
    loop = EngineLoop(fleet())
    loop.load.shared_spec = lambda *_: turns
    policies = [
        autoregressive(),
        speculative(3),
        policy_for(SpecConfig("si", 2, tree=5)),
        *(SharedForwards("drafter", loop.load).policy(pearl(4)) for _ in range(3)),
    ]
    requests = [Request((i, 9), 12 + i, policy) for i, policy in enumerate(policies)]
    assert [done.tokens for done in loop.run(*requests)] == texts(*(replaced(request) for request in requests))


def replaced(request: Request) -> Request:
    return Request(request.prompt, request.max_new_tokens, autoregressive())


def test_simulated_requests_that_share_forwards_are_not_slower_than_plain_decoding() -> None:
    for requests in (2, 4, 16, 64):
        config = SimulationConfig(LATENCY, 0.8, sp=1, tokens=40, requests=requests, share_forwards=True)
        plain, shared, auto = (
            fmean(float(config.run(algorithm, seed).ms) for seed in range(1, 5))
            for algorithm in ("nonsi", "dsi", "auto")
        )  # where speculation gains little, a text's luck decides
        assert max(shared, auto) <= 1.02 * plain
    apart, together = (
        SimulationConfig(LATENCY, 0.8, sp=1, tokens=40, requests=8, share_forwards=shared).run("nonsi", seed=1).all_ms
        for shared in (False, True)
    )
    assert apart > 2 * together


def test_shared_simulated_fleet_counts_nodes_of_trees_as_rows() -> None:
    made = fleet()
    tree = SpecConfig("si", 2, tree=4, chances=(0.6, 0.3))  # two choices, and two after the first
    done = EngineLoop(made).run(*(Request((i,), 1 + 2 * i, policy_for(tree)) for i in range(2)))
    assert [len(completion.tokens) for completion in done] == [1, 3]
    first = next(span for span in made.log or () if span.role == "target")
    assert first.end - first.start == 10 + 2 * (1 + 1 + 4)  # there is nothing to draft before the only token


@pytest.mark.parametrize("spec", [SpecConfig("si", 150), SpecConfig("si", 9, tree=150, chances=(0.5, 0.3, 0.2))])
def test_shared_simulated_fleet_computes_wide_verifications(spec: SpecConfig) -> None:
    requests = [Request((i, 9), 152, policy_for(spec)) for i in range(2)]
    assert [done.tokens for done in EngineLoop(fleet()).run(*requests)] == texts(*map(replaced, requests))


def test_simulated_trees_in_shared_forwards_pay_while_few_requests_share_them() -> None:
    config = SimulationConfig(
        LatencyModel.measured(CURVE, 1.0), 0.5, sp=1, tokens=30, share_forwards=True, runner_up_acceptance=0.6
    )
    speed = {}
    for requests in (2, 48):
        chains = replace(config, requests=requests)
        speed[requests] = chains.run("dsi", 1).ms / chains.with_spec(tree=16).run("dsi", 1).ms
    assert speed[2] > 1.1
    assert 0.97 < speed[48] < 1.03  # nobody speculates


def test_simulate_command_refuses_shared_forwards_of_several_targets() -> None:
    done = dsi_here("simulate", "--target-ms", "10", "--drafter-ms", "1", "--sp", "3", "--share-forwards")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "dsi: shared forwards with 3 targets, 1 drafters and 0 failures per hour: must be 1 (--sp 1), 1 and 0\n"
    )
