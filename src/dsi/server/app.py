"""The application: OpenAI's API over an engine, and the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from dsi import __version__
from dsi.engine.engine import Engine
from dsi.server import responses
from dsi.server.engine_thread import EngineThread
from dsi.server.errors import ErrorBody, Problem, failed
from dsi.server.limits import Limits
from dsi.server.middleware import LimitsMiddleware
from dsi.server.schema import ChatBody, ChatCompletion, CompletionBody, CompletionResponse
from dsi.server.service import ApiRequest, Service

log = logging.getLogger("dsi.serve")

PAGE = files("dsi") / "server" / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
METRICS = "text/plain; version=0.0.4; charset=utf-8"
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 422, 429, 431, 500, 503)
}
EVENTS: dict[str, Any] = {  # of each event
    "content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}
}
PLAIN: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Stream(Response):
    """Server-sent events; when the client leaves, the source ends at once."""

    media_type = "text/event-stream"

    def __init__(self, source: Callable[[], AsyncIterator[bytes]]) -> None:
        super().__init__(headers=STREAM)
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await first_of(self._pump(send), gone(receive))

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._source()) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def first_of(work: Any, end: Any) -> bool:
    """Work until it is done or the end has come; whether it was done."""
    tasks = [asyncio.ensure_future(each) for each in (work, end)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = bool(tasks[0].done())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if done:
        tasks[0].result()
    return done


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(
    engine: Engine, model: str, limits: Limits, keys: Sequence[str] = (), local: bool = False
) -> tuple[ASGIApp, Service]:
    house = Service(engine, EngineThread(engine, limits), limits, model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(house.desk.close)

    app = FastAPI(
        title="dsi",
        version=__version__,
        description="Distributed speculative inference behind OpenAI's API.",
        lifespan=lifespan,
        docs_url=None,  # its page would come from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(Problem, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _failed)
    _add_api(app, house)
    _add_the_rest(app, house)
    return LimitsMiddleware(app, limits, keys, local), house


def _add_api(app: FastAPI, house: Service) -> None:
    @app.post("/v1/completions", responses={200: EVENTS | {"model": CompletionResponse}, **REFUSALS})
    async def completions(body: CompletionBody, request: Request) -> Response:
        """A text continued."""
        return await answer(house, body, request)

    @app.post("/v1/chat/completions", responses={200: EVENTS | {"model": ChatCompletion}, **REFUSALS})
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """A conversation continued."""
        return await answer(house, body, request)

    @app.get("/v1/models", responses=REFUSALS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(house)]}

    @app.get("/v1/models/{model:path}", responses=REFUSALS)
    async def model(model: str) -> dict[str, Any]:
        if model != house.model:
            raise Problem(404, f"the model {model[:200]!r} is not here; there is {house.model!r}")
        return described(house)

    @app.get("/v1/traces/{id}", responses=REFUSALS)
    async def traces(id: str) -> dict[str, Any]:
        """What each server did for one of the last answers, for `dsi timeline --trace` and Perfetto."""
        found = house.traces.json(id)
        if found is None:
            most = house.limits.traces
            raise Problem(404, f"there is no trace {id[:200]!r}: the last {most} answers have one")
        return found


def _add_the_rest(app: FastAPI, house: Service) -> None:
    @app.get("/health", responses=REFUSALS)
    async def health() -> JSONResponse:
        able = house.able
        state = {"status": "ok" if able else "unavailable", "servers": house.servers}
        if not able:
            return JSONResponse(state | Problem(503, "no text can be written").json(), 503)
        return JSONResponse(state)

    @app.get("/version", responses=REFUSALS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response, responses={200: PLAIN, **REFUSALS})
    async def metrics() -> Response:
        return Response(house.metrics.text(), media_type=METRICS)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _file(name)


def _file(name: str) -> Response:
    """A part of the page; names are compared, never joined to a path."""
    for path in PAGE.iterdir():
        kind = KINDS.get("." + path.name.rpartition(".")[2])
        if path.name == name and kind:
            return Response(path.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
    raise Problem(404, "there is nothing here")


def described(house: Service) -> dict[str, Any]:
    loaded = house.engine.loaded
    return {
        "id": house.model,
        "object": "model",
        "created": house.created,
        "owned_by": "dsi",
        "max_model_len": loaded.context,
        "sp": loaded.sp,
        "algorithm": house.engine.algorithm,
        "lookahead": house.lookahead(house.engine.algorithm),
        "max_tokens": house.limits.new_tokens,
    }


async def answer(house: Service, body: CompletionBody | ChatBody, request: Request) -> Response:
    order = house.order(body)
    house.begin(order)
    log.info("taken", extra=_about(order, request))
    if order.stream:
        return Stream(lambda: events(house, order))
    if not await first_of(_collect(house, order), gone(request.receive)):
        return Response(status_code=499)  # which nobody reads
    return JSONResponse(responses.whole(house, order))


def _about(order: ApiRequest, request: Request) -> dict[str, Any]:
    return {
        "request": request.state.request_id,
        "answer": order.id,
        "algorithm": order.algorithm,
        "texts": len(order.choices),
        "prompt_tokens": order.prompt_tokens,
    }


async def _collect(house: Service, order: ApiRequest) -> None:
    async with aclosing(house.follow(order)) as news:  # type: ignore[type-var]
        async for _ in news:
            pass


async def events(house: Service, order: ApiRequest) -> AsyncIterator[bytes]:
    """A stream always ends with its last word, even if that is an error."""
    chunks = responses.Chunks(house, order)
    try:
        for chunk in chunks.first():
            yield chunk
        async with aclosing(house.follow(order)) as all_news:  # type: ignore[type-var]
            async for news in all_news:
                for chunk in chunks.of(news):
                    yield chunk
        for chunk in chunks.last():
            yield chunk
    except Problem as problem:
        yield responses.problem_line(problem)
        yield responses.DONE


async def _refused(_: Request, problem: Exception) -> JSONResponse:
    if not isinstance(problem, Problem):
        raise problem
    return JSONResponse(problem.json(), problem.status, headers=problem.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with the first field that is, without repeating what was sent."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return await _refused(request, Problem(400, "the body is not valid JSON"))
    where = ".".join(str(each) for each in first["loc"][1:])[:200]
    message = f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')[:300]}"
    return await _refused(request, Problem(422, message, param=where or None, code=first["type"]))


async def _http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    messages = {404: "there is nothing here", 405: "this method is not allowed here"}
    message = messages.get(error.status_code, "the request could not be read")
    headers = dict(error.headers or {})
    return await _refused(request, Problem(error.status_code, message, headers=headers))


async def _failed(request: Request, _: Exception) -> JSONResponse:
    """The exception goes on to the log."""
    return await _refused(request, failed())
