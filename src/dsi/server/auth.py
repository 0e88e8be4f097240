"""API keys and allowed origins, read before any model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

KEYS_VARIABLE = "DSI_API_KEYS"  # in the environment: keys, separated by commas

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)


def check_origins(origins: Iterable[str]) -> list[str]:
    """What browsers send as the Origin of a page, without the slash that people copy with it; `*` is any."""
    stripped = [origin.strip().rstrip("/").lower() for origin in origins]
    for origin in stripped:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(f"cors-origin {origin!r}: must be a scheme and a host, as https://example.org, or *")
    return stripped


def read_keys(path: Path | None) -> list[str]:
    """Read API keys from a file, one on a line, or from the environment."""
    if path is None:
        value = os.environ.get(KEYS_VARIABLE, "")
        keys = [key for part in value.split(",") if (key := part.strip())]
        if value and not keys:
            raise ValueError(f"${KEYS_VARIABLE}: has no API key in it")
        return keys
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a file of API keys") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ValueError(f"{path}: has no API key in it")
    return keys
