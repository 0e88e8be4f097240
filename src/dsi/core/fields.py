"""Fields of configuration dataclasses with help texts, from which command-line options are derived."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(help: str, default: Any = MISSING, name: str | None = None) -> Any:
    """A field with a help text; `name` is that of its option where it differs from the field's."""
    metadata = {"help": help} if name is None else {"help": help, "option": name}
    return field(default=default, metadata=metadata)
