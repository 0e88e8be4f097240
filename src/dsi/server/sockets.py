"""The socket that a server listens on, opened before any model is loaded."""

from __future__ import annotations

import socket
from ipaddress import ip_address


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket first of all, so that an address in use is reported at once."""
    if not 0 <= port < 65536:
        raise ValueError(f"port {port}: must be between 0 and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit IPPROTO_TCP asyncio sets TCP_NODELAY; else each small write waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "no such name"
        raise ValueError(f"{host}:{port}: cannot listen there ({str(reason).lower()})") from error
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0]).is_loopback
