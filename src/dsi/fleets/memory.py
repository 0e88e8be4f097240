"""What memory a process and its children take, and how much of it they share: forked workers share the weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KIB_PER_MIB = 1024


@dataclass(frozen=True)
class MemoryUse:
    """Memory of several processes in MiB: pages that they share count once."""

    total: float
    shared: float  # of the total, what more than one process uses
    processes: int

    def __str__(self) -> str:
        return f"{self.total:.0f} MiB in {self.processes} processes, {self.shared:.0f} MiB of it shared"

    def json(self) -> dict[str, float]:
        return {"total": round(self.total, 1), "shared": round(self.shared, 1), "processes": self.processes}


def memory_use(workers: Iterable[int]) -> MemoryUse | None:
    """Read the memory of this process, of its workers and their descendants; None where the kernel does not say."""
    pids = os.getpid(), *(pid for worker in workers for pid in process_tree(worker))
    pages = [rollup for pid in pids if (rollup := _rollup(pid))]
    if not pages:
        return None
    total = sum(rollup["Pss"] for rollup in pages)
    private = sum(rollup["Private_Clean"] + rollup["Private_Dirty"] for rollup in pages)
    return MemoryUse(total / KIB_PER_MIB, max(0, total - private) / KIB_PER_MIB, len(pages))


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: list[int] = []
    for file in (PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # its thread has ended
            children += map(int, file.read_text().split())
    return [pid, *(descendant for child in children for descendant in process_tree(child))]


def _rollup(pid: int) -> dict[str, int]:
    """Sums over the mappings of a process in KiB, by name; empty once it has ended."""
    with suppress(OSError):
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return {}
