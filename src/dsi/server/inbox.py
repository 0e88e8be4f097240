"""Outputs on their way from the engine thread to the event loop, which is woken once for all that have come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from dsi.server.engine_thread import EngineOutput

Receive = Callable[[EngineOutput], None]


class Inbox:
    """The engine thread puts outputs in; the event loop hands each to its receiver, in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: deque[tuple[Receive, EngineOutput]] = deque()
        self._woken = False  # and not yet at work

    def put(self, receive: Receive, output: EngineOutput) -> None:
        self._outputs.append((receive, output))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # first: what comes from now on wakes the loop again
        while self._outputs:
            receive, output = self._outputs.popleft()
            receive(output)
