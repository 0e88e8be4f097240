"""The guard and the sockets alone, before an application that does little: time limits, and failures."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from attackers import ask, dial, head, is_closed, read, refused, until
from dsi.server.app import make_app
from dsi.server.auth import listen, read_keys
from dsi.server.limits import Limits
from dsi.server.middleware import LimitsMiddleware
from dsi.server.run import configured

LIMITS = Limits(arrival_seconds=1, taking_seconds=1, connections=4, body_bytes=1 << 16)
Begin = Callable[..., str]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Serve an application until the test is over; gives its address."""
    running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(app: ASGIApp, limits: Limits = LIMITS) -> str:
        found, server = listen("127.0.0.1", 0), uvicorn.Server(configured(app, limits))
        thread = threading.Thread(target=server.run, args=([found],))
        thread.start()
        running.append((server, thread, found))
        assert until(lambda: server.started)
        return f"http://127.0.0.1:{found.getsockname()[1]}"

    yield start
    for server, thread, found in running:
        server.should_exit = server.force_exit = True
        thread.join(20)
        found.close()
        assert not thread.is_alive()


async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
    """Says as many bytes as the path tells it to."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(int(scope["path"].rpartition("/")[2] or 0) >> 16):
        await send({"type": "http.response.body", "body": b"." * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b"."})


def guarded(**options: Any) -> ASGIApp:
    return LimitsMiddleware(quiet, LIMITS, **options)


@pytest.mark.parametrize("method", ["POST", "GET", "HEAD"])
@pytest.mark.parametrize("length", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_trickles_is_given_up(begin: Begin, method: str, length: str) -> None:
    with dial(begin(guarded())) as connection:
        connection.sendall(head(f"{method} /", length))
        stop = trickle(connection, b"1\r\na\r\n" if "chunked" in length else b"a")
        try:
            answer = read(connection) if method != "HEAD" else None
            assert is_closed(connection)
        finally:
            stop()
        assert answer is None or refused(answer, 408)


def trickle(connection: socket.socket, piece: bytes) -> Callable[[], None]:
    """A little now and then, until it is stopped or nobody listens; never as much as was promised."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.1):
            try:
                connection.send(piece)
            except OSError:
                return

    thread = threading.Thread(target=send)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


@pytest.mark.parametrize("begins", [b"", b"G", b"GET / HTTP/1.1\r\n", b"\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nG"])
def test_a_head_that_does_not_end_is_given_up(begin: Begin, begins: bytes) -> None:
    """The last one has been a good client once."""
    with dial(begin(guarded())) as connection:
        connection.sendall(begins)
        stop = trickle(connection, b"a" if begins else b"")
        assert is_closed(connection)
        stop()


def test_who_is_refused_cannot_go_on_sending(begin: Begin) -> None:
    with dial(begin(guarded(keys=["secret"]))) as connection:
        connection.sendall(head("POST /v1/completions", "Content-Length: 60000"))
        refused(read(connection), 401)
        assert is_closed(connection)


@pytest.mark.parametrize("requests", [head(f"GET /{1 << 26}"), head(f"GET /{1 << 17}") * 100], ids=["one", "many"])
def test_who_does_not_listen_is_cut_off(begin: Begin, requests: bytes) -> None:
    """Else its connection and its answer would be kept for ever."""
    url = begin(guarded(), Limits(taking_seconds=1, connections=1))
    with dial(url) as deaf:
        deaf.sendall(requests)
        time.sleep(0.3)
        assert not answers(url)  # there is room for one
        assert until(lambda: answers(url))


def answers(url: str) -> bool:
    try:
        return ask(url, head("GET /", "Connection: close")).status == 200
    except OSError:
        return False


def test_a_full_house_makes_room_for_who_says_what_he_wants(begin: Begin) -> None:
    url = begin(guarded(), Limits(connections=4))
    slow = [dial(url) for _ in range(6)]
    try:
        for each in slow:
            each.send(b"G")
        assert answers(url)
        assert is_closed(slow[0])
    finally:
        for each in slow:
            each.close()


def test_a_small_answer_does_not_wait_for_the_next(begin: Begin) -> None:
    """Its head and body are two pieces, and the second must not wait until the first is known to be there."""
    with dial(begin(guarded())) as connection:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            connection.sendall(head("GET /"))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(65536)
            times.append(time.perf_counter() - began)
    assert min(times[5:]) < 0.03  # it would be 40 ms


def test_a_failure_is_told_without_its_cause_and_the_log_has_it(
    begin: Begin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dsi.serve"), "propagate", True)
    app, _ = make_app(MagicMock(), "broken", Limits(shutdown_seconds=1))  # which can do nothing
    body = b'{"prompt": "a"}'
    length, kind = f"Content-Length: {len(body)}", "Content-Type: application/json"
    answer = ask(begin(app), head("POST /v1/completions", length, kind, "Connection: close") + body)
    assert refused(answer, 500)["code"] == "internal_error"
    assert until(lambda: any(record.exc_info for record in caplog.records))


def test_a_failure_before_the_application_is_told_as_well(begin: Begin) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await quiet(scope, receive, send)
        raise RuntimeError("a secret in /src/dsi/somewhere.py")

    refused(ask(begin(LimitsMiddleware(broken, LIMITS)), head("GET /")), 500)


def test_an_answer_that_is_still_not_there_at_the_very_end_is_an_error_object() -> None:
    sent: list[Any] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def visit() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        task = asyncio.create_task(LimitsMiddleware(endless, LIMITS)(scope, receive, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(visit())
    assert sent[0]["status"] == 503
    assert b"shutting_down" in sent[1]["body"]


def test_a_list_of_keys_without_a_key_is_refused_rather_than_open_to_all(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("# none\n\n")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(tmp_path / "keys")
    monkeypatch.setenv("DSI_API_KEYS", " , ")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(None)
    monkeypatch.setenv("DSI_API_KEYS", "")
    assert read_keys(None) == []


def test_a_key_need_not_be_ascii(begin: Begin) -> None:
    url = begin(guarded(keys=["schlüssel"]))
    request = head("GET /v1/0", "Authorization: Bearer schlüssel", "Connection: close")
    assert ask(url, request).status != 401
