"""Attacks by hand on a real server: each is properly refused, and the next client is served."""

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

from attackers import Answer, ask, dial, head, is_closed, is_there, memory, read, refused, until, writing
from dsi.server.schema import ChatBody, CompletionBody
from live_server import Live, Serving, start

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON, CONTENT = {"content-type": "application/json"}, "Content-Type: application/json"
BODY_BYTES, HEAD_BYTES = 1 << 20, 1 << 14
KEYS = ("one-secret-of-the-file", "two-secret-of-the-file")
ENV_KEY = "secret-of-the-environment"


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    """And after all of it the server must still write."""
    with httpx.Client(base_url=live.url, timeout=30, headers=JSON) as client:
        yield client
        assert client.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 2}).status_code == 200


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys, one text at a time, one that waits, and few connections."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# two of them\n" + "\n".join(KEYS) + "\n")
    limits = ("--max-running", "1", "--max-waiting", "1", "--max-connections", "64")
    server = start("--api-key-file", str(path), *limits)
    yield server
    server.kill()


# Bodies.


def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(live: Live) -> None:
    with dial(live.url) as connection:
        connection.sendall(head(f"POST {COMPLETIONS}", f"Content-Length: {10**15}"))
        refused(read(connection), 413)
        assert is_closed(connection)


def test_a_body_that_grows_too_long_is_refused(live: Live) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (BODY_BYTES // 16)

    refused(httpx.post(live.url + COMPLETIONS, content=pieces(), headers=JSON, timeout=30), 413)
    refused(httpx.post(live.url + COMPLETIONS, content=b" " * (4 * BODY_BYTES), headers=JSON, timeout=30), 413)


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
def test_a_body_that_cannot_be_read_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body), 400, 422)


def test_a_body_that_is_not_said_to_be_json_is_refused(client: httpx.Client) -> None:
    """So that no page from elsewhere can send one without being asked about it first."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        refused(client.post(COMPLETIONS, content=body, headers={"content-type": kind}), 422)


# fmt: off
ABSURD = [
    *("NaN", "Infinity", "-Infinity", "1e400", "1e308", "5e-324", "-5e-324", "0.5", "-0.0", "0", "-1"),
    *(str(number) for number in (2**31 - 1, 2**63 - 1, 2**63, -(2**63), 10**400, -(10**400))),
    *("null", "true", '"1"', '"x"', '"\\u0000"', "[]", "[[]]", "[null]", "{}", '{"type": []}'),
]
# fmt: on
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "lookahead", "logprobs")  # seen by the servers


@pytest.mark.parametrize("field", CompletionBody.model_fields)
def test_an_absurd_value_is_answered_or_refused(client: httpx.Client, field: str) -> None:
    check_absurd(client, COMPLETIONS, field, prompt="a", max_tokens=1 if field in SAMPLING else 0, seed=1)


@pytest.mark.parametrize("field", [f for f in ChatBody.model_fields if f not in CompletionBody.model_fields])
def test_an_absurd_value_in_a_chat_is_answered_or_refused(client: httpx.Client, field: str) -> None:
    check_absurd(client, CHAT, field, messages=[{"role": "user", "content": "a"}], max_tokens=0)


def check_absurd(client: httpx.Client, path: str, field: str, **sound: object) -> None:
    rest = json.dumps({name: value for name, value in sound.items() if name != field})
    for value in ABSURD:
        body = f'{{"{field}": {value}, {rest[1:]}'
        answer = client.post(path, content=body)
        if answer.status_code != 200:
            refused(answer, 400, 404, 422, 503)
            assert answer.status_code != 503 or field == "timeout", body


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [""] * 17,
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
def test_a_prompt_that_cannot_be_is_refused(client: httpx.Client, prompt: object) -> None:
    refused(client.post(COMPLETIONS, content=json.dumps({"prompt": prompt, "max_tokens": 1})), 400, 422)


def test_absurd_stops_are_refused_and_odd_ones_do_no_harm(client: httpx.Client) -> None:
    for stop in ("x" * 16_000, ["x"] * 16_000, ["x" * 1001], [1], [None], {"a": "b"}):
        refused(client.post(COMPLETIONS, json={"prompt": "a", "stop": stop, "max_tokens": 1}), 400, 422)
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
def test_many_wrong_things_cost_no_more_than_one(client: httpx.Client, path: str, body: bytes) -> None:
    assert len(body) < BODY_BYTES + 1000
    began = time.monotonic()
    refused(client.post(path, content=body[:BODY_BYTES]), 400, 422)
    assert time.monotonic() - began < 2  # each took four seconds when all of them were looked at


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
def test_a_flood_in_the_head_is_refused(live: Live, pieces: list[bytes]) -> None:
    refused(ask(live.url, *pieces), 400, 431)


def test_a_head_without_an_end_is_cut_off_soon(live: Live) -> None:
    with dial(live.url) as connection:
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
def test_what_is_no_http_is_refused_with_an_error_object(live: Live, data: bytes) -> None:
    with dial(live.url) as connection:
        connection.sendall(data)
        refused(read(connection), 400)
        assert is_closed(connection)


def test_a_body_with_a_length_and_in_chunks_is_refused_and_nothing_after_it_is_read(live: Live) -> None:
    """Who hides a second request in the first must find neither a proxy nor us of two minds."""
    hidden = head("GET /v1/models")
    request = head(f"POST {COMPLETIONS}", "Content-Length: 4", "Transfer-Encoding: chunked", CONTENT)
    with dial(live.url) as connection:
        connection.sendall(request + b"0\r\n\r\n" + hidden)
        refused(read(connection), 400)
        assert is_closed(connection)


def test_requests_in_one_piece_are_answered_in_their_order(live: Live) -> None:
    paths = ["/version", "/nowhere", "/v1/models", "/page/nothing"] * 5
    with dial(live.url) as connection:
        connection.sendall(b"".join(head(f"GET {path}") for path in paths))
        found = [read_one(connection) for _ in paths]
    assert [answer.status for answer in found] == [200, 404, 200, 404] * 5


def read_one(connection: socket.socket) -> Answer:
    """One answer and not a byte more: the next may have come already."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += connection.recv(1)
    lines = data.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return Answer(int(lines[0].split()[1]), headers, body)


# Names and paths.


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
def test_no_path_leads_to_a_file_or_anywhere_else(live: Live, path: str) -> None:
    refused(ask(live.url, head(f"GET {path}", "Connection: close")), 404, 405)


def test_a_wrong_method_is_refused_with_an_error_object(live: Live) -> None:
    for method, path in (("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("POST", "/"), ("BREW", "/health")):
        answer = ask(live.url, head(f"{method} {path}", "Connection: close"))
        refused(answer, 405)
        assert answer.headers["allow"]
    refused(ask(live.url, head("CONNECT elsewhere:443", "Connection: close")), 404, 405)
    refused(ask(live.url, head("OPTIONS *", "Connection: close")), 404, 405)


@pytest.mark.parametrize(
    "host",
    ["elsewhere.example", "127.0.0.1.elsewhere.example", "localhost@elsewhere", "", "[::2]", "8.8.8.8"],
)
def test_on_loopback_another_name_is_not_answered(live: Live, host: str) -> None:
    for path in ("/", "/v1/models"):
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        refused(ask(live.url, request.encode()), 400)
    assert ask(live.url, b"GET / HTTP/1.1\r\nHost: LOCALHOST:1\r\nConnection: close\r\n\r\n").status == 200


def test_the_page_and_the_api_say_what_a_browser_may_do_with_them(client: httpx.Client) -> None:
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
def test_without_one_of_the_keys_there_is_no_answer(locked: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/nowhere", "/v1/traces/1"):
        answer = httpx.get(locked.url + path, headers=headers)
        assert refused(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    refused(httpx.post(locked.url + COMPLETIONS, json={"prompt": "a"}, headers=headers), 401)


def test_with_one_of_the_keys_there_is_and_no_key_is_ever_told(locked: Live) -> None:
    told = []
    for key in (*KEYS, KEYS[0] + "x"):
        with httpx.Client(base_url=locked.url, headers=bearer(key), timeout=30) as client:
            told += [
                client.get("/v1/models"),
                client.get(f"/v1/models?api_key={key}"),
                client.get("/metrics"),
            ]
            told.append(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}))
            told.append(client.post(COMPLETIONS, json={"prompt": []}))
    assert [answer.status_code for answer in told] == [200, 200, 200, 200, 422] * 2 + [
        401,
        401,
        200,
        401,
        401,
    ]
    said = "".join(answer.text + str(answer.headers) for answer in told)
    assert until(lambda: sum('"answered"' in line for line in locked.log) >= len(told))
    for key in KEYS:
        assert key not in said
        assert key not in "".join(locked.log)


# More than there is room for.


def stories(server: Live, **more: object) -> dict[str, Any]:
    """A request for a text that is long, and hard to guess."""
    body = {"prompt": "Once", "max_tokens": 500, "temperature": 100, "seed": 1, "stream": True, **more}
    return {"url": server.url + COMPLETIONS, "json": body, "headers": bearer(KEYS[0]), "timeout": 60}


def test_who_finds_the_queue_full_is_told_to_come_again(locked: Live) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(httpx.stream("POST", **stories(locked)))
            assert stream.status_code == 200
        answer = httpx.post(**stories(locked))
        assert refused(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert until(lambda: httpx.post(**stories(locked, max_tokens=1)).status_code == 200)


def test_who_leaves_frees_a_place(locked: Live) -> None:
    """With one place, the next is served only if the place is free."""
    for stream in (True, False):
        for _ in range(5):
            with dial(locked.url) as connection:
                body = json.dumps(stories(locked, stream=stream)["json"]).encode()
                length, key = f"Content-Length: {len(body)}", f"Authorization: Bearer {KEYS[1]}"
                connection.sendall(head(f"POST {COMPLETIONS}", CONTENT, length, key) + body)
                assert until(lambda: writing(locked.url) == 1)
            assert until(lambda: writing(locked.url) == 0)  # who comes sooner may be refused
    began = time.monotonic()
    assert httpx.post(**stories(locked, stream=False, max_tokens=1)).status_code == 200
    assert time.monotonic() - began < 5


def test_a_deadline_ends_an_answer_and_a_stream_with_an_error_object(locked: Live) -> None:
    answer = httpx.post(**stories(locked, stream=False, timeout=0.2))
    assert refused(answer, 503)["code"] == "deadline_exceeded"
    with httpx.stream("POST", **stories(locked, timeout=0.2)) as stream:
        assert stream.status_code == 200
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "[DONE]"
    assert until(lambda: writing(locked.url) == 0)


def open_files(wanted: int) -> int:
    """As many as this process may have, if those are fewer."""
    spare = 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + spare:
        soft = wanted + spare if hard == resource.RLIM_INFINITY else min(hard, wanted + spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft - spare)


def test_a_crowd_of_slow_connections_does_not_keep_others_out(locked: Live) -> None:
    """Each sends one byte and waits; there is room for 64."""
    before, files = memory(locked.process.pid), Path(f"/proc/{locked.process.pid}/fd")
    with ExitStack() as stack:
        for i in range(open_files(2000)):
            slow = stack.enter_context(dial(locked.url))
            slow.setblocking(False)
            slow.send(b"G" if i % 2 else head(f"POST {COMPLETIONS}", "Content-Length: 9") + b"{")
            if i % 500 == 499:
                began = time.monotonic()
                assert httpx.post(**stories(locked, stream=False, max_tokens=2)).status_code == 200
                assert time.monotonic() - began < 10
        assert len(list(files.iterdir())) < 64 + 64
        assert memory(locked.process.pid) - before < 64 << 20
    assert httpx.post(**stories(locked, stream=False, max_tokens=2)).status_code == 200


# The end.


def test_told_to_end_a_server_cuts_its_streams_cleanly_and_leaves_nobody_behind(serving: Serving) -> None:
    server = serving("--shutdown-timeout", "1", "--max-running", "8", env={"DSI_API_KEYS": f" {ENV_KEY}, other,"})
    refused(httpx.get(server.url + "/v1/models"), 401)
    children = server.children
    assert len(children) >= 2

    url = server.url + COMPLETIONS

    def follow() -> list[str]:
        body = {"prompt": "Once", "max_tokens": 500, "temperature": 100, "n": 4, "stream": True}
        with httpx.stream("POST", url, json=body, headers=bearer(ENV_KEY), timeout=60) as stream:
            return [line.removeprefix("data: ") for line in stream.iter_lines() if line]

    with ThreadPoolExecutor(4) as pool:
        followers = [pool.submit(follow) for _ in range(4)]
        assert until(lambda: writing(server.url) == 8 and writing(server.url, "waiting") > 4)  # all have come
        assert server.stop() == 0
        ends = [follower.result() for follower in followers]
    assert all(events[-1] == "[DONE]" for events in ends)
    errors = [error for events in ends if (error := json.loads(events[-2]).get("error"))]
    assert errors
    assert {error["code"] for error in errors} == {"shutting_down"}
    assert until(lambda: not any(map(is_there, children)))
    assert ENV_KEY not in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


def test_a_server_that_is_killed_leaves_nobody_behind(serving: Serving) -> None:
    server = serving()
    children = server.children
    assert len(children) >= 2
    with httpx.stream("POST", **stories(server)) as stream:
        next(stream.iter_lines())
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert until(lambda: not any(map(is_there, children)))
