"""Fields of configuration dataclasses with help texts, from which command-line options are derived."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(help: str, default: Any = MISSING, name: str | None = None, repeatable: bool = False) -> Any:
    """A field with a help text; `name` is that of its option where it differs from the field's.

    A `repeatable` option of a field that is no tuple gives it one.
    """
    metadata: dict[str, Any] = {"help": help, "repeatable": repeatable}
    return field(default=default, metadata=metadata if name is None else {**metadata, "option": name})
