"""Shared forwards in virtual time."""

import pytest

from command import dsi_here
from dsi.core.policies import autoregressive, pearl, speculative
from dsi.core.request import Request
from dsi.core.shared_forwards import SharedForwards
from dsi.fleets.loop import EngineLoop
from dsi.fleets.simulated_shared import SharedSimulatedFleet
from dsi.models.protocol import Model
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

TARGET = ToyTarget(2)
LATENCY = LatencyModel(10, 1, per_token_ms=2)


def fleet() -> SharedSimulatedFleet:
    """A forward takes 10 and 2 for each new token, a draft token 1 however many share its forward."""
    models: dict[str, Model] = {"target": TARGET, "drafter": ToyDrafter(TARGET, 0.8, 3)}
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


@pytest.mark.parametrize("block", [0, 2, 5])
def test_shared_simulated_fleet_keeps_texts_under_every_policy(block: int) -> None:
    loop = EngineLoop(fleet())
    loop.load.shared_block = lambda *_: block
    policies = [
        autoregressive(),
        speculative(3),
        *(SharedForwards("drafter", loop.load).policy(pearl(4)) for _ in range(3)),
    ]
    requests = [Request((i, 9), 12 + i, policy) for i, policy in enumerate(policies)]
    assert [done.tokens for done in loop.run(*requests)] == texts(*(replaced(request) for request in requests))


def replaced(request: Request) -> Request:
    return Request(request.prompt, request.max_new_tokens, autoregressive())


def test_simulated_requests_that_share_forwards_are_not_slower_than_plain_decoding() -> None:
    for requests in (2, 4, 16, 64):
        config = SimulationConfig(LATENCY, 0.8, sp=1, tokens=40, requests=requests, share_forwards=True)
        plain, shared = (config.run(algorithm, seed=1).ms for algorithm in ("nonsi", "dsi"))
        assert shared <= 1.02 * plain
    apart, together = (
        SimulationConfig(LATENCY, 0.8, sp=1, tokens=40, requests=8, share_forwards=shared).run("nonsi", seed=1).all_ms
        for shared in (False, True)
    )
    assert apart > 2 * together


def test_simulate_command_refuses_shared_forwards_of_several_targets() -> None:
    done = dsi_here("simulate", "--target-ms", "10", "--drafter-ms", "1", "--sp", "3", "--share-forwards")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "dsi: shared forwards with 3 targets, 1 drafters and 0 failures per hour: must be 1 (--sp 1), 1 and 0\n"
    )
