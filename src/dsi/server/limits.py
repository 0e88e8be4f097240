"""Limits on everything that a client could make grow."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dsi.core.fields import option

MAX_STOP_LENGTH = 1000  # characters of one stop string


@dataclass(frozen=True)
class Limits:
    running: int = option(
        "Texts generated at once; where they cannot share forwards up to 16, on devices 1.", 64, "max-running"
    )
    waiting: int = option("Texts in the queue, of each API key; then 429.", 256, "max-waiting")
    per_key: int | None = option("Texts of one API key at once, running or waiting; then 429.", None, "max-per-key")
    choices: int = option("Texts of one request at most: prompts times n.", 64, "max-choices")
    new_tokens: int = option("New tokens of one text at most.", 4096, "max-tokens")
    stops: int = 16  # stop strings of one request
    token_ids: int = 1024  # in a logit_bias and the like, and bad words: each forward is sent them
    body_bytes: int = option("Of one request.", 1 << 20, "max-body-bytes")
    head_bytes: int = 1 << 14  # request line and headers
    connections: int = option("At once; more are closed.", 512, "max-connections")
    seconds: float = option("Seconds until a response must be complete.", 600.0, "timeout")
    receive_seconds: float = 10.0  # for the head of a request to arrive, and then for its body
    send_seconds: float = 30.0  # for a client to read what is sent to it
    shutdown_seconds: float = option("Seconds that running requests have to end.", 10.0, "shutdown-timeout")
    traces: int = 32  # of finished requests that are kept

    @property
    def open_texts(self) -> int:
        """Of one client, running or waiting."""
        return min(self.per_key or self.running + self.waiting, self.running + self.waiting)

    @property
    def texts(self) -> int:
        """Of one request; more could never be queued."""
        return min(self.choices, self.open_texts)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("waiting", "traces") else 1
            if value is not None and not least <= value < float("inf"):
                raise ValueError(f"{field.name} {value}: must be at least {least}")
