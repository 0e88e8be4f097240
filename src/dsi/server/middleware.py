"""What stands between the network and the application: keys, bounds, ids, headers, one line of log each."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsi.server.errors import Problem, closing, failed
from dsi.server.limits import Limits

log = logging.getLogger("dsi.serve")

ID = re.compile(r"[\w.-]{1,64}")
LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class LimitsMiddleware:
    """`keys`: with any, the API asks for one of them. `local`: only this machine's own names are answered,
    so that no page from elsewhere can reach it by a name that has come to mean this machine.
    """

    def __init__(self, app: ASGIApp, limits: Limits, keys: Sequence[str] = (), local: bool = False) -> None:
        self._app, self._limits, self._local = app, limits, local
        self._keys = [os.fsencode(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = RequestLog(scope, send)
        try:
            self._check(scope)
            body = await self._body(receive)
            if body is not None:
                await self._app(scope, _replayed(body, receive), visit.send)
        except Problem as problem:
            await visit.refuse(problem)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            await visit.refuse(closing())
        except Exception:
            log.exception("failed", extra={"request": visit.id})
            await visit.refuse(failed())
        finally:
            visit.report()

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._local and not LOOPBACK.fullmatch(headers.get("host", "")):
            raise Problem(400, "this server answers only to the names of the machine it runs on")
        if self._keys and scope["path"].startswith("/v1/") and not self._is_known(headers):
            raise Problem(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if "content-length" in headers and "transfer-encoding" in headers:  # each reader has its own idea
            raise Problem(400, "a body has a length or comes in chunks, not both")
        if _size_of_head(scope) > self._limits.head_bytes:  # in one piece it may come to here
            raise Problem(431, f"the head of the request is larger than {self._limits.head_bytes} bytes")
        if int(headers.get("content-length", "0")) > self._limits.body_bytes:
            raise self._too_large()

    def _is_known(self, headers: Headers) -> bool:
        """Every key is compared, each in the same time whatever is wrong with it."""
        given = headers.get("authorization", "")
        key = given[7:].encode("latin-1") if given[:7].lower() == "bearer " else b""
        found = [hmac.compare_digest(key, known) for known in self._keys]
        return any(found)

    def _too_large(self) -> Problem:
        return Problem(413, f"the request is larger than {self._limits.body_bytes} bytes", code="request_too_large")

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it, within bounds of size and time; None: the client has left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.arrival_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._limits.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            seconds = self._limits.arrival_seconds
            raise Problem(408, f"the request was not complete after {seconds:g} s") from None


def _size_of_head(scope: Scope) -> int:
    return sum(map(len, chain(*scope["headers"], [scope["path"], scope["query_string"]])))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that has been read, and then whatever else comes: only the end of the connection does."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class RequestLog:
    """One request and its answer, as the log knows it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.id = given if ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.id
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        if self.status:
            return  # the answer has begun: it can only break off
        headers = problem.headers | {"connection": "close"}  # nobody waits for the rest of its body
        response = JSONResponse(problem.json(), problem.status, headers=headers)
        with suppress(OSError):
            await response(self._scope, _nothing, self.send)

    def report(self) -> None:
        log.info(
            "answered",
            extra={
                "request": self.id,
                "method": self._scope["method"],
                "path": self._scope["path"][:200],
                "status": self.status or 499,  # the client left before there was an answer
                "ms": round(1000 * (time.perf_counter() - self._began), 1),
            },
        )


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
