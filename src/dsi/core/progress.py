"""How long-running work reports progress: a `Progress` for each unit it finishes, a `Status` for what it does now."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[], object]
Status = Callable[[str], object]


def no_progress() -> None:
    """The default: report to nobody."""


def no_status(stage: str) -> None:
    """The default: report to nobody."""
