"""The ASGI application: OpenAI's API, monitoring, and the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dsi import __version__
from dsi.core.sequence import Tokens
from dsi.engine.engine import Engine
from dsi.server import responses
from dsi.server.body_route import body_route
from dsi.server.errors import ApiError, ErrorBody, internal_error
from dsi.server.limits import Limits
from dsi.server.middleware import LimitsMiddleware
from dsi.server.schema import (
    ChatBody,
    ChatCompletion,
    CompletionBody,
    CompletionResponse,
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
    VerifyBody,
    VerifyResponse,
)
from dsi.server.service import ApiRequest, Service
from dsi.server.verify import verify

log = logging.getLogger("dsi.server")

PAGE = files("dsi") / "server" / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 424, 429, 431, 500, 503)
}
EVENT_STREAM: dict[str, Any] = {  # the schema of each event
    "content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}
}
PLAIN_TEXT: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class EventStream(Response):
    """Server-sent events; when the client disconnects, their source is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, source: Callable[[], AsyncIterator[bytes]]) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await run_until_disconnect(self._send_events(send), receive)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._source()) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Api(FastAPI):
    """Whose document has no status 422, which FastAPI would add: an invalid field is a 400."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run until the work is done or the client disconnects; returns whether it was done."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (work, wait_for_disconnect(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if done:
        tasks[0].result()
    return done


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(
    engine: Engine,
    model: str,
    limits: Limits,
    keys: Sequence[str] = (),
    local: bool = False,
    origins: Sequence[str] = (),
) -> tuple[ASGIApp, Service]:
    service = Service(engine, limits, model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = Api(
        title="dsi",
        version=__version__,
        description="Distributed speculative inference behind OpenAI's API.",
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = body_route(service.workers, inline=[VerifyBody])
    app.add_exception_handler(ApiError, _handle_api_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(Exception, _handle_internal_error)
    _add_api(app, service, [Security(HTTPBearer(auto_error=False))] if keys else [])
    _add_monitoring(app, service)
    _add_page(app)

    def count(scope: Scope, status: int) -> None:
        service.metrics.count_http(scope["method"], route_template(app, scope), status)

    return LimitsMiddleware(app, limits, keys, local, origins, count), service


def route_template(app: FastAPI, scope: Scope) -> str:
    """The path as it was declared; all that are not are one."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return next((route.path_format for route in routes if route.matches(scope)[0] is not Match.NONE), "other")


def _add_api(app: FastAPI, service: Service, security: Sequence[Any]) -> None:
    """What needs a key: the middleware asks for it, `security` documents it."""

    @app.post(
        "/v1/completions",
        dependencies=security,
        responses={200: EVENT_STREAM | {"model": CompletionResponse}, **ERRORS},
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        return await respond(service, body, request)

    @app.post(
        "/v1/chat/completions",
        dependencies=security,
        responses={200: EVENT_STREAM | {"model": ChatCompletion}, **ERRORS},
    )
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Continue a conversation."""
        return await respond(service, body, request)

    @app.post("/v1/verify", dependencies=security, responses={200: {"model": VerifyResponse}, **ERRORS})
    async def verify_tokens(body: VerifyBody, request: Request) -> Response:
        """The target's token after each of the last prefixes of a text: what a target of DSI is asked for."""
        return await verify_response(service, body, request)

    @app.post("/tokenize", dependencies=security, responses={200: {"model": TokenizeResponse}, **ERRORS})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:  # noqa: ARG001
        """The tokens of a text or a conversation, as in vLLM."""
        return JSONResponse(await service.workers.run(service.tokenize, body))

    @app.post("/detokenize", dependencies=security, responses={200: {"model": DetokenizeResponse}, **ERRORS})
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:  # noqa: ARG001
        """The text of tokens, as in vLLM."""
        return JSONResponse(await service.workers.run(service.detokenize, body))

    @app.get("/v1/models", dependencies=security, responses=ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_json(service)]}

    @app.get("/v1/models/{model:path}", dependencies=security, responses=ERRORS)
    async def model(model: str) -> dict[str, Any]:
        if model != service.model:
            raise ApiError(404, f"the model {model[:200]!r} is not here; there is {service.model!r}")
        return model_json(service)

    @app.get("/v1/traces/{id}", dependencies=security, response_model=dict[str, Any], responses=ERRORS)
    async def traces(id: str, request: Request) -> Response:
        """What each server computed for one of the last responses, for `dsi timeline --trace` and Perfetto."""
        return await service.workers.run(_trace_response, service, request.state.client, id)


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> JSONResponse:
        status = await service.engine_thread.status()
        servers = [server.json() for server in status.servers]
        if status.accepts and status.has_target:
            return JSONResponse({"status": "ok", "servers": servers})
        error = ApiError(503, "no text can be written")
        return JSONResponse({"status": "unavailable", "servers": servers} | error.json(), 503)

    @app.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response, responses={200: PLAIN_TEXT, **ERRORS})
    async def metrics() -> Response:
        return Response(service.metrics.text(await service.engine_thread.status()), media_type=METRICS_TYPE)


def _add_page(app: FastAPI) -> None:
    _page_files()  # read now: later there may be no file left to open

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        return _page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return _page_file(name)


def _page_file(name: str) -> Response:
    """A file of the page; names are compared, never joined to a path."""
    if name not in _page_files():
        raise ApiError(404, "there is nothing here")
    media_type = MEDIA_TYPES["." + name.rpartition(".")[2]]
    return Response(_page_files()[name], media_type=media_type, headers={"cache-control": "no-cache"})


@cache
def _page_files() -> dict[str, bytes]:
    files = {path.name: path for path in PAGE.iterdir() if path.name.endswith((*MEDIA_TYPES,))}
    return {name: path.read_bytes() for name, path in files.items()}


def model_json(service: Service) -> dict[str, Any]:
    info = service.info
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "dsi",
        "max_model_len": info.context,
        "sp": info.sp,
        "algorithm": info.spec.algorithm,
        "lookahead": info.lookahead(info.spec.algorithm),
        "max_tokens": service.limits.new_tokens,
    }


async def respond(service: Service, body: CompletionBody | ChatBody, http: Request) -> Response:
    request = await service.prepare(body, http.state.client)
    await service.begin(request)
    fields = {"request": http.state.request_id, "answer": request.id, "algorithm": request.algorithm}
    log.info("taken", extra=fields | {"texts": len(request.choices), "prompt_tokens": request.prompt_tokens})
    if request.stream:
        return EventStream(lambda: stream_events(service, request))
    if not await run_until_disconnect(_run(service, request), http.receive):
        return Response(status_code=499)  # which nobody reads
    return await service.workers.run(_full_response, service, request)


async def verify_response(service: Service, body: VerifyBody, http: Request) -> Response:
    tokens: Tokens = ()

    async def run() -> None:
        nonlocal tokens
        tokens = await verify(service, body, http.state.client)

    if not await run_until_disconnect(run(), http.receive):
        return Response(status_code=499)  # which nobody reads
    return JSONResponse({"tokens": tokens, "model": service.model})


def _full_response(service: Service, request: ApiRequest) -> Response:
    return JSONResponse(responses.full_response(service.info, request))


def _trace_response(service: Service, client: int, id: str) -> Response:
    trace = service.traces.json(client, id)
    if trace is None:
        raise ApiError(404, f"there is no trace {id[:200]!r}: the last {service.limits.traces} answers have one")
    return JSONResponse(trace)


async def _run(service: Service, request: ApiRequest) -> None:
    async with aclosing(service.follow(request)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            pass


async def stream_events(service: Service, request: ApiRequest) -> AsyncIterator[bytes]:
    """The events of a stream, which ends with `[DONE]` even after an error."""
    chunks = responses.Chunks(service.info, request)
    try:
        for chunk in chunks.first():
            yield chunk
        async with aclosing(service.follow(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                for chunk in chunks.of(delta):
                    yield chunk
        for chunk in chunks.last():
            yield chunk
    except ApiError as error:
        yield responses.event(error.json())
        yield responses.DONE


async def _handle_api_error(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error.json(), error.status, headers=error.headers)


async def _handle_validation_error(request: Request, error: Any) -> JSONResponse:
    """Says what is wrong with the first invalid field, without repeating its value."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return await _handle_api_error(request, ApiError(400, "the body is not valid JSON"))
    field = ".".join(str(part) for part in first["loc"][1:])[:200]
    message = f"{field or 'the body'}: {first['msg'].removeprefix('Value error, ')[:300]}"
    return await _handle_api_error(request, ApiError(400, message, param=field or None, code=first["type"]))


async def _handle_http_error(request: Request, error: Any) -> JSONResponse:
    messages = {404: "there is nothing here", 405: "this method is not allowed here"}
    message = messages.get(error.status_code, "the request could not be read")
    return await _handle_api_error(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _handle_internal_error(request: Request, _: Exception) -> JSONResponse:
    """Hides the exception, which the middleware logs."""
    return await _handle_api_error(request, internal_error())
