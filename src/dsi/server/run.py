"""Runs the server: connection limits, JSON logs, and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
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
from dsi.models.process_utils import freeze_objects
from dsi.server.app import make_app
from dsi.server.errors import ApiError
from dsi.server.limits import Limits
from dsi.server.middleware import SECURITY_HEADERS
from dsi.server.service import Service
from dsi.server.sockets import BACKLOG, is_loopback, raise_file_limit

log = logging.getLogger("dsi.server")

OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_LOG_SECONDS = 10.0  # between two lines of log about connections that cannot be accepted
# For which a thread keeps the interpreter while another waits. A fleet on GPUs polls all the time, so each message to a
# client would wait that long: with Python's 5 ms a short request behind 16 long ones took 70 times its time alone.
SWITCH_SECONDS = 0.0002
RECORD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {key: value for key, value in vars(record).items() if key not in RECORD_FIELDS}
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        document = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **extra}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class ConnectionLimitsProtocol(H11Protocol):
    """HTTP with a limit on connections, on the time a request takes to arrive, and on unread responses."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timers: dict[str, asyncio.TimerHandle] = {}  # that close the connection: "receive" and "send"
        self._idle_since = self.loop.time()
        transport.set_write_buffer_limits(0)  # so that any unread byte pauses writing
        full = len(self.connections) >= self.limits.connections and not self._evict_idle()
        super().connection_made(transport)
        if full:
            transport.abort()
        else:
            self._start_timer("receive", self.limits.receive_seconds)

    def _evict_idle(self) -> bool:
        """Close the connection that has taken longest to send its request, if there is any."""
        connections: list[Any] = [*self.connections]
        idle = [other for other in connections if other.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
        if idle:
            longest = min(idle, key=lambda other: other._idle_since)
            self.connections.discard(longest)
            longest.transport.abort()
        return bool(idle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("receive")
        elif "receive" not in self._timers:
            self._start_timer("receive", self.limits.receive_seconds)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("send", self.limits.send_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("send")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("receive")
        self._stop_timer("send")
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what is not HTTP with an error object, too."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the response has begun: it can only break off
            return
        body = json.dumps(ApiError(400, "this is not a request of HTTP").json()).encode()
        headers = {**SECURITY_HEADERS, "content-type": "application/json", "content-length": str(len(body))}
        response = h11.Response(status_code=400, headers=[*headers.items(), ("connection", "close")])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_timer(self, name: str, seconds: float) -> None:
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


class LoopErrors:
    """The event loop's exception handler: a line of log for each, but few for connections that cannot be accepted.

    The loop tries again each second, and reports as many errors each time as the backlog is long.
    """

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in OUT_OF_FILES:
            log.error(context["message"], exc_info=error)
        elif loop.time() - self._last >= ACCEPT_LOG_SECONDS:
            self._last = loop.time()
            log.error("connections are refused until others are closed", extra={"why": error.strerror})


class UvicornServer(uvicorn.Server):
    """On a signal it accepts no more requests, lets running ones finish for a while, then ends them with an error."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A second signal ends it at once. Unlike the parent's handler, it does not raise the signal again."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            print(f"dsi: listening on http://{name}:{port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine_thread, seconds = self._service.engine_thread, self._service.limits.shutdown_seconds
        engine_thread.refuse()
        asyncio.get_running_loop().call_later(seconds, engine_thread.cancel_all)
        await super().shutdown(sockets)


def configure_logging() -> None:
    """Every logger, and every warning, writes lines of JSON."""
    handler, loggers = logging.StreamHandler(sys.stderr), [*logging.root.manager.loggerDict.values()]
    handler.setFormatter(LogFormatter())
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True
    logging.root.handlers = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)


def uvicorn_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    protocol: Any = type("Protocol", (ConnectionLimitsProtocol,), {"limits": limits})
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


def serve(
    engine: Engine,
    model: str,
    listener: socket.socket,
    limits: Limits,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> None:
    """Serve until a signal ends it."""
    configure_logging()
    raise_file_limit(limits.connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    freeze_objects()
    app, service = make_app(engine, model, limits, keys, is_loopback(listener), origins)
    UvicornServer(uvicorn_config(app, limits), service).run(sockets=[listener])
