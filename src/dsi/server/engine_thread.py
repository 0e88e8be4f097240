"""Where requests wait for the engine, which runs in a thread of its own and is touched by no other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, Thread

from dsi.core.generation import Tally
from dsi.core.messages import TopLogprobs
from dsi.core.request import Request
from dsi.core.sequence import TokenSequence
from dsi.core.spec import Decision
from dsi.engine.engine import Engine
from dsi.fleets.loop import Run
from dsi.fleets.spans import Span
from dsi.server.errors import busy, closing
from dsi.server.limits import Limits

log = logging.getLogger("dsi.serve")

TOLD_EVERY = 0.04  # seconds between two words on what the servers do, where no token has come
SPANS = 10_000  # forwards of one request that are remembered


@dataclass(slots=True)
class EngineOutput:
    """News of a ticket. Times are in seconds since it was taken up."""

    tokens: Sequence[int] = ()
    origins: Sequence[str] = ()
    notes: Sequence[TopLogprobs] = ()
    at: float = 0.0
    root: int = 0
    tip: int = 0
    spans: Sequence[Span] = ()
    decisions: Sequence[tuple[float, Decision]] = ()
    ended: str | None = None  # stop, length or cancelled, once it has
    error: str | None = None
    died: bool = False  # whether a server has, since the last news


@dataclass(eq=False)
class ServerJob:
    """One text to be written; news of it goes into `news`, in the thread of `loop`."""

    requests: deque[Request]  # one after the other: to score the prompt, perhaps, and to go on from it
    news: asyncio.Queue[tuple[ServerJob, EngineOutput]]
    loop: asyncio.AbstractEventLoop
    trace: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    began: float = 0.0  # by the fleet's clock
    queued: float = 0.0  # seconds
    run: Run | None = None
    over: bool = False  # its last news is out
    crowded: bool = False  # whether it ever had to share
    seen: int = 0  # tokens told
    told: float = 0.0  # when
    shown: int = 0  # spans told
    turned: int = 0  # decisions told
    deaths: int = 0  # told
    spans: list[Span] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        return self.run.generation.tally if self.run else Tally()

    @property
    def origins(self) -> list[str]:
        return self.run.generation.origins if self.run else []

    @property
    def decisions(self) -> tuple[tuple[float, Decision], ...]:
        """Of `auto`, each with its seconds since the ticket was taken up."""
        if self.run is None:
            return ()
        late = float(self.run.began) - self.began
        return tuple((late + float(at), each) for at, each in zip(self.run.turns, self.run.generation.decisions))

    def tell(self, update: EngineOutput) -> None:
        with suppress(RuntimeError):  # nobody is left to hear it
            self.loop.call_soon_threadsafe(self.news.put_nowait, (self, update))


class EngineThread:
    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.open = 0  # tickets that wait or are being written
        self._lock = Lock()
        self._closing = False
        self._orders: deque[Callable[[], None]] = deque()  # for the engine's thread
        self._signal = Event()
        self._waiting: deque[ServerJob] = deque()
        self._running: dict[Run, ServerJob] = {}
        self._texts: dict[TokenSequence, ServerJob] = {}  # by which a span knows whose it is
        self._log: list[Span] = []
        engine.loaded.fleet.log = self._log
        self._thread = Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return max(0, self.open - len(self._running))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def submit(self, tickets: Sequence[ServerJob]) -> None:
        """All of them or none."""
        with self._lock:
            if self._closing or not self._thread.is_alive():
                raise closing()
            if self.open + len(tickets) > self.limits.running + self.limits.waiting:
                raise busy(self.open)
            self.open += len(tickets)
        self._order(lambda: self._waiting.extend(tickets))

    def cancel(self, tickets: Iterable[ServerJob]) -> None:
        """Nobody wants these any longer. Those that have ended do not mind."""
        for ticket in tickets:
            if not ticket.over:
                self._order(partial(self._drop, ticket))

    def refuse(self) -> None:
        """Take no more."""
        with self._lock:
            self._closing = True

    def cut(self) -> None:
        """End all that is running or waiting."""
        self._order(self._cut)

    def close(self) -> None:
        self.refuse()
        self.cut()
        self._order(self._stop)
        self._thread.join(self.limits.shutdown_seconds)
        self.engine.close()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._signal.set()
        with suppress(OSError):  # the fleet is closed
            self.engine.fleet.wake()

    # From here on: the engine's thread.

    def _work(self) -> None:
        self._on = True
        while self._on:
            try:
                self._turn()
            except Exception as error:  # never a hang: whoever waits hears of it, and the next is served
                log.exception("the engine failed")
                self._fail(f"{type(error).__name__}: {error}")

    def _turn(self) -> None:
        while self._orders:
            self._orders.popleft()()
        self._admit()
        if self._running:
            self._step()
        elif self._on and not self._orders:
            self._signal.wait()
            self._signal.clear()

    def _fail(self, why: str) -> None:
        for ticket in list(self._running.values()):
            if ticket.run is not None and not ticket.run.done:
                with suppress(Exception):
                    self.engine.cancel(ticket.run)
            self._end(ticket, EngineOutput(ended="cancelled", error=why))

    def _stop(self) -> None:
        self._on = False

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.running:
            ticket = self._waiting.popleft()
            ticket.queued = time.perf_counter() - ticket.submitted
            ticket.began = float(self.engine.fleet.now())
            ticket.deaths = self._deaths()
            try:
                self._begin(ticket)
            except Exception as error:
                self._end(ticket, EngineOutput(ended="cancelled", error=f"{type(error).__name__}: {error}"))

    def _begin(self, ticket: ServerJob) -> None:
        ticket.run = self.engine.submit(ticket.requests.popleft())
        self._running[ticket.run] = ticket
        self._texts[ticket.run.generation.origin] = ticket

    def _leave(self, ticket: ServerJob) -> None:
        if ticket.run is not None:
            self._running.pop(ticket.run, None)
            self._texts.pop(ticket.run.generation.origin, None)

    def _step(self) -> None:
        self.engine.step()
        self._sort_spans()
        crowded = len(self._running) > 1
        for run, ticket in list(self._running.items()):
            ticket.crowded = ticket.crowded or crowded
            if run.done or len(run.tokens) > ticket.seen or (ticket.trace and self._is_due(ticket)):
                self._report(ticket, run)

    def _is_due(self, ticket: ServerJob) -> bool:
        return len(ticket.spans) > ticket.shown and self._since(ticket) - ticket.told > TOLD_EVERY

    def _since(self, ticket: ServerJob) -> float:
        return float(self.engine.fleet.now()) - ticket.began

    def _sort_spans(self) -> None:
        for span in self._log:
            ticket = self._texts.get(span.context.origin)
            if ticket is not None and len(ticket.spans) < SPANS:
                ticket.spans.append(span)
        self._log.clear()

    def _report(self, ticket: ServerJob, run: Run) -> None:
        generation, seen = run.generation, ticket.seen
        root, tip = generation.reached
        update = EngineOutput(
            tokens=run.tokens[seen:],
            origins=generation.origins[seen:],
            notes=generation.notes[seen:],
            at=self._since(ticket),
            root=root,
            tip=tip,
            ended=generation.finish_reason,
            error=None if run.error is None else str(run.error),
        )
        if ticket.trace:
            update.spans, ticket.shown = ticket.spans[ticket.shown :], len(ticket.spans)
            update.decisions = ticket.decisions[ticket.turned :]
            ticket.turned += len(update.decisions)
            deaths = self._deaths()
            update.died, ticket.deaths = deaths > ticket.deaths, deaths
        ticket.seen, ticket.told = len(run.tokens), update.at
        if not run.done:
            ticket.tell(update)
        elif ticket.requests and not update.error:
            update.ended = None
            ticket.tell(update)
            self._leave(ticket)
            self._begin(ticket)
        else:
            self._end(ticket, update)

    def _deaths(self) -> int:
        return sum(self.engine.loaded.fleet.deaths.values())

    def _drop(self, ticket: ServerJob) -> None:
        if ticket.over:
            return
        if ticket.run is None:
            self._waiting.remove(ticket)
        elif not ticket.run.done:
            self.engine.cancel(ticket.run)
        self._end(ticket, EngineOutput(ended="cancelled"))

    def _cut(self) -> None:
        for ticket in [*self._waiting, *self._running.values()]:
            self._drop(ticket)

    def _end(self, ticket: ServerJob, update: EngineOutput) -> None:
        ticket.over = True
        self._leave(ticket)
        with self._lock:
            self.open -= 1
        ticket.tell(update)
