"""Where a server listens, and who has a key: known before anything heavy is loaded."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

KEYS = "DSI_API_KEYS"  # in the environment: keys, separated by commas


def read_keys(path: Path | None) -> list[str]:
    """API keys of a file, one on a line, or of the environment."""
    if path is None:
        found = os.environ.get(KEYS, "")
        keys = [key for each in found.split(",") if (key := each.strip())]
        if found and not keys:
            raise ValueError(f"${KEYS}: has no API key in it")
        return keys
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a file of API keys") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path}: has no API key in it")
    return keys


def listen(host: str, port: int) -> socket.socket:
    """A socket, before any model is loaded: that an address is taken should be known at once."""
    if not 0 <= port < 65536:
        raise ValueError(f"port {port}: must be between 0 and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name, or asyncio does not know that it may send small pieces at once, and each waits for 40 ms.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, UnicodeError) as error:
        found.close()
        reason = error.strerror if isinstance(error, OSError) else "no such name"
        raise ValueError(f"{host}:{port}: cannot listen there ({str(reason).lower()})") from error
    return found


def is_local(found: socket.socket) -> bool:
    return ip_address(found.getsockname()[0]).is_loopback
