"""When a dead worker is replaced: at once, then after pauses that grow while its server dies without an answer."""

from __future__ import annotations

from collections import Counter
from math import inf

FIRST_PAUSE, MAX_PAUSE = 0.25, 30.0  # seconds; each pause is twice the one before
MAX_DOUBLINGS = 16


def pause_after(deaths: int) -> float:
    """The pause after a death that so many others came before, without an answer between them."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(deaths - 1, MAX_DOUBLINGS)) if deaths else 0.0


class WorkerRestarts:
    """Decides when dead servers are replaced. There is no last try. Times are seconds of one clock."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._deaths_in_a_row: Counter[str] = Counter()  # of each server since its last answer
        self._due: dict[str, float] = {}  # when each dead server is to be replaced

    def on_death(self, name: str, now: float) -> None:
        if self.enabled:
            self._due[name] = now + pause_after(self._deaths_in_a_row[name])
        self._deaths_in_a_row[name] += 1

    def on_answer(self, name: str) -> None:
        self._deaths_in_a_row.pop(name, None)

    def take_due(self, now: float) -> list[str]:
        """Return the servers to replace now, each once for a death."""
        due = [name for name, at in self._due.items() if at <= now]
        for name in due:
            del self._due[name]
        return due

    @property
    def next_due(self) -> float:
        return min(self._due.values(), default=inf)
