"""This machine: the name of its processor, and the folder where what was compiled and measured for it is kept."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dsi"


def processor_name() -> str:
    return _cpuinfo("model name") or platform.machine()


def processor_features() -> str:
    """The instruction sets of the processor, whose name alone may not tell them."""
    return _cpuinfo("flags") or _cpuinfo("Features")


@cache
def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith(field)), "")
