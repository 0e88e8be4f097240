"""What a forked process does first: it goes when its parent goes, and holds nothing of its parent's open."""

from __future__ import annotations

import ctypes
import os
import signal

STDERR = 2


def die_with_parent() -> None:
    """PR_SET_PDEATHSIG: even a parent that is killed leaves no process behind."""
    if hasattr(signal, "SIGKILL"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def close_other_fds(wire: int) -> None:
    """Close what the parent had open: a connection of its own would stay open until this process ends."""
    for first, after in ((STDERR + 1, wire), (wire + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(first, after)
