"""What was measured of a pair of models on this machine, kept between runs in the user's cache folder.

Nothing depends on it but speed: a file that cannot be read or written is ignored, and entries expire.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dsi.models.host import cache_folder, processor_name

EXPIRES_SECONDS = 7 * 24 * 3600  # a machine may have been busy when it was measured
MAX_ENTRIES = 200
SCHEMA = 2  # of an entry


def cache_path() -> Path:
    return cache_folder() / "profiles.json"


def profile_key(*parts: object) -> str:
    """Identify a measurement by what was measured, with which torch, on which processor and how many cores."""
    host = (processor_name(), len(os.sched_getaffinity(0)), version("torch"), SCHEMA)
    return sha256(repr((*parts, host)).encode()).hexdigest()[:32]


def model_identity(path: str) -> tuple[object, ...]:
    """A model's name on the hub, or its files with their sizes and times."""
    files = sorted(Path(path).glob("*")) if Path(path).is_dir() else [Path(path)]
    return path, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


def read_profile(key: str) -> dict[str, Any]:
    """Return what is kept under this key; empty if there is nothing, or it has expired."""
    return _unexpired(_read().get(key, {}))


def keep_profile(key: str, seconds: float = EXPIRES_SECONDS, **values: Any) -> None:
    """Add values to the entry of this key; it expires after so many seconds, or with what it has."""
    entries = _read()
    entry = _unexpired(entries.pop(key, {}))
    began = time.time() - EXPIRES_SECONDS + seconds
    latest = sorted(entries, key=lambda name: float(entries[name]["time"]))[-MAX_ENTRIES + 1 :]
    kept = {name: entries[name] for name in latest}
    kept[key] = {**entry, **values, "time": min(began, entry.get("time", began))}
    with suppress(OSError):
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(kept))
        partial.replace(path)


def _read() -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(cache_path().read_text())
    except (OSError, ValueError):
        return {}
    entries = entries if isinstance(entries, dict) else {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict) and _has_time(entry)}


def _unexpired(entry: dict[str, Any]) -> dict[str, Any]:
    return entry if entry and time.time() - entry["time"] < EXPIRES_SECONDS else {}


def _has_time(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("time"), int | float)
