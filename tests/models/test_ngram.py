import pytest

from dsi.core.policies import autoregressive, distributed, speculative
from dsi.core.request import Request
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyDrafter, ToyTarget
from dsi.models.wait import Latency, Wait


class Repeating:
    """A target that repeats the same seven tokens."""

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        return tuple(10 + i % 7 for i in range(request.start, len(request.tokens) + 1))


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 9, 1, 2], 3),
        ([1, 2, 3, 1, 2, 4, 1, 2], 4),  # the latest
        ([5, 1, 2, 3, 0, 1, 2, 4, 5, 1, 2], 3),  # the longest
    ],
)
def test_ngram_predicts_what_followed_the_longest_match(tokens: list[int], guess: int) -> None:
    assert NGram().answer(ForwardRequest(tokens, len(tokens))) == (guess,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 1]])
def test_ngram_raises_without_a_match(tokens: list[int]) -> None:
    with pytest.raises(LookupError):
        NGram().answer(ForwardRequest(tokens, len(tokens)))


def servers(target: object, *drafters: Server) -> list[Server]:
    return [*(Server(f"t{i}", "target", Wait(target, Latency(10.0))) for i in range(3)), *drafters]  # type: ignore[arg-type]


def test_ngram_speeds_up_a_repetitive_text() -> None:
    times = []
    for policy in (autoregressive(), speculative(4), distributed(2)):
        fleet_servers = servers(Repeating(), Server("drafter", "drafter", Wait(NGram(), Latency(0.1))))
        [done] = EngineLoop(SimulatedFleet(fleet_servers)).run(Request((1,), 60, policy))
        assert done.tokens == tuple(10 + i % 7 for i in range(1, 61))
        times.append(done.elapsed)
    assert times[2] < times[1] < 0.6 * times[0]


def test_ngram_with_a_second_drafter_keeps_the_text() -> None:
    target = ToyTarget(4)
    fleet_servers = servers(
        target,
        Server("drafter", "drafter", Wait(ToyDrafter(target, 0.6), Latency(1.0))),
        Server("ngram", "ngram", Wait(NGram(), Latency(0.1))),
    )
    [done] = EngineLoop(SimulatedFleet(fleet_servers)).run(Request((1, 2), 60, distributed(2, ("drafter", "ngram"))))
    [alone] = EngineLoop(SimulatedFleet(servers(target))).run(Request((1, 2), 60, autoregressive()))
    assert done.tokens == alone.tokens
