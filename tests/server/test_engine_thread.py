"""Where requests wait for the engine: turns, bounds, news, and an end for everybody."""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from dsi.core.messages import Sampling
from dsi.core.policies import autoregressive, distributed, load_aware
from dsi.core.request import Request
from dsi.core.spec import SpecConfig
from dsi.engine.build import Deployment
from dsi.engine.engine import Engine
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.server.engine_thread import EngineOutput, EngineThread, ServerJob
from dsi.server.errors import Problem
from dsi.server.limits import Limits

SETTING = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=40)
LIMITS = Limits(running=2, waiting=3, shutdown_seconds=5)


def plain(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    [done] = EngineLoop(SETTING.simulated(3)).run(Request(prompt, tokens, autoregressive()))
    return done.tokens


@pytest.fixture
def desk() -> Iterator[EngineThread]:
    fleet = ProcessFleet(SETTING.servers(3, unit=1000))
    text: Any = None
    at = EngineThread(Engine(Deployment(fleet, text, 0, 2, LatencyModel(4, 1)), "dsi", None, None), LIMITS)
    yield at
    at.close()


def request(desk: EngineThread, last: int, tokens: int = 30) -> Request:
    policy = load_aware(distributed(2), SpecConfig(lookahead=2), desk.engine.crowd)
    return Request((1, 2, last), tokens, policy)


def ticket(desk: EngineThread, last: int, tokens: int = 30, trace: bool = False) -> ServerJob:
    news: asyncio.Queue[tuple[ServerJob, EngineOutput]] = asyncio.Queue()
    return ServerJob(deque([request(desk, last, tokens)]), news, asyncio.get_running_loop(), trace)


async def heard(of: ServerJob) -> list[EngineOutput]:
    """All its news."""
    updates: list[EngineOutput] = []
    async with asyncio.timeout(30):
        while not updates or updates[-1].ended is None:
            updates.append((await of.news.get())[1])
    return updates


def text(updates: list[EngineOutput]) -> tuple[int, ...]:
    return tuple(token for update in updates for token in update.tokens)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_every_ticket_gets_its_own_text_and_its_turn(desk: EngineThread) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last) for last in range(5)]
        desk.submit(tickets)
        for last, each in enumerate(tickets):
            updates = await heard(each)
            assert text(updates) == plain((1, 2, last), 30)
            assert updates[-1].ended == "length"
            assert len(text(updates)) == sum(len(update.origins) for update in updates)
        assert desk.open == 0
        assert tickets[4].queued > 0

    asyncio.run(story())


def test_beyond_the_queue_all_tickets_of_a_request_are_refused(desk: EngineThread) -> None:
    async def story() -> None:
        first = [ticket(desk, last, 2000) for last in range(4)]
        desk.submit(first)
        with pytest.raises(Problem) as refused:
            desk.submit([ticket(desk, 7), ticket(desk, 8)])
        assert refused.value.status == 429
        desk.submit([ticket(desk, 9, 3)])
        assert desk.open == 5
        desk.cancel(first)
        await until(lambda: desk.open == 0)

    asyncio.run(story())


def test_a_cancelled_ticket_makes_room_whether_it_runs_or_waits(desk: EngineThread) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last, 5000) for last in range(4)]
        desk.submit(tickets)
        await until(lambda: desk.running == 2)
        desk.cancel([tickets[3], tickets[0]])
        assert (await heard(tickets[3]))[-1].ended == "cancelled"
        assert (await heard(tickets[0]))[-1].ended == "cancelled"
        await until(lambda: desk.open == 2)
        desk.cancel(tickets)  # twice is once
        await until(lambda: desk.open == 0)
        assert (desk.running, desk.waiting) == (0, 0)
        last = ticket(desk, 7, 5)
        desk.submit([last])
        assert text(await heard(last)) == plain((1, 2, 7), 5)

    asyncio.run(story())


def test_an_idle_desk_wakes_at_once(desk: EngineThread) -> None:
    async def story() -> None:
        for last in range(3):
            each = ticket(desk, last, 2)
            desk.submit([each])
            assert text(await heard(each)) == plain((1, 2, last), 2)
            await asyncio.sleep(0.05)

    asyncio.run(story())


def test_a_trace_has_the_forwards_of_its_own_request(desk: EngineThread) -> None:
    async def story() -> None:
        one, other = ticket(desk, 1, trace=True), ticket(desk, 2, trace=True)
        desk.submit([one, other])
        for each, last in ((one, 1), (other, 2)):
            spans = [span for update in await heard(each) for span in update.spans]
            assert {tuple(span.context.origin) for span in spans} == {(1, 2, last)}
            assert {span.kind for span in spans} >= {"draft", "verify"}

    asyncio.run(story())


def test_a_ticket_may_score_its_prompt_first(desk: EngineThread) -> None:
    async def story() -> None:
        each = ticket(desk, 5, 4)
        each.requests.appendleft(Request((1, 2, 5), 0, autoregressive(), Sampling(logprobs=1)))
        desk.submit([each])
        updates = await heard(each)
        assert (updates[0].tokens, updates[0].ended) == ([], None)
        assert text(updates) == plain((1, 2, 5), 4)

    asyncio.run(story())


def test_servers_may_die_while_many_write(desk: EngineThread) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last, 60, trace=True) for last in range(5)]
        desk.submit(tickets)
        fleet = desk.engine.loaded.fleet
        assert isinstance(fleet, ProcessFleet)
        for _ in range(6):
            await asyncio.sleep(0.04)
            os.kill(next(iter(fleet._workers.values())).process.pid or 0, signal.SIGKILL)
        died = False
        for last, each in enumerate(tickets):
            updates = await heard(each)
            assert text(updates) == plain((1, 2, last), 60)
            died = died or any(update.died for update in updates)
        assert died

    asyncio.run(story())


def test_what_cannot_begin_is_told_so_and_hurts_nobody_else(desk: EngineThread) -> None:
    async def story() -> None:
        bad, good = ticket(desk, 1, -3), ticket(desk, 2)
        desk.submit([bad, good])
        assert (await heard(bad))[-1].error == "ValueError: max_new_tokens -3: must be at least 1"
        assert text(await heard(good)) == plain((1, 2, 2), 30)

    asyncio.run(story())


def test_when_no_target_is_left_everybody_hears_of_it(desk: EngineThread) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last, 5000) for last in range(3)]
        desk.submit(tickets)
        await until(lambda: desk.running == 2)
        desk.engine.loaded.fleet.__dict__["_restart"] = False
        for seat in list(desk.engine.loaded.fleet.__dict__["_workers"].values()):
            os.kill(seat.process.pid, signal.SIGKILL)
        for each in tickets:
            assert "no target server is left" in ((await heard(each))[-1].error or "")

    asyncio.run(story())


def test_a_desk_that_closes_cuts_what_is_left_and_takes_nothing_more(desk: EngineThread) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last, 5000) for last in range(4)]
        desk.submit(tickets)
        await until(lambda: desk.running == 2)
        began = time.monotonic()
        await asyncio.to_thread(desk.close)
        assert time.monotonic() - began < 5
        for each in tickets:
            assert (await heard(each))[-1].ended == "cancelled"
        with pytest.raises(Problem) as refused:
            desk.submit([ticket(desk, 9)])
        assert refused.value.status == 503

    asyncio.run(story())


def test_an_engine_that_fails_is_told_to_all_and_serves_the_next(
    desk: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        tickets = [ticket(desk, last, 5000) for last in range(2)]
        desk.submit(tickets)
        await until(lambda: desk.running == 2)
        with monkeypatch.context() as broken:
            broken.setattr(EngineLoop, "step", lambda _: 1 / 0)
            for each in tickets:
                assert (await heard(each))[-1].error == "ZeroDivisionError: division by zero"
        good = ticket(desk, 3)
        desk.submit([good])
        assert text(await heard(good)) == plain((1, 2, 3), 30)
        assert desk.open == 0

    asyncio.run(story())
