"""Workers of a running server that are killed, stopped, and killed again and again."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from live_server import Live, Serving

ALGORITHMS = ("nonsi", "si", "pearl", "dsi", "auto")
LIMIT = 20.0  # seconds for a text with a fault; it takes less than a second without


@pytest.fixture
def live(serving: Serving) -> Live:
    return serving("--sp", "2")


def text(live: Live, algorithm: str, tokens: int = 120) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "algorithm": algorithm}
    answer = live.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def text_once_accepted(live: Live, algorithm: str) -> str:
    """The same for a request that may come while no target is up, and is refused until one is."""
    until(lambda: live.get("/health").status_code == 200)
    try:
        return text(live, algorithm)
    except AssertionError as refusal:
        if "no_target" not in str(refusal):
            raise
        return text_once_accepted(live, algorithm)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def events(live: Live, cause: str) -> list[dict[str, object]]:
    documents = [json.loads(line) for line in list(live.log) if line.startswith("{")]
    return [document for document in documents if document.get("cause") == cause]


def test_server_goes_on_without_a_stopped_worker(live: Live) -> None:
    expected = text(live, "nonsi")
    for algorithm, server in (("dsi", "drafter"), ("pearl", "drafter"), ("pearl", "target")):
        for worker in live.workers(server):
            os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        assert text(live, algorithm) == expected
        assert time.monotonic() - began < LIMIT
    # A text can end before the silence of a server has lasted long enough to be noticed.
    until(lambda: live.get("/health").json()["servers"][0]["deaths"].get("hung", 0) >= 1)
    until(lambda: live.metric("dsi:server_deaths_total") == live.metric("dsi:server_restarts_total") >= 2)
    reports = events(live, "hung")
    assert {report["server"] for report in reports} >= {"drafter", "target-1"}
    assert all("silent at work for " in str(report["event"]) for report in reports)


def test_server_recovers_from_a_crash_loop(live: Live) -> None:
    expected = text(live, "nonsi")
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(text_once_accepted, live, algorithm) for algorithm in ALGORITHMS]
        statuses = set()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for pid in live.workers(""):
                os.kill(pid, signal.SIGKILL)
            statuses.add(live.get("/health").status_code)
        assert [done.result(LIMIT) for done in running] == [expected] * len(ALGORITHMS)
    until(lambda: live.get("/health").status_code == 200)
    assert 503 in statuses
    assert text(live, "dsi") == expected
    assert {report["event"] for report in events(live, "died")} >= {"server target-1: killed by SIGKILL"}


def test_server_notices_deaths_while_it_is_idle(live: Live) -> None:
    for _ in range(2):  # the second time after a pause
        [pid] = live.workers("target-1")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pid not in live.children)  # type: ignore[misc]
        until(lambda: bool(live.workers("target-1")))
    until(lambda: live.metric('dsi:server_restarts_total{role="target",server="target-1"}') == 2)
