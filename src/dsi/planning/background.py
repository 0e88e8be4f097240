"""Results that a process of its own computes, where a text must not wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dsi.fleets.processes import FORK
from dsi.models.process_utils import close_other_fds, die_with_parent

NICENESS = 10  # of a process that computes beside a text

Key = TypeVar("Key")
Result = TypeVar("Result")


class Results(Generic[Key, Result]):
    """What a function returns, computed once for each key, in a process if asked for by `is_ready`."""

    def __init__(self, function: Callable[[Key], Result]) -> None:
        self._function = function
        self._computed: dict[Key, Result] = {}
        self._pending: tuple[Key, Any, Any] | None = None  # a key, the process, and where its result comes from
        self._killed: set[Key] = set()  # whose processes gave no result

    def __getitem__(self, key: Key) -> Result:
        if key not in self._computed:
            self._computed[key] = self._function(key)
        return self._computed[key]

    def has(self, key: Key) -> bool:
        """Whether the result is there now."""
        return key in self._computed

    def num_computed(self) -> int:
        """How many results there are by now."""
        if self._pending is not None and self._pending[-1].poll():
            self._receive(*self._pending)
        return len(self._computed)

    def is_ready(self, key: Key) -> bool:
        """Whether the result is there; if not, a process computes it, after the one that is being computed."""
        self.num_computed()
        if self._pending is None and key not in self._computed and key not in self._killed:
            self._start(key)
        return key in self._computed

    def _start(self, key: Key) -> None:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=self._send, args=(key, sender), daemon=True)
        process.start()
        sender.close()
        self._pending = key, process, receiver

    def _send(self, key: Key, sender: Any) -> None:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        close_other_fds(sender.fileno())
        os.nice(NICENESS)
        sender.send(self._function(key))

    def _receive(self, key: Key, _: Any, receiver: Any) -> None:
        try:
            self._computed[key] = receiver.recv()
        except EOFError:
            self._killed.add(key)
        self.close()

    def close(self) -> None:
        """End the process, if there is one: a text should not wait until it has ended by itself."""
        if self._pending is not None:
            _, process, receiver = self._pending
            process.kill()
            process.join()
            receiver.close()
            self._pending = None
