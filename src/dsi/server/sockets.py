"""The socket that a server listens on, opened before any model is loaded, and the files that connections need."""

from __future__ import annotations

import logging
import resource
import socket
from ipaddress import ip_address

log = logging.getLogger("dsi.server")

BACKLOG = 256  # connections that are accepted at once, before any of them can be closed
OTHER_FILES = 128  # of the servers, the models and the log


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


def raise_file_limit(connections: int) -> None:
    """Raise the limit on open files to what so many connections need, or as far as it goes and say so."""
    needed = connections + BACKLOG + OTHER_FILES
    soft, hard = (
        needed if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < min(needed, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if hard < needed:
        message = "too few files may be open for --max-connections: raise ulimit -n"
        log.warning(message, extra={"connections": connections, "files": hard, "needed": needed})
