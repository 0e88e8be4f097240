"""ASGI middleware around the application: API keys, limits, request ids, security headers, and the request log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsi.server.errors import ApiError, internal_error, shutting_down
from dsi.server.limits import Limits

log = logging.getLogger("dsi.server")

REQUEST_ID = re.compile(r"[\w.-]{1,64}")
LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
PROTECTED = ("/v1/", "/tokenize", "/detokenize")  # by keys
EXPOSED = ("x-request-id", "retry-after")  # to pages of other origins
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class LimitsMiddleware:
    """Checks each request before the application sees it.

    With `keys` the API requires one of them. With `local` the Host header must name this machine, which
    prevents DNS rebinding. Pages of `origins` may use the API. `count` gets each request and its status.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        keys: Sequence[str] = (),
        local: bool = False,
        origins: Sequence[str] = (),
        count: Callable[[Scope, int], None] = lambda scope, status: None,  # noqa: ARG005
    ) -> None:
        self._app, self._limits, self._local, self._count = app, limits, local, count
        self._keys = [os.fsencode(key) for key in keys]
        self._answer: ASGIApp = self._answer_or_refuse
        if origins:  # around what asks for the key, which a preflight does not have
            self._answer = CORSMiddleware(self._answer, origins, ("GET", "POST"), ("*",), expose_headers=EXPOSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_log = RequestLog(scope, send)
        try:
            self._check_host(scope)
            await self._answer(scope, receive, request_log.send)
        except ApiError as error:
            await request_log.send_error(error)
        except asyncio.CancelledError:  # the time to shut down is over
            await request_log.send_error(shutting_down())
        except Exception:
            log.exception("failed", extra={"request": request_log.id})
            await request_log.send_error(internal_error())
        finally:
            request_log.write()
            self._count(scope, request_log.status)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            body = await self._read_body(receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay_body(body, receive), send)

    def _check_host(self, scope: Scope) -> None:
        if self._local and not LOOPBACK.fullmatch(Headers(scope=scope).get("host", "")):
            raise ApiError(400, "this server answers only to the names of the machine it runs on")

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        client = self._client(headers)
        scope["state"]["client"] = client or 0
        if client is None and scope["path"].startswith(PROTECTED):
            message, challenge = "a valid API key is needed: Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        # Request smuggling: a proxy may read it otherwise.
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "a body has a length or comes in chunks, not both")
        if _head_size(scope) > self._limits.head_bytes:  # uvicorn checks only incomplete heads
            raise ApiError(431, f"the head of the request is larger than {self._limits.head_bytes} bytes")
        if int(headers.get("content-length", "0")) > self._limits.body_bytes:
            raise self._too_large()

    def _client(self, headers: Headers) -> int | None:
        """The number of the request's key, 0 without keys, None without a valid one; compared in constant time."""
        if not self._keys:
            return 0
        given = headers.get("authorization", "")
        key = given[7:].encode("latin-1") if given[:7].lower() == "bearer " else b""
        matches = [hmac.compare_digest(key, valid) for valid in self._keys]
        return matches.index(True) if any(matches) else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request is larger than {self._limits.body_bytes} bytes", code="request_too_large")

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body, limited in size and time; None: the client has disconnected."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.receive_seconds):
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
            raise ApiError(408, f"the request was not complete after {self._limits.receive_seconds:g} s") from None


def _head_size(scope: Scope) -> int:
    return sum(map(len, chain(*scope["headers"], [scope["path"], scope["query_string"]])))


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body already read, then what else comes: only a disconnect does."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def error_response(error: ApiError) -> Response:
    """An answer before the request's body is read: the rest of it will not be."""
    return JSONResponse(error.json(), error.status, headers=error.headers | {"connection": "close"})


class RequestLog:
    """Follows one request to its response and writes one line of log about it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.id
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        if self.status:
            return  # the response has begun: it can only break off
        with suppress(OSError):
            await error_response(error)(self._scope, _disconnected, self.send)

    def write(self) -> None:
        fields = {"request": self.id, "method": self._scope["method"], "path": self._scope["path"][:200]}
        self.status = self.status or 499  # the client disconnected before there was a response
        fields["status"] = self.status
        log.info("answered", extra=fields | {"ms": round(1000 * (time.perf_counter() - self._began), 1)})


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}
