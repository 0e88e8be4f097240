"""Addresses of endpoints: `http://host:8000`, or `vllm+http://host:8000` where the kind is given."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

VLLM, SGLANG, LLAMA_CPP, DSI = KINDS = ("vllm", "sglang", "llama.cpp", "dsi")


@dataclass(frozen=True)
class EndpointAddress:
    url: str  # without a slash at its end
    kind: str | None = None  # None: the endpoint is asked

    def __str__(self) -> str:
        return self.url


def is_address(name: str) -> bool:
    """Whether the name of a model is that of an endpoint."""
    return "://" in name


def split_addresses(names: str) -> tuple[str, ...]:
    """The addresses in a list with commas; none of a local model."""
    return tuple(name.strip() for name in names.split(",")) if is_address(names) else ()


def parse_address(text: str) -> EndpointAddress:
    """Parse the address of an endpoint, or raise ValueError."""
    scheme, _, rest = text.partition("://")
    kind, plus, transport = scheme.rpartition("+")
    if plus and kind not in KINDS:
        raise ValueError(f"endpoint {text!r}: its kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {kind!r}")
    if transport not in ("http", "https"):
        raise ValueError(f"endpoint {text!r}: must begin with http:// or https://, or with its kind, as vllm+http://")
    try:
        parts = urlsplit(f"{transport}://{rest}")
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.query or parts.fragment or parts.username:
        raise ValueError(f"endpoint {text!r}: must be a host with a port, as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return EndpointAddress(f"{parts.scheme}://{parts.netloc}{path}", kind or None)
