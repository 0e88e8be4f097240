"""How long-running work reports progress: it calls a `Progress` once for each unit it finishes."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[], object]


def no_progress() -> None:
    """The default: report to nobody."""
