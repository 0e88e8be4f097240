"""Limits on everything that a client could make grow."""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_STOP_LENGTH = 1000  # characters of one stop string


@dataclass(frozen=True)
class Limits:
    running: int = 16  # texts generated at once
    waiting: int = 64  # texts in the queue; beyond that, 429
    choices: int = 16  # texts of one request: its prompts times n
    new_tokens: int = 4096  # of one text
    stops: int = 16  # stop strings of one request
    body_bytes: int = 1 << 20
    head_bytes: int = 1 << 14  # request line and headers
    connections: int = 512
    seconds: float = 600.0  # from a request to the end of its response
    receive_seconds: float = 10.0  # for the head of a request to arrive, and then for its body
    send_seconds: float = 30.0  # for a client to read what is sent to it
    shutdown_seconds: float = 10.0  # for running requests to end
    traces: int = 32  # of finished requests that are kept

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("waiting", "traces") else 1
            if not least <= value < float("inf"):
                raise ValueError(f"{field.name} {value}: must be at least {least}")
