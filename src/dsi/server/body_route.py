"""Routes whose JSON body is parsed and validated in a worker thread, but for small ones of which many come."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Coroutine
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from dsi.server.workers import Workers

SMALL_BODY = 1 << 14  # bytes that are parsed sooner than another thread has woken up


def body_route(workers: Workers, inline: Collection[type[BaseModel]] = ()) -> type[APIRoute]:
    """The class of routes: an endpoint with a body takes `body`, a model, and `request`; FastAPI documents it.

    Small bodies of the models `inline` are parsed at once.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            if not self.dependant.body_params:
                return super().get_route_handler()
            [field] = self.dependant.body_params
            model: type[BaseModel] = field.field_info.annotation  # type: ignore[assignment]

            async def handle(request: Request) -> Response:
                content, kind = await request.body(), request.headers.get("content-type", "")
                if model in inline and len(content) <= SMALL_BODY:
                    body = parse_body(model, content, kind)
                else:
                    body = await workers.run(parse_body, model, content, kind)
                response: Response = await self.endpoint(body=body, request=request)
                return response

            return handle

    return BodyRoute


def parse_body(model: type[BaseModel], content: bytes, media_type: str) -> BaseModel:
    """The body as a model, or FastAPI's error. What is not sent as JSON is not read as JSON."""
    try:
        value = json.loads(content) if _is_json(media_type) else content
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RequestValidationError([{**detail, "loc": ("body", *detail["loc"])} for detail in details]) from error
    except (ValueError, RecursionError) as error:
        raise RequestValidationError([{"type": "json_invalid", "loc": ("body",), "msg": "no JSON"}]) from error


def _is_json(media_type: str) -> bool:
    message = Message()
    message["content-type"] = media_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
