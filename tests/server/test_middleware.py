"""The middleware and the connections alone, around an application that does little: time limits, and failures."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from attackers import check_refused, connect, head, is_closed, read_response, send_raw, until
from dsi.server.app import make_app
from dsi.server.auth import read_keys
from dsi.server.limits import Limits
from dsi.server.middleware import LimitsMiddleware
from dsi.server.run import uvicorn_config
from dsi.server.sockets import listen

LIMITS = Limits(receive_seconds=1, send_seconds=1, connections=4, body_bytes=1 << 16)
SHORT = replace(LIMITS)
object.__setattr__(SHORT, "receive_seconds", 0.4)  # less than a server may have, so that tests wait less
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve an application until the end of the test; returns its address."""
    running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(app: ASGIApp, limits: Limits = LIMITS) -> str:
        listener, server = listen("127.0.0.1", 0), uvicorn.Server(uvicorn_config(app, limits))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running.append((server, thread, listener))
        assert until(lambda: server.started)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread, listener in running:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


async def send_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Send as many bytes as the path says, in chunks of 64 KiB."""
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


def limited(limits: Limits = LIMITS, **options: Any) -> ASGIApp:
    return LimitsMiddleware(send_bytes, limits, **options)


@pytest.mark.parametrize("method", ["POST", "GET", "HEAD"])
@pytest.mark.parametrize("length", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_middleware_times_out_a_slow_body(serve: Serve, method: str, length: str) -> None:
    with connect(serve(limited(SHORT), SHORT)) as connection:
        connection.sendall(head(f"{method} /", length))
        stop = trickle(connection, b"1\r\na\r\n" if "chunked" in length else b"a")
        try:
            answer = read_response(connection) if method != "HEAD" else None
            assert is_closed(connection)
        finally:
            stop()
        assert answer is None or check_refused(answer, 408)


def trickle(connection: socket.socket, piece: bytes) -> Callable[[], None]:
    """Send a little now and then until stopped or disconnected; never as much as announced."""
    stopped = threading.Event()

    def send() -> None:
        while not stopped.wait(0.1):
            try:
                connection.send(piece)
            except OSError:
                return

    thread = threading.Thread(target=send)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


@pytest.mark.parametrize("begins", [b"", b"G", b"GET / HTTP/1.1\r\n", b"\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nG"])
def test_connection_times_out_an_incomplete_head(serve: Serve, begins: bytes) -> None:
    """The last case follows a complete request on the same connection."""
    with connect(serve(limited(SHORT), SHORT)) as connection:
        connection.sendall(begins)
        stop = trickle(connection, b"a" if begins else b"")
        assert is_closed(connection)
        stop()


def test_middleware_closes_a_refused_connection(serve: Serve) -> None:
    with connect(serve(limited(keys=["secret"]))) as connection:
        connection.sendall(head("POST /v1/completions", "Content-Length: 60000"))
        check_refused(read_response(connection), 401)
        assert is_closed(connection)


@pytest.mark.parametrize("requests", [head(f"GET /{1 << 26}"), head(f"GET /{1 << 17}") * 100], ids=["one", "many"])
def test_connection_closes_when_the_response_is_not_read(serve: Serve, requests: bytes) -> None:
    """Else the connection and its response would stay for ever."""
    url = serve(limited(), Limits(send_seconds=1, connections=1))
    with connect(url) as connection:
        connection.sendall(requests)
        time.sleep(0.3)
        assert not answers(url)  # there is room for one
        assert until(lambda: answers(url))


def answers(url: str) -> bool:
    try:
        return send_raw(url, head("GET /", "Connection: close")).status == 200
    except OSError:
        return False


def test_connection_limit_evicts_the_longest_idle(serve: Serve) -> None:
    url = serve(limited(), Limits(connections=4))
    slow = [connect(url) for _ in range(6)]
    try:
        for connection in slow:
            connection.send(b"G")
        assert answers(url)
        assert is_closed(slow[0])
    finally:
        for connection in slow:
            connection.close()


def test_connection_sends_small_responses_without_delay(serve: Serve) -> None:
    """Head and body are two writes; with Nagle's algorithm the second would wait for an ACK of the first."""
    with connect(serve(limited())) as connection:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            connection.sendall(head("GET /"))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(65536)
            times.append(time.perf_counter() - began)
    assert min(times[5:]) < 0.03  # it would be 40 ms


def test_internal_error_hides_its_cause_and_logs_it(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dsi.server"), "propagate", True)
    broken = MagicMock()  # which can do nothing
    broken.deployment.max_running = None
    app, _ = make_app(broken, "broken", Limits(shutdown_seconds=1))
    body = b'{"prompt": "a"}'
    length, kind = f"Content-Length: {len(body)}", "Content-Type: application/json"
    answer = send_raw(serve(app), head("POST /v1/completions", length, kind, "Connection: close") + body)
    assert check_refused(answer, 500)["code"] == "internal_error"
    assert until(lambda: any(record.exc_info for record in caplog.records))


def test_middleware_answers_a_failing_application(serve: Serve) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await send_bytes(scope, receive, send)
        raise RuntimeError("a secret in /src/dsi/somewhere.py")

    check_refused(send_raw(serve(LimitsMiddleware(broken, LIMITS)), head("GET /")), 500)


def test_middleware_answers_a_request_cancelled_by_shutdown() -> None:
    sent: list[Any] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def request() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        task = asyncio.create_task(LimitsMiddleware(endless, LIMITS)(scope, receive, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(request())
    assert sent[0]["status"] == 503
    assert b"shutting_down" in sent[1]["body"]


def test_read_keys_refuses_an_empty_list(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# none\n\n")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(tmp_path / "keys")
    monkeypatch.setenv("DSI_API_KEYS", " , ")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(None)
    monkeypatch.setenv("DSI_API_KEYS", "")
    assert read_keys(None) == []


def test_middleware_accepts_a_key_beyond_ascii(serve: Serve) -> None:
    url = serve(limited(keys=["schlüssel"]))
    request = head("GET /v1/0", "Authorization: Bearer schlüssel", "Connection: close")
    assert send_raw(url, request).status != 401
