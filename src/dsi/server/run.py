"""The server as a process: sockets with bounds, logs, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsi.engine.engine import Engine
from dsi.server.app import make_app
from dsi.server.auth import is_local
from dsi.server.errors import Problem
from dsi.server.limits import Limits
from dsi.server.middleware import HEADERS
from dsi.server.service import Service

BACKLOG = 256  # connections taken at once: with all others, still fewer than a usual limit on open files
OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormatter(logging.Formatter):
    """One JSON document for each line of log."""

    def format(self, record: logging.LogRecord) -> str:
        told = {key: value for key, value in vars(record).items() if key not in OWN}
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        document = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **told}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class Bounded(H11Protocol):
    """Not too many connections, and none that takes for ever to say what it wants or to hear the answer."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._late: asyncio.TimerHandle | None = None  # will end it: its request does not come
        self._stuck: asyncio.TimerHandle | None = None  # will end it: its answer is not taken
        self._quiet_since = self.loop.time()
        transport.set_write_buffer_limits(0)  # so that any byte that is not taken is known of
        full = len(self.connections) >= self.limits.connections and not self._make_room()
        super().connection_made(transport)
        if full:
            transport.abort()
        else:
            self._expect()

    def _make_room(self) -> bool:
        """Of those that have not said what they want, the one that has had most time for it has to leave."""
        others: list[Any] = [*self.connections]
        quiet = [each for each in others if each.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
        if quiet:
            longest = min(quiet, key=lambda each: each._quiet_since)
            self.connections.discard(longest)
            longest.transport.abort()
        return bool(quiet)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._arrived()
        elif self._late is None:
            self._expect()

    def on_response_complete(self) -> None:
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.limits.taking_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._taken()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What is no HTTP gets an error object too."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the answer has begun: it can only break off
            return
        body = json.dumps(Problem(400, "this is not a request of HTTP").json()).encode()
        headers = {**HEADERS, "content-type": "application/json", "content-length": str(len(body))}
        response = h11.Response(status_code=400, headers=[*headers.items(), ("connection", "close")])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect(self) -> None:
        self._late = self.loop.call_later(self.limits.arrival_seconds, self.transport.abort)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _taken(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class UvicornServer(uvicorn.Server):
    """Asked to end, it takes nothing new, lets answers end for a while, and then cuts them cleanly."""

    def __init__(self, config: uvicorn.Config, house: Service) -> None:
        super().__init__(config)
        self._house = house

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A second word ends it at once. Unlike its parent's, it does not die of the signal afterwards."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            host, port = each.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            print(f"dsi: listening on http://{name}:{port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._house.desk.refuse()
        deadline = self._house.limits.shutdown_seconds
        asyncio.get_running_loop().call_later(deadline, self._house.desk.cut)
        await super().shutdown(sockets)


def start_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    for name in ("dsi.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "dsi.serve" else logging.WARNING)


def configured(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    protocol: Any = type("Protocol", (Bounded,), {"limits": limits})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.shutdown_seconds) + 2,
        backlog=BACKLOG,
    )


def serve(engine: Engine, model: str, found: socket.socket, limits: Limits, keys: Sequence[str]) -> None:
    """Until it is told to stop."""
    start_log()
    app, house = make_app(engine, model, limits, keys, is_local(found))
    UvicornServer(configured(app, limits), house).run(sockets=[found])
