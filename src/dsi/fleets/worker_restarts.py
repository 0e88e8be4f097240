"""Where dead workers are replaced: each time one dies, unless it keeps dying without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MAX_RESTARTS = 5  # of one server without an answer between them, after which it stays dead


class WorkerRestarts:
    """Counts the deaths of each server's workers and has dead ones replaced."""

    def __init__(self, replace_worker: Callable[[str], None], enabled: bool) -> None:
        self._replace_worker, self.enabled = replace_worker, enabled
        self._deaths_in_a_row: Counter[str] = Counter()  # of each server since its last answer

    def allowed(self, name: str) -> bool:
        """Whether the next worker of this server that dies is replaced."""
        return self.enabled and self._deaths_in_a_row[name] < MAX_RESTARTS

    def on_death(self, name: str) -> None:
        replaced = self.allowed(name)
        self._deaths_in_a_row[name] += 1
        if replaced:
            self._replace_worker(name)

    def on_answer(self, name: str) -> None:
        self._deaths_in_a_row.pop(name, None)
