"""Attacks on a real server: each is refused with an error object, and the next client is served."""

import json
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from attackers import (
    Answer,
    check_refused,
    connect,
    head,
    is_closed,
    is_running,
    memory_bytes,
    num_requests,
    read_response,
    send_raw,
    until,
)
from dsi.server.schema import ChatBody, CompletionBody
from live_server import Live, Serving, start

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT, VERIFY = "/v1/completions", "/v1/chat/completions", "/v1/verify"
JSON, CONTENT = {"content-type": "application/json"}, "Content-Type: application/json"
BODY_BYTES, HEAD_BYTES = 1 << 20, 1 << 14
KEYS = ("one-secret-of-the-file", "two-secret-of-the-file")
ENV_KEY = "secret-of-the-environment"


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    """Afterwards the server must still generate text."""
    with httpx.Client(base_url=live.url, timeout=30, headers=JSON) as client:
        yield client
        assert client.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 2}).status_code == 200


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with API keys, room for one running and one waiting text, and few connections."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# two of them\n" + "\n".join(KEYS) + "\n")
    limits = ("--max-running", "1", "--max-waiting", "1", "--max-connections", "64")
    server = start("--api-key-file", str(path), *limits)
    yield server
    server.kill()


# Bodies.


def test_body_with_too_large_a_length_is_refused_before_it_arrives(live: Live) -> None:
    with connect(live.url) as connection:
        connection.sendall(head(f"POST {COMPLETIONS}", f"Content-Length: {10**15}"))
        check_refused(read_response(connection), 413)
        assert is_closed(connection)


def test_body_that_grows_too_large_is_refused(live: Live) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (BODY_BYTES // 16)

    check_refused(httpx.post(live.url + COMPLETIONS, content=pieces(), headers=JSON, timeout=30), 413)
    check_refused(httpx.post(live.url + COMPLETIONS, content=b" " * (4 * BODY_BYTES), headers=JSON, timeout=30), 413)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "a", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xff"}]}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff\\ud800"}]}',
        b'{"prompt": "a", "messages": [{"role": "\\ud800", "content": "\\ud800"}], "stop": [0, "\\ud800"]}',
        b'{"prompt": "a", "messages": [], "logit_bias": {"\\ud800": "x"}}',
        b"\x00" * 1000,
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "n": -' + b"9" * 400 + b"}",
        b"{",
        b"",
        b"null",
        b"NaN",
        b"[]",
        b'"prompt"',
        b'{"prompt": "a", "prompt": null}',
        b"prompt=a&max_tokens=1",
    ],
    ids=lambda body: repr(body[:24]) if isinstance(body, bytes) else None,
)
def test_body_that_cannot_be_parsed_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    check_refused(client.post(path, content=body), 400)


def test_body_of_another_media_type_is_refused(client: httpx.Client) -> None:
    """Else a page from another origin could send one without a CORS preflight."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        check_refused(client.post(COMPLETIONS, content=body, headers={"content-type": kind}), 400)


# fmt: off
ABSURD = [
    *("NaN", "Infinity", "-Infinity", "1e400", "1e308", "5e-324", "-5e-324", "0.5", "-0.0", "0", "-1"),
    *(str(number) for number in (2**31 - 1, 2**63 - 1, 2**63, -(2**63), 10**400, -(10**400))),
    *("null", "true", '"1"', '"x"', '"\\u0000"', "[]", "[[]]", "[null]", "{}", '{"type": []}'),
]
# fmt: on
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "lookahead", "logprobs")  # seen by the servers


@pytest.mark.parametrize("field", CompletionBody.model_fields)
def test_completion_field_with_an_absurd_value_is_answered_or_refused(client: httpx.Client, field: str) -> None:
    check_absurd(client, COMPLETIONS, field, prompt="a", max_tokens=1 if field in SAMPLING else 0, seed=1)


@pytest.mark.parametrize("field", [f for f in ChatBody.model_fields if f not in CompletionBody.model_fields])
def test_chat_field_with_an_absurd_value_is_answered_or_refused(client: httpx.Client, field: str) -> None:
    check_absurd(client, CHAT, field, messages=[{"role": "user", "content": "a"}], max_tokens=0)


def check_absurd(client: httpx.Client, path: str, field: str, **sound: object) -> None:
    rest = json.dumps({name: value for name, value in sound.items() if name != field})
    for value in ABSURD:
        body = f'{{"{field}": {value}, {rest[1:]}'
        answer = client.post(path, content=body)
        if answer.status_code != 200:
            check_refused(answer, 400, 404, 424)
            assert answer.status_code != 424 or field == "timeout", body


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [""] * 65,
        [[1], []],
        [["a"]],
        [1, "a"],
        ["a", [1]],
        [None],
        [True],
        [-1],
        [4096],
        [2**31],
        [2**64],
        [1.5],
        {},
        1,
        None,
        "a" * (BODY_BYTES - 100),
        [1] * 1000,
        [[1]] * 1000,
        "\ud800",
    ],
    ids=lambda prompt: repr(prompt)[:24],
)
def test_prompt_of_a_wrong_kind_is_refused(client: httpx.Client, prompt: object) -> None:
    check_refused(client.post(COMPLETIONS, content=json.dumps({"prompt": prompt, "max_tokens": 1})), 400)


def test_stop_strings_are_limited_and_odd_ones_accepted(client: httpx.Client) -> None:
    for stop in ("x" * 16_000, ["x"] * 16_000, ["x" * 1001], [1], [None], {"a": "b"}):
        check_refused(client.post(COMPLETIONS, json={"prompt": "a", "stop": stop, "max_tokens": 1}), 400)
    for stop in ("", [], [""], "\0", "\ud800", ["x" * 1000] * 16):
        content = json.dumps({"prompt": "a\0b", "stop": stop, "max_tokens": 3})
        assert client.post(COMPLETIONS, content=content).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"prompt": [' + b'"a",' * 250_000 + b'"a"]}'),
        (COMPLETIONS, b'{"prompt": "a", "stop": [' + b"0," * 500_000 + b"0]}"),
        (CHAT, b'{"messages": [' + b"0," * 500_000 + b"0]}"),
        (CHAT, b'{"messages": [{"role": "a", "content": [' + b"0," * 500_000 + b"0]}]}"),
        (CHAT, b'{"messages": [' + (b'{"role":"a","content":[' + b"0," * 100 + b"0]},") * 4000 + b"0]}"),
        (CHAT, b'{"messages": [' + b'{"role":"a","content":""},' * 40_000 + b'{"role":"a","content":""}]}'),
    ],
    ids=["prompts", "stops", "messages", "parts", "messages of parts", "empty messages"],
)
def test_validation_ends_at_the_first_error(client: httpx.Client, path: str, body: bytes) -> None:
    assert len(body) < BODY_BYTES + 1000
    began = time.monotonic()
    check_refused(client.post(path, content=body[:BODY_BYTES]), 400)
    assert time.monotonic() - began < 2  # four seconds if all errors are collected


# Heads.


@pytest.mark.parametrize(
    "pieces",
    [
        [head("GET /health", *(f"X-{i}: a" for i in range(5000)))],
        [head("GET /health", "X: " + "a" * 100_000)],
        [head("GET /" + "a" * 100_000)],
        [head("GET /health?" + "a" * 20_000)],
        [head("GET /health", "Cookie: " + "a" * 4000, "X: " + "b" * HEAD_BYTES)],
    ],
    ids=["many headers", "a giant header", "a giant path", "a giant query", "two headers"],
)
def test_head_too_large_is_refused(live: Live, pieces: list[bytes]) -> None:
    check_refused(send_raw(live.url, *pieces), 400, 431)


def test_head_without_end_closes_the_connection(live: Live) -> None:
    with connect(live.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"a" * (64 << 20))
        assert is_closed(connection)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    ],
    ids=lambda data: repr(data[-24:]),
)
def test_connection_answers_invalid_http_with_an_error_object(live: Live, data: bytes) -> None:
    with connect(live.url) as connection:
        connection.sendall(data)
        check_refused(read_response(connection), 400)
        assert is_closed(connection)


def test_body_with_length_and_chunks_is_refused_against_smuggling(live: Live) -> None:
    """A proxy could read it otherwise than we do, and hide a second request in the first."""
    hidden = head("GET /v1/models")
    request = head(f"POST {COMPLETIONS}", "Content-Length: 4", "Transfer-Encoding: chunked", CONTENT)
    with connect(live.url) as connection:
        connection.sendall(request + b"0\r\n\r\n" + hidden)
        check_refused(read_response(connection), 400)
        assert is_closed(connection)


def test_connection_answers_pipelined_requests_in_order(live: Live) -> None:
    paths = ["/version", "/nowhere", "/v1/models", "/page/nothing"] * 5
    with connect(live.url) as connection:
        connection.sendall(b"".join(head(f"GET {path}") for path in paths))
        answers = [read_one(connection) for _ in paths]
    assert [answer.status for answer in answers] == [200, 404, 200, 404] * 5


def read_one(connection: socket.socket) -> Answer:
    """Read one response and not a byte more: the next may have arrived already."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += connection.recv(1)
    lines = data.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return Answer(int(lines[0].split()[1]), headers, body)


# Host names and paths.


@pytest.mark.parametrize(
    "path",
    [
        "/page/..%2f..%2frun.py",
        "/page/../run.py",
        "/page/%2e%2e/run.py",
        "/page//etc/passwd",
        "/page/..\\run.py",
        "/page/%2fetc%2fpasswd",
        "/page/.",
        "/page/..",
        "/page/",
        "/page/index.html%00.css",
        "/page/%ff",
        "/page/__init__.py",
        "/../../etc/passwd",
        "//etc/passwd",
        "/docs",
        "/redoc",
        "/v1/models/%ff%00",
        "/v1/traces/..%2f..%2fetc%2fpasswd",
        "/v1/completions/",
        "/v1/models/../models",
        "http://elsewhere/",
    ],
)
def test_page_serves_no_other_file(live: Live, path: str) -> None:
    check_refused(send_raw(live.url, head(f"GET {path}", "Connection: close")), 404, 405)


def test_method_not_allowed_is_an_error_object(live: Live) -> None:
    for method, path in (("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("POST", "/"), ("BREW", "/health")):
        answer = send_raw(live.url, head(f"{method} {path}", "Connection: close"))
        check_refused(answer, 405)
        assert answer.headers["allow"]
    check_refused(send_raw(live.url, head("CONNECT elsewhere:443", "Connection: close")), 404, 405)
    check_refused(send_raw(live.url, head("OPTIONS *", "Connection: close")), 404, 405)


@pytest.mark.parametrize(
    "host",
    ["elsewhere.example", "127.0.0.1.elsewhere.example", "localhost@elsewhere", "", "[::2]", "8.8.8.8"],
)
def test_loopback_server_refuses_other_host_names(live: Live, host: str) -> None:
    for path in ("/", "/v1/models"):
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        check_refused(send_raw(live.url, request.encode()), 400)
    assert send_raw(live.url, b"GET / HTTP/1.1\r\nHost: LOCALHOST:1\r\nConnection: close\r\n\r\n").status == 200


def test_responses_have_security_headers(client: httpx.Client) -> None:
    for path in ("/", "/v1/models", "/health", "/metrics", "/nowhere", "/openapi.json"):
        headers = client.get(path, headers={"origin": "http://elsewhere.example"}).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


# Keys.


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEYS[0]},
        {"authorization": "Bearer"},
        bearer("wrong"),
        bearer(KEYS[0] + "x"),
        bearer(KEYS[0][:-1]),
        bearer(",".join(KEYS)),
        {"x-api-key": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        bearer("# two of them"),
    ],
)
def test_api_key_is_required(locked: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/nowhere", "/v1/traces/1"):
        answer = httpx.get(locked.url + path, headers=headers)
        assert check_refused(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    check_refused(httpx.post(locked.url + COMPLETIONS, json={"prompt": "a"}, headers=headers), 401)


def test_api_key_is_accepted_and_never_shown(locked: Live) -> None:
    answers = []
    for key in (*KEYS, KEYS[0] + "x"):
        with httpx.Client(base_url=locked.url, headers=bearer(key), timeout=30) as client:
            answers += [
                client.get("/v1/models"),
                client.get(f"/v1/models?api_key={key}"),
                client.get("/metrics"),
            ]
            answers.append(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}))
            answers.append(client.post(COMPLETIONS, json={"prompt": []}))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400] * 2 + [
        401,
        401,
        200,
        401,
        401,
    ]
    shown = "".join(answer.text + str(answer.headers) for answer in answers)
    assert until(lambda: sum('"answered"' in line for line in locked.log) >= len(answers))
    for key in KEYS:
        assert key not in shown
        assert key not in "".join(locked.log)


def test_trace_is_read_with_the_key_of_its_request_only(locked: Live) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    done = httpx.post(locked.url + COMPLETIONS, json=body, headers=bearer(KEYS[1]), timeout=30).json()
    own, other = (httpx.get(f"{locked.url}/v1/traces/{done['id']}", headers=bearer(key)) for key in reversed(KEYS))
    assert own.json()["traceEvents"]
    check_refused(other, 404)


# Overload.


def long_request(server: Live, **fields: object) -> dict[str, Any]:
    """A request for a long text that the drafter predicts badly."""
    body = {"prompt": "Once", "max_tokens": 500, "temperature": 100, "seed": 1, "stream": True, **fields}
    return {"url": server.url + COMPLETIONS, "json": body, "headers": bearer(KEYS[0]), "timeout": 60}


def test_queue_full_answers_429_with_retry_after(locked: Live) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(httpx.stream("POST", **long_request(locked)))
            assert stream.status_code == 200
        answer = httpx.post(**long_request(locked))
        assert check_refused(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert until(lambda: httpx.post(**long_request(locked, max_tokens=1)).status_code == 200)


def test_queue_advances_when_a_client_disconnects(locked: Live) -> None:
    """With room for one text, the next one is served only if the first has ended."""
    for stream in (True, False):
        for _ in range(5):
            with connect(locked.url) as connection:
                body = json.dumps(long_request(locked, stream=stream)["json"]).encode()
                length, key = f"Content-Length: {len(body)}", f"Authorization: Bearer {KEYS[1]}"
                connection.sendall(head(f"POST {COMPLETIONS}", CONTENT, length, key) + body)
                assert until(lambda: num_requests(locked.url) == 1)
            assert until(lambda: num_requests(locked.url) == 0)  # an earlier request may be refused
    began = time.monotonic()
    assert httpx.post(**long_request(locked, stream=False, max_tokens=1)).status_code == 200
    assert time.monotonic() - began < 5


def test_verify_needs_a_key_and_leaves_the_queue_when_the_client_disconnects(locked: Live) -> None:
    content = b'{"prompt": [5, 6, 7], "num_positions": 2}'
    assert check_refused(httpx.post(locked.url + VERIFY, content=content, headers=JSON), 401)
    key, length = f"Authorization: Bearer {KEYS[0]}", f"Content-Length: {len(content)}"
    request = head(f"POST {VERIFY}", CONTENT, length, key) + content
    with httpx.stream("POST", **long_request(locked)):
        with connect(locked.url) as connection:
            connection.sendall(request)
            assert until(lambda: num_requests(locked.url, "waiting") == 1)
            assert check_refused(send_raw(locked.url, request), 429)["code"] == "queue_full"
        assert until(lambda: num_requests(locked.url, "waiting") == 0)
    assert until(lambda: num_requests(locked.url) == 0)
    assert locked.metric('dsi:requests_total{endpoint="verify",outcome="disconnected"}') == 1
    assert len(json.loads(send_raw(locked.url, request).body)["tokens"]) == 2


def test_deadline_ends_responses_with_an_error_object(locked: Live) -> None:
    answer = httpx.post(**long_request(locked, stream=False, timeout=0.2))
    assert check_refused(answer, 424)["code"] == "deadline_exceeded"
    with httpx.stream("POST", **long_request(locked, timeout=0.2)) as stream:
        assert stream.status_code == 200
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "[DONE]"
    assert until(lambda: num_requests(locked.url) == 0)


def open_files(wanted: int) -> int:
    """Raise the limit on open files; returns how many of those wanted it allows."""
    spare = 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + spare:
        soft = wanted + spare if hard == resource.RLIM_INFINITY else min(hard, wanted + spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft - spare)


def test_connection_limit_admits_others_beside_slow_clients(locked: Live) -> None:
    """Each sends one byte and waits; the limit is 64 connections."""
    before, files = memory_bytes(locked.process.pid), Path(f"/proc/{locked.process.pid}/fd")
    with ExitStack() as stack:
        for i in range(open_files(2000)):
            slow = stack.enter_context(connect(locked.url))
            slow.setblocking(False)
            slow.send(b"G" if i % 2 else head(f"POST {COMPLETIONS}", "Content-Length: 9") + b"{")
            if i % 500 == 499:
                began = time.monotonic()
                assert httpx.post(**long_request(locked, stream=False, max_tokens=2)).status_code == 200
                assert time.monotonic() - began < 10
        assert len(list(files.iterdir())) < 64 + 64
        assert memory_bytes(locked.process.pid) - before < 64 << 20
    assert httpx.post(**long_request(locked, stream=False, max_tokens=2)).status_code == 200


# Shutdown.


def test_shutdown_ends_streams_with_an_error_and_all_processes(serving: Serving) -> None:
    server = serving("--shutdown-timeout", "1", "--max-running", "8", env={"DSI_API_KEYS": f" {ENV_KEY}, other,"})
    check_refused(httpx.get(server.url + "/v1/models"), 401)
    children = server.children
    assert len(children) >= 2

    url = server.url + COMPLETIONS

    def read_events() -> list[str]:
        body = {"prompt": "Once", "max_tokens": 500, "temperature": 100, "n": 4, "stream": True}
        with httpx.stream("POST", url, json=body, headers=bearer(ENV_KEY), timeout=60) as stream:
            return [line.removeprefix("data: ") for line in stream.iter_lines() if line]

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(read_events) for _ in range(4)]
        assert until(
            lambda: num_requests(server.url) == 8 and num_requests(server.url, "waiting") > 4
        )  # all requests have arrived
        assert server.stop() == 0
        ends = [stream.result() for stream in streams]
    assert all(events[-1] == "[DONE]" for events in ends)
    errors = [error for events in ends if (error := json.loads(events[-2]).get("error"))]
    assert errors
    assert {error["code"] for error in errors} == {"shutting_down"}
    assert until(lambda: not any(map(is_running, children)))
    assert ENV_KEY not in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


def test_killed_server_leaves_no_process_behind(serving: Serving) -> None:
    server = serving()
    children = server.children
    assert len(children) >= 2
    with httpx.stream("POST", **long_request(server)) as stream:
        next(stream.iter_lines())
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert until(lambda: not any(map(is_running, children)))
