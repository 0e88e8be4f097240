from fractions import Fraction
from typing import Any

import pytest

from dsi.fleets.simulated import WaitRecorder
from dsi.models.protocol import Cancelled, ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait

LATENCY = Latency(tpot=10, ttft=50, per_token=1)


@pytest.mark.parametrize(
    ("length", "start", "num_cached", "expected"),
    [
        (8, 8, None, 50),  # a new prompt: the ttft
        (8, 9, None, 40),  # prefill only
        (9, 9, 8, 10),  # one new token
        (9, 5, 8, 14),  # one new token, but five positions to verify
        (12, 12, 8, 13),  # three tokens that other servers verified, and one more
        (12, 13, 8, 4),  # prefilling them only
        (8, 9, 8, 0),  # nothing new and no position
        (1, 1, 0, 10),  # an empty prompt, already cached
    ],
)
def test_latency_forward_depends_on_new_tokens(length: int, start: int, num_cached: int | None, expected: int) -> None:
    assert LATENCY.forward(ForwardRequest([0] * length, start, num_cached)) == expected


def test_latency_without_ttft_has_no_prefill() -> None:
    assert Latency(tpot=10).forward(ForwardRequest([0] * 8, 8)) == 10
    assert Latency(tpot=10).forward(ForwardRequest([0] * 8, 9)) == 0


def test_wait_keeps_fractions_exact() -> None:
    recorder = WaitRecorder()
    Wait(ToyTarget(), Latency(Fraction(1, 7))).answer(ForwardRequest([1], 1, cancelled=recorder))
    assert recorder.read() == Fraction(1, 7)


def test_wait_keeps_the_answer() -> None:
    request = ForwardRequest([1, 2, 3], 1, cancelled=WaitRecorder())
    assert Wait(ToyTarget(3), LATENCY).answer(request) == ToyTarget(3).answer(request)


def test_wait_jitter_is_uniform() -> None:
    recorder, model = WaitRecorder(), Wait(ToyTarget(), Latency(tpot=10.0, jitter=0.2), seed=1)
    times = []
    for _ in range(500):
        model.answer(ForwardRequest([1], 1, cancelled=recorder))
        times.append(recorder.read())
    assert 8 <= min(times) < 8.2
    assert 11.8 < max(times) <= 12
    assert sum(times) / 500 == pytest.approx(10, abs=0.3)


def test_wait_raises_when_cancelled() -> None:
    class Cancel(WaitRecorder):
        def wait(self, timeout: object) -> bool:  # noqa: ARG002
            return True

    with pytest.raises(Cancelled):
        Wait(ToyTarget(), LATENCY).answer(ForwardRequest([1], 1, cancelled=Cancel()))


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
def test_latency_refuses_impossible_values(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Latency(**numbers)
