"""Errors as OpenAI's clients expect them: a status and an error object, never a path or a traceback."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from dsi.engine.deployment import ContextLengthError

TYPES = {  # by status; others are invalid_request_error
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    424: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error that the client gets as the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def json(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorObject


def queue_full(open: int, limit: int, seconds: int) -> ApiError:
    message = f"{open} texts of at most {limit} are being written or wait for their turn: try again in {seconds} s"
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})


def deadline_exceeded(seconds: float) -> ApiError:
    """With a status that clients do not retry: the next attempt would take as long, and add to the load."""
    return ApiError(424, f"the answer was not complete after {seconds:g} s", code="deadline_exceeded")


def context_length_exceeded(error: ContextLengthError, param: str | None = None) -> ApiError:
    return ApiError(400, str(error), param=param, code="context_length_exceeded")


def no_target() -> ApiError:
    message = "no target server is up: new ones are being started"
    return ApiError(503, message, code="no_target", headers={"retry-after": "2"})


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


def engine_failed() -> ApiError:
    return ApiError(503, "no server could finish this text", code="engine_failed")


def internal_error() -> ApiError:
    return ApiError(500, "the server failed; its log says why", code="internal_error")
