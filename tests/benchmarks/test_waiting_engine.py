"""The engine that waits: the text of a toy model, after the time of a forward."""

import time
from collections.abc import Iterator

import httpx
import pytest

from attackers import connect, head, send_raw
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget
from waiting_engine import WaitingEngine

PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def engine() -> Iterator[WaitingEngine]:
    with WaitingEngine(forward_ms=30, network_ms=5) as engine:
        yield engine


def test_waiting_engine_verifies_in_one_forward(engine: WaitingEngine) -> None:
    with httpx.Client(base_url=engine.url) as client:
        assert client.get("/v1/models").json()["data"][0]["owned_by"] == "dsi"
        began = time.perf_counter()
        answer = client.post("/v1/verify", json={"prompt": PROMPT, "num_positions": 3, "seed": 7}).json()
        assert time.perf_counter() - began >= 0.039
    assert answer["tokens"] == list(ToyTarget(7).answer(ForwardRequest(PROMPT, 2)))


def test_waiting_engine_streams_a_token_after_each_forward(engine: WaitingEngine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": 7, "stream": True}
    began = time.perf_counter()
    lines = httpx.post(engine.url + "/v1/completions", json=body).text.splitlines()
    assert time.perf_counter() - began >= 0.098
    assert len([line for line in lines if line.startswith("data: {")]) == 3


def test_waiting_engine_answers_while_others_leave(engine: WaitingEngine) -> None:
    body = b'{"prompt": [1, 2], "num_positions": 1, "seed": 7}'
    request = head("POST /v1/verify", f"Content-Length: {len(body)}") + body
    for _ in range(3):
        with connect(engine.url) as connection:
            connection.sendall(request)
    assert send_raw(engine.url, request).status == 200
