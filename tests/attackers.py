"""A hostile client over a bare socket, and the checks of what it gets."""

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

INTERNALS = re.compile(r"Traceback|File \"|\.py\b|/site-packages/|/src/|/home/|/root/")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def connect(url: str, seconds: float = 30.0) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=seconds)


def head(first: str, *headers: str) -> bytes:
    return "\r\n".join((f"{first} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def read_response(connection: socket.socket) -> Answer:
    response = HTTPResponse(connection)
    try:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        response.close()


def send_raw(url: str, *parts: bytes) -> Answer:
    """Send these bytes, whatever they are, and read the response."""
    with connect(url) as connection:
        for part in parts:
            connection.sendall(part)
        return read_response(connection)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes this connection before the timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def check_error(status: int, headers: Any, body: bytes) -> dict[str, Any]:
    """Check that it is an error object that shows nothing of the server's internals."""
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
    assert not INTERNALS.search(body.decode())
    return error


def check_refused(answer: httpx.Response | Answer, *statuses: int) -> dict[str, Any]:
    """Check that the status is one of these, and the body an error object."""
    if isinstance(answer, Answer):
        status, body = answer.status, answer.body
    else:
        status, body = answer.status_code, answer.content
    assert status in statuses, (status, body[:500])
    return check_error(status, answer.headers, body)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert resident
    return 1024 * int(resident[1])


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def num_requests(url: str, state: str = "running") -> int:
    """How many texts a server says are `running` or `waiting`."""
    text = send_raw(url, head("GET /metrics", "Connection: close")).body.decode()
    count = re.search(rf"^dsi:num_requests_{state} (\S+)", text, re.MULTILINE)
    assert count
    return int(float(count[1]))
