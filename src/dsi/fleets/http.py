"""A fleet of endpoints: engines behind URLs, all on one event loop, beside local models in threads.

A cancelled job closes its connection. An endpoint that fails a job in any way (no connection, no answer in time, an
error, an answer that cannot be read, another model) is removed, so that the job runs elsewhere, and is used again once
it says that it has its model: at once, then after pauses that grow while it fails without an answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from itertools import count

from dsi.core.messages import GREEDY, TARGET, Draft, Drafted, Event, Failed, Job, Prefilled, Verified, Verify
from dsi.fleets.base import DIED, HUNG
from dsi.fleets.endpoint import Endpoint, EndpointError
from dsi.fleets.hang_limits import HangLimits
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadCancelFlag, ThreadFleet, Worker
from dsi.fleets.worker_restarts import pause_after

OUTAGE_SECONDS = 30.0  # without any target, after which requests fail
READY = Failed(-2, "ready")  # what a worker says whose endpoint can be used again
LOST = Failed(-3, "lost")  # ...and one whose endpoint was away for too long, which it still waits for


class EndpointWorker:
    """Runs the jobs of a server on the event loop, one at a time."""

    def __init__(self, server: Server, endpoint: Endpoint, fleet: HttpFleet) -> None:
        self.server, self.endpoint = server, endpoint
        self._fleet, self._loop = fleet, endpoint.loop.loop
        self._task: asyncio.Task[Event | None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self.cause, self.last_error = DIED, ""  # of its last failure

    def start(self, job: Job, cancel_flag: ThreadCancelFlag) -> None:  # noqa: ARG002
        num_new = self._fleet.num_new(self.server.name, job)
        self._loop.call_soon_threadsafe(self._begin, job, num_new)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel_task)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_task)

    def join(self) -> None:
        """Its tasks end with the event loop."""

    def _begin(self, job: Job, num_new: int) -> None:
        self._task = self._loop.create_task(self._run(job, num_new))
        self._task.add_done_callback(self._end)  # also of a task that is cancelled before it begins

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Event | None]) -> None:
        self._fleet.messages.put((self, None if task.cancelled() else task.result(), True))

    async def _run(self, job: Job, num_new: int) -> Event | None:
        """Run a job; its last event says that it has ended, and a failure that the endpoint is to be removed."""
        fleet, name = self._fleet, self.server.name
        context, start = job.context, fleet.now()
        seconds = fleet.hang_limits.seconds(self.server.role, num_new)
        try:
            async with asyncio.timeout(seconds) as limit, aclosing(self._events(job)) as events:
                async for event in events:
                    end = fleet.now()
                    fleet._record(name, job, context, start, end, event)
                    fleet.hang_limits.observe(self.server.role, num_new, end - start)
                    if not isinstance(event, Drafted):
                        return event
                    fleet.messages.put((self, event, False))
                    context, start, num_new = context.then(event.token), end, 1
                    limit.reschedule(self._loop.time() + fleet.hang_limits.seconds(self.server.role, num_new))
        except TimeoutError:
            return self._failed(job, f"{self.endpoint.url}: no answer in time", HUNG)
        except EndpointError as error:
            return self._failed(job, str(error))
        except asyncio.CancelledError:
            fleet._record(name, job, context, start, fleet.now(), None)
            raise
        except Exception as error:  # a bug must not leave the fleet waiting
            return self._failed(job, f"{type(error).__name__}: {error}")
        return None

    async def _events(self, job: Job) -> AsyncGenerator[Event, None]:
        prefix = self.server.prefixes.lookup(job.context)
        tokens, prompt_length = list(prefix.tokens), len(job.context.origin)
        if isinstance(job, Draft):
            async with aclosing(self.endpoint.draft(tokens, job.count, job.sampling, prompt_length)) as drafts:
                async for token in drafts:
                    yield Drafted(job.id, token)
        elif isinstance(job, Verify):
            answer = await self.endpoint.verify(tokens, job.width, job.sampling, prompt_length)
            yield Verified(job.id, answer)
        else:
            await self.endpoint.verify(tokens, 1, GREEDY, prompt_length)  # its answer is not wanted, only its cache
            yield Prefilled(job.id)

    def _failed(self, job: Job, reason: str, cause: str = DIED) -> Failed:
        self.cause = cause
        return Failed(job.id, reason)

    def recover(self, deaths: int, seconds: float) -> None:
        """Say READY once the endpoint can be used again, and LOST if that takes longer than so many seconds."""
        self._loop.call_soon_threadsafe(self._begin_recovery, deaths, seconds)

    def _begin_recovery(self, deaths: int, seconds: float) -> None:
        self._recovery = self._loop.create_task(self._recover(deaths))
        self._loop.call_later(max(0.0, seconds), self._give_up)

    def _give_up(self) -> None:
        if self._recovery is not None and not self._recovery.done():
            self._fleet.messages.put((self, LOST, False))

    async def _recover(self, deaths: int) -> None:
        for failures in count(deaths):
            await asyncio.sleep(pause_after(failures))
            try:
                await self.endpoint.check()
            except EndpointError as error:
                self.last_error = str(error)
            else:
                self._fleet.messages.put((self, READY, False))
                return


class HttpFleet(ThreadFleet):
    """Servers whose model is an `Endpoint` are run by its event loop, all others by threads; it closes the endpoints.

    With `restart`, endpoints that failed come back; without any target for `outage_seconds`, requests fail.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        restart: bool = True,
        hang_seconds: float | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
        log: list[Span] | None = None,
    ) -> None:
        self.hang_limits = HangLimits(hang_seconds)  # used on the event loop alone
        self._restart, self._outage_seconds = restart, outage_seconds
        self._failures: Counter[str] = Counter()  # of each endpoint since its last answer
        self._down_since: dict[str, float] = {}  # when the first of them was
        super().__init__(servers, log=log)

    def _make_worker(self, server: Server) -> Worker:
        if isinstance(server.model, Endpoint):
            return EndpointWorker(server, server.model, self)
        return super()._make_worker(server)

    @property
    def endpoints(self) -> list[Endpoint]:
        """Each endpoint once."""
        return list(dict.fromkeys(s.model for s in self._servers.values() if isinstance(s.model, Endpoint)))

    def num_new(self, name: str, job: Job) -> int:
        return self._scheduler.num_new(name, job)

    def _handle(self, worker: Worker | None, event: Event | None, idle: bool) -> None:
        if not isinstance(worker, EndpointWorker):
            super()._handle(worker, event, idle)
        elif event is READY:
            self._readmit(worker)
        elif event is LOST:
            self._lose(worker)
        elif isinstance(event, Failed) and self._workers.get(worker.server.name) is worker:
            self._fail(worker, event)
        else:
            if event is not None:
                self._failures.pop(worker.server.name, None)
                self._down_since.pop(worker.server.name, None)
            super()._handle(worker, event, idle)

    def _fail(self, worker: EndpointWorker, event: Failed) -> None:
        """Remove an endpoint that failed a job."""
        name = worker.server.name
        self._events.append(event)
        self._scheduler.causes[worker.server.role] = event.reason
        self._scheduler.release(name, computed=False)
        self.kill(name, worker.cause)
        self._start_jobs()

    def _will_restart(self, name: str) -> bool:
        """Jobs wait for targets that may come back; without drafters a text goes on."""
        is_endpoint = name in self._servers and isinstance(self._servers[name].model, Endpoint)
        if not self._restart or not is_endpoint or self._servers[name].role != TARGET:
            return False
        return self.now() - self._down_since.get(name, self.now()) < self._outage_seconds

    def _on_worker_death(self, name: str) -> None:
        super()._on_worker_death(name)
        server = self._servers[name]
        if not self._restart or not isinstance(server.model, Endpoint):
            return
        now = self.now()
        since = self._down_since.setdefault(name, now)
        EndpointWorker(server, server.model, self).recover(self._failures[name], since + self._outage_seconds - now)
        self._failures[name] += 1

    def _readmit(self, worker: EndpointWorker) -> None:
        name, role = worker.server.name, worker.server.role
        if self._restart and name not in self._workers:
            self._workers[name] = worker
            self._scheduler.add(name, role)
            self.restarts[name] += 1
            self._start_jobs()

    def _lose(self, worker: EndpointWorker) -> None:
        """Let jobs that wait for this endpoint fail if there is no other."""
        name = worker.server.name
        if name in self._scheduler.starting:
            if worker.last_error:
                self._scheduler.causes[worker.server.role] = worker.last_error
            self._scheduler.give_up(name)
            self._events.extend(self._scheduler.orphaned())

    def check_workers(self) -> None:
        while not self.messages.empty():
            self._handle(*self.messages.get())

    def close(self) -> None:
        """Cancel every job, and close the connections."""
        self._restart = False
        super().close()
        for loop in {endpoint.loop for endpoint in self.endpoints}:
            loop.close()
