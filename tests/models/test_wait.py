from fractions import Fraction
from typing import Any

import pytest

from dsi.fleets.simulated import WaitRecorder
from dsi.models.protocol import Cancelled, ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait

LATENCY = Latency(tpot=10, ttft=50, per_token=1)


@pytest.mark.parametrize(
    ("length", "start", "kept", "expected"),
    [
        (8, 8, None, 50),  # new to the server: the prompt's time
        (8, 9, None, 40),  # only reading it: what the prompt adds to a forward
        (9, 9, 8, 10),  # one new token
        (9, 5, 8, 14),  # one new token, but five places to judge
        (12, 12, 8, 13),  # three tokens that other servers verified, and one more
        (12, 13, 8, 4),  # catching up with them, nothing asked
        (8, 9, 8, 0),  # nothing new and nothing asked
        (1, 1, 0, 10),  # an empty prompt, read before
    ],
)
def test_a_forward_takes_as_long_as_what_is_new(length: int, start: int, kept: int | None, expected: int) -> None:
    assert LATENCY.forward(ForwardRequest([0] * length, start, kept)) == expected


def test_without_a_ttft_the_first_forward_is_like_any_other() -> None:
    assert Latency(tpot=10).forward(ForwardRequest([0] * 8, 8)) == 10
    assert Latency(tpot=10).forward(ForwardRequest([0] * 8, 9)) == 0


def test_fractions_stay_exact() -> None:
    meter = WaitRecorder()
    Wait(ToyTarget(), Latency(Fraction(1, 7))).answer(ForwardRequest([1], 1, cancelled=meter))
    assert meter.read() == Fraction(1, 7)


def test_waiting_changes_no_answer() -> None:
    request = ForwardRequest([1, 2, 3], 1, cancelled=WaitRecorder())
    assert Wait(ToyTarget(3), LATENCY).answer(request) == ToyTarget(3).answer(request)


def test_jitter_spreads_evenly_to_either_side() -> None:
    meter, model = WaitRecorder(), Wait(ToyTarget(), Latency(tpot=10.0, jitter=0.2), seed=1)
    times = []
    for _ in range(500):
        model.answer(ForwardRequest([1], 1, cancelled=meter))
        times.append(meter.read())
    assert 8 <= min(times) < 8.2
    assert 11.8 < max(times) <= 12
    assert sum(times) / 500 == pytest.approx(10, abs=0.3)


def test_an_unwanted_answer_is_not_given() -> None:
    class Gone(WaitRecorder):
        def wait(self, timeout: object) -> bool:  # noqa: ARG002
            return True

    with pytest.raises(Cancelled):
        Wait(ToyTarget(), LATENCY).answer(ForwardRequest([1], 1, cancelled=Gone()))


@pytest.mark.parametrize(
    "numbers",
    [
        {"tpot": 0},
        {"tpot": -1},
        {"tpot": float("nan")},
        {"tpot": 10, "ttft": 5},
        {"tpot": 10, "per_token": -1},
        {"tpot": 10, "jitter": 1},
    ],
)
def test_impossible_latencies_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Latency(**numbers)
