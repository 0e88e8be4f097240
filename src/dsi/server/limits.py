"""How much a server takes on: everything that a client could make grow has a bound."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    running: int = 16  # texts being written at once
    waiting: int = 64  # texts that wait for their turn; beyond that, 429
    choices: int = 16  # texts of one request: its prompts times n
    new_tokens: int = 4096  # of one text
    stops: int = 16  # stop strings of one request, and a thousand characters each
    body_bytes: int = 1 << 20
    head_bytes: int = 1 << 14  # the head of a request
    connections: int = 512
    seconds: float = 600.0  # from a request to the end of its answer
    arrival_seconds: float = 10.0  # for the head of a request to arrive, and then for its body
    taking_seconds: float = 30.0  # for a client to take what is sent to it
    shutdown_seconds: float = 10.0  # for running answers to end
    traces: int = 32  # of finished requests that are kept

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("waiting", "traces") else 1
            if not least <= value < float("inf"):
                raise ValueError(f"{field.name} {value}: must be at least {least}")


LONGEST_STOP = 1000
