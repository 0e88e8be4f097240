"""What a process does first: a forked one ties its life to its parent's, closes inherited descriptors, takes a name."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal

STDERR = 2


def die_with_parent() -> None:
    """PR_SET_PDEATHSIG: the kernel kills this process when its parent dies, however it dies."""
    if hasattr(signal, "SIGKILL"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """PR_SET_NAME: what `ps` and `top` show, up to 15 characters."""
    if hasattr(signal, "SIGKILL"):
        ctypes.CDLL(None).prctl(15, name.encode())


def close_other_fds(keep: int) -> None:
    """Close inherited descriptors, but the standard ones: they would keep the parent's connections open."""
    for first, last in ((STDERR + 1, keep), (keep + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(first, last)


def freeze_objects() -> None:
    """Let no collection of garbage traverse the modules and weights that are loaded by now: it takes 0.1 s and more.

    They are thawed at the end, or libraries that look for leaks then would report them.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
