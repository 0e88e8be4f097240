"""What a hostile client does over a bare socket, and what it must find there."""

import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

TELLTALE = re.compile(r"Traceback|File \"|\.py\b|/site-packages/|/src/|/home/|/root/")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def dial(url: str, seconds: float = 30.0) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=seconds)


def head(first: str, *headers: str) -> bytes:
    return "\r\n".join((f"{first} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def read(connection: socket.socket) -> Answer:
    response = HTTPResponse(connection)
    try:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        response.close()


def ask(url: str, *pieces: bytes) -> Answer:
    """Say this, whatever it is, and hear what comes back."""
    with dial(url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read(connection)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends this connection while we wait."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def check_error(status: int, headers: Any, body: bytes) -> dict[str, Any]:
    """It must be an error object, and say nothing about where and how the server runs."""
    assert status >= 400
    assert headers["content-type"].startswith("application/json")
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    document = json.loads(body)
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert not TELLTALE.search(body.decode())
    return error


def refused(answer: httpx.Response | Answer, *statuses: int) -> dict[str, Any]:
    """One of these, and properly."""
    if isinstance(answer, Answer):
        found, body = answer.status, answer.body
    else:
        found, body = answer.status_code, answer.content
    assert found in statuses, (found, body[:500])
    return check_error(found, answer.headers, body)


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def memory(pid: int) -> int:
    """Bytes that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def is_there(pid: int) -> bool:
    """Whether a process still runs; one that is dead and not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def writing(url: str, state: str = "running") -> int:
    """How many texts a server says it is writing, or has `waiting`."""
    text = ask(url, head("GET /metrics", "Connection: close")).body.decode()
    found = re.search(rf"^dsi:num_requests_{state} (\S+)", text, re.MULTILINE)
    assert found
    return int(float(found[1]))
