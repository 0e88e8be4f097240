"""The engine thread: queue limits, outputs, cancellation, failures, and that no other thread touches the engine."""

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import pytest

from dsi.core.generation import Generation
from dsi.core.messages import GREEDY
from dsi.core.policies import autoregressive
from dsi.core.request import Request
from dsi.core.scheduler import Scheduler
from dsi.core.single_forward import SingleForward
from dsi.core.spec import SpecConfig
from dsi.engine.deployment import Deployment
from dsi.engine.engine import Engine
from dsi.fleets.loop import ActiveRequest, EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.server.app import make_app
from dsi.server.engine_thread import EngineOutput, EngineThread, GenerationJob, VerificationJob
from dsi.server.errors import ApiError
from dsi.server.fair_queue import FairQueue
from dsi.server.limits import Limits

CONFIG = SimulationConfig(LatencyModel(4.0, 1.0), 0.7, sp=2, tokens=40)
NO_TOKENIZER: Any = type("NoTokenizer", (), {"eos_token_ids": frozenset()})
LIMITS = Limits(running=2, waiting=3, shutdown_seconds=5)


def plain(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    [done] = EngineLoop(CONFIG.simulated(3)).run(Request(prompt, tokens, autoregressive()))
    return done.tokens


@pytest.fixture
def fleet() -> ProcessFleet:
    return ProcessFleet(CONFIG.servers(3, unit=1000))


@pytest.fixture
def engine_thread(fleet: ProcessFleet) -> Iterator[EngineThread]:
    thread = EngineThread(
        Engine(Deployment(fleet, NO_TOKENIZER, 0, 2, LatencyModel(4, 1)), SpecConfig("dsi", 2, 2)), LIMITS
    )
    yield thread
    thread.close()


class Client:
    """A job and the outputs that it receives."""

    ended: ClassVar[list[tuple[int, ...]]] = []  # the prompts of all, as their jobs end

    def __init__(self, last: int, tokens: int = 30, **options: Any) -> None:
        self.prompt = (1, 2, last)
        self._tokens = tokens
        self._outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(output: EngineOutput) -> None:
            if output.finish_reason:
                Client.ended.append(self.prompt)
            loop.call_soon_threadsafe(self._outputs.put_nowait, output)

        self.job = GenerationJob(self.prompt, tokens, SpecConfig(), GREEDY, deliver, **options)

    async def outputs(self) -> list[EngineOutput]:
        """All of them, up to the last."""
        outputs: list[EngineOutput] = []
        async with asyncio.timeout(30):
            while not outputs or outputs[-1].finish_reason is None:
                outputs.append(await self._outputs.get())
        return outputs

    async def last(self) -> EngineOutput:
        return (await self.outputs())[-1]

    async def check_tokens(self) -> list[EngineOutput]:
        outputs = await self.outputs()
        assert text(outputs) == plain(self.prompt, self._tokens)
        return outputs


def text(outputs: list[EngineOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def jobs(*clients: Client) -> list[GenerationJob]:
    return [client.job for client in clients]


async def until(engine_thread: EngineThread, running: int, waiting: int) -> None:
    async with asyncio.timeout(10):
        while True:
            status = await engine_thread.status()
            if (status.running, status.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.005)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_engine_thread_generates_each_jobs_own_text_in_turn(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        clients = [Client(last) for last in range(5)]
        await engine_thread.submit(jobs(*clients))
        for client in clients:
            outputs = await client.check_tokens()
            assert outputs[-1].finish_reason == "length"
            assert len(text(outputs)) == sum(len(output.origins) for output in outputs)
            assert all(output.stats is None for output in outputs[:-1])
            stats = outputs[-1].stats
            assert stats is not None
            assert stats.completion.tokens == text(outputs)
            assert len(stats.completion.times) == len(stats.completion.origins) == 30
            assert (stats.queued > 0, list(stats.servers)) == (True, ["drafter", "target-1", "target-2"])
        await until(engine_thread, 0, 0)

    run(scenario)


def test_engine_thread_delivers_more_tokens_together_the_more_jobs_run(
    engine_thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an interval longer than the texts take, all tokens of one after the first come with its end."""
    monkeypatch.setattr("dsi.server.engine_thread.OUTPUT_INTERVAL", 30.0)
    monkeypatch.setattr("dsi.server.engine_thread.MAX_OUTPUT_INTERVAL", 30.0)

    async def scenario() -> None:
        first, second = Client(1), Client(2, 90)
        await engine_thread.submit(jobs(first, second))
        assert len(await first.check_tokens()) == 2
        assert len(await second.check_tokens()) > 4  # it was alone in the end, and nothing was held back

    run(scenario)


def verification(prompt: tuple[int, ...], num_positions: int) -> tuple[VerificationJob, asyncio.Queue[EngineOutput]]:
    outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    deliver = lambda output: loop.call_soon_threadsafe(outputs.put_nowait, output)  # noqa: E731
    return VerificationJob(prompt, num_positions, 2, GREEDY, deliver), outputs


def test_engine_thread_verifies_a_text_in_one_output(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        written = plain((1, 2), 6)
        for end in range(6):
            job, outputs = verification((1, 2, *written[:end]), end + 1)
            engine_thread.post(job)
            output = await asyncio.wait_for(outputs.get(), 10)
            assert (tuple(output.tokens), output.finish_reason, output.stats) == (written[: end + 1], "length", None)
        await until(engine_thread, 0, 0)

    run(scenario)


def test_engine_thread_says_in_the_output_why_a_posted_job_is_refused(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        job, outputs = verification((1, 2, 3), 4)
        engine_thread.post(job)
        refusal = (await asyncio.wait_for(outputs.get(), 10)).refusal
        assert refusal is not None
        assert (refusal.status, refusal.message[:15]) == (400, "num_positions 4")
        await asyncio.to_thread(engine_thread.close)
        with pytest.raises(ApiError, match="shutting down"):
            engine_thread.post(job)

    run(scenario)


def test_engine_thread_cancels_a_verification_that_runs() -> None:
    async def scenario() -> None:
        slow = ProcessFleet(replace(CONFIG, latency=LatencyModel(20_000, 1)).servers(3, unit=1000))
        deployment = Deployment(slow, NO_TOKENIZER, 0, 2, LatencyModel(4, 1))
        engine_thread = EngineThread(Engine(deployment, SpecConfig("nonsi")), LIMITS)
        try:
            job, outputs = verification((1, 2, 3), 1)
            engine_thread.post(job)
            await until(engine_thread, 1, 0)
            engine_thread.cancel([job])
            assert (await asyncio.wait_for(outputs.get(), 10)).finish_reason == "cancelled"
        finally:
            await asyncio.to_thread(engine_thread.close)

    run(scenario)


def test_engine_thread_refuses_all_jobs_of_a_request_beyond_its_queue(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        first = [Client(last, 2000) for last in range(4)]
        await engine_thread.submit(jobs(*first))
        with pytest.raises(ApiError) as refused:
            await engine_thread.submit(jobs(Client(7), Client(8)))
        assert refused.value.status == 429
        await engine_thread.submit(jobs(Client(9, 3)))
        await until(engine_thread, 2, 3)
        engine_thread.cancel(jobs(*first))
        await until(engine_thread, 0, 0)

    run(scenario)


def test_engine_thread_cancels_running_and_waiting_jobs(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        clients = [Client(last, 5000) for last in range(4)]
        await engine_thread.submit(jobs(*clients))
        await until(engine_thread, 2, 2)
        engine_thread.cancel(jobs(clients[3], clients[0]))
        waiting, running = await clients[3].last(), await clients[0].last()
        assert (waiting.finish_reason, waiting.stats) == ("cancelled", None)
        assert running.finish_reason == "cancelled"
        assert running.stats is not None
        assert running.stats.shared
        await until(engine_thread, 2, 0)
        engine_thread.cancel(jobs(*clients))  # cancelling twice changes nothing
        await until(engine_thread, 0, 0)
        last = Client(7, 5)
        await engine_thread.submit(jobs(last))
        await last.check_tokens()

    run(scenario)


def test_engine_thread_wakes_from_idle(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        for last in range(3):
            client = Client(last, 2)
            await engine_thread.submit(jobs(client))
            await client.check_tokens()
            await asyncio.sleep(0.05)

    run(scenario)


def test_engine_thread_traces_a_jobs_own_forwards(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        clients = [Client(1, trace=True), Client(2, trace=True)]
        await engine_thread.submit(jobs(*clients))
        for client in clients:
            outputs = await client.outputs()
            spans = [span for output in outputs for span in output.spans]
            assert {tuple(span.context.origin) for span in spans} == {client.prompt}
            assert {span.kind for span in spans} >= {"draft", "verify"}
            assert outputs[-1].stats is not None
            assert list(outputs[-1].stats.spans) == spans
            assert all(0 <= span.start <= span.end for span in spans)

    run(scenario)


def test_engine_thread_serves_clients_in_turn(engine_thread: EngineThread) -> None:
    """The first client fills its own places; the second has its own, and does not wait for all of the first's."""

    async def scenario() -> None:
        first = [Client(last, 200) for last in range(5)]
        second = [Client(last, 200, client=1) for last in range(5, 8)]
        Client.ended.clear()
        await engine_thread.submit(jobs(*first))
        await until(engine_thread, 2, 3)
        with pytest.raises(ApiError, match="5 texts of at most 5 ") as refused:
            await engine_thread.submit(jobs(Client(9)))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with pytest.raises(ApiError, match="5 texts of at most 5 "):
            await engine_thread.check_room(0, [1])
        await engine_thread.check_room(1, [1] * 5)
        await engine_thread.submit(jobs(*second))
        for client in (*first, *second):
            await client.check_tokens()
        ended = [prompt[-1] for prompt in Client.ended]
        assert ended.index(5) < ended.index(4)  # admitted as 2, 5, 3, 6, 4, 7, two at once
        assert ended.index(3) < ended.index(7)
        await until(engine_thread, 0, 0)
        await engine_thread.check_room(0, [1] * 5)

    run(scenario)


def test_fair_queue_takes_one_item_of_each_client_in_turn() -> None:
    queue = FairQueue[str]()
    for item in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        queue.append(ord(item[0]), item)
    taken = [queue.popleft()]
    queue.append(ord("d"), "d1")
    queue.remove(ord("a"), "a3")
    taken += [queue.popleft() for _ in range(len(queue))]
    assert taken == ["a1", "b1", "c1", "a2", "d1", "b2", "a4"]


def test_engine_thread_scores_the_prompt_first(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        client = Client(5, 4, prompt_logprobs=1)
        await engine_thread.submit(jobs(client))
        outputs = await client.check_tokens()
        assert (list(outputs[0].tokens), outputs[0].finish_reason) == ([], None)

    run(scenario)


def test_engine_thread_survives_deaths_of_servers(engine_thread: EngineThread, fleet: ProcessFleet) -> None:
    async def scenario() -> None:
        clients = [Client(last, 60, trace=True) for last in range(5)]
        await engine_thread.submit(jobs(*clients))
        for _ in range(6):
            await asyncio.sleep(0.04)
            os.kill(next(iter(fleet._workers.values())).process.pid or 0, signal.SIGKILL)
        reported = [server for client in clients for output in await client.check_tokens() for server in output.servers]
        assert any(server.restarts for server in reported)

    run(scenario)


def test_engine_thread_replaces_dead_servers_while_its_status_is_polled(
    engine_thread: EngineThread, fleet: ProcessFleet
) -> None:
    async def scenario() -> None:
        os.kill(next(iter(fleet._workers.values())).process.pid or 0, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not any(server.restarts for server in (await engine_thread.status()).servers):
                pass
        assert len(fleet._events) <= 1

    run(scenario)


def test_engine_thread_reports_a_job_that_cannot_begin_to_it_alone(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        invalid, valid = Client(1, -3), Client(2)
        await engine_thread.submit(jobs(invalid, valid))
        assert (await invalid.last()).error == "ValueError: max_new_tokens -3: must be at least 1"
        await valid.check_tokens()

    run(scenario)


def test_engine_thread_refuses_an_invalid_job(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        with pytest.raises(ApiError, match="auto") as refused:
            await engine_thread.submit([GenerationJob((1,), 3, SpecConfig("auto", 4), GREEDY, print)])
        assert refused.value.status == 400

    run(scenario)


def test_engine_thread_fails_all_jobs_when_no_target_is_left(engine_thread: EngineThread, fleet: ProcessFleet) -> None:
    async def scenario() -> None:
        clients = [Client(last, 5000) for last in range(3)]
        await engine_thread.submit(jobs(*clients))
        await until(engine_thread, 2, 1)
        fleet._restarts.enabled = False
        for worker in list(fleet._workers.values()):
            os.kill(worker.process.pid or 0, signal.SIGKILL)
        for client in clients:
            assert "no target server is left" in ((await client.last()).error or "")
        assert not (await engine_thread.status()).has_target
        with pytest.raises(ApiError, match="no target server is up") as refused:
            await engine_thread.submit(jobs(Client(9)))
        assert (refused.value.status, refused.value.code) == (503, "no_target")

    run(scenario)


def test_engine_thread_close_cancels_all_jobs_and_refuses_more(engine_thread: EngineThread) -> None:
    async def scenario() -> None:
        clients = [Client(last, 5000) for last in range(4)]
        await engine_thread.submit(jobs(*clients))
        await until(engine_thread, 2, 2)
        began = time.monotonic()
        await asyncio.to_thread(engine_thread.close)
        assert time.monotonic() - began < 5
        for client in clients:
            assert (await client.last()).finish_reason == "cancelled"
        with pytest.raises(ApiError) as refused:
            await engine_thread.submit(jobs(Client(9)))
        assert refused.value.status == 503

    run(scenario)


def test_engine_thread_reports_a_failed_engine_to_all_jobs_and_serves_the_next(
    engine_thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clients = [Client(last, 5000) for last in range(2)]
        await engine_thread.submit(jobs(*clients))
        await until(engine_thread, 2, 0)
        with monkeypatch.context() as broken:
            broken.setattr(EngineLoop, "step", lambda _: 1 / 0)
            for client in clients:
                assert (await client.last()).error == "ZeroDivisionError: division by zero"
        client = Client(3)
        await engine_thread.submit(jobs(client))
        await client.check_tokens()
        await until(engine_thread, 0, 0)

    run(scenario)


def record_trespasses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, every attribute of the engine's mutable parts that another thread than the engine's reads."""
    trespasses: list[str] = []

    def guard(owner: type) -> None:
        read: Any = owner.__getattribute__

        def checked(self: object, name: str) -> Any:
            if threading.current_thread().name != "engine":
                caller = sys._getframe(1).f_code.co_name
                if name != "wake" and caller != "wake":  # which any thread may call
                    trespasses.append(f"{owner.__name__}.{name} in {caller}")
            return read(self, name)

        monkeypatch.setattr(owner, "__getattribute__", checked)

    for owner in (Engine, EngineLoop, Deployment, ActiveRequest, Generation, SingleForward, ProcessFleet, Scheduler):
        guard(owner)
    return trespasses


BODIES: list[dict[str, Any]] = [
    {},
    {"algorithm": "auto"},
    {"algorithm": "auto", "stream": True, "trace": True},
    {"stream": True, "n": 2, "temperature": 1.0, "seed": 3},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"max_tokens": 0},
    {"stop": ["little"], "max_tokens": 60},
    {"timeout": 0.05, "max_tokens": 200},
    {"lookahead": 3, "algorithm": "si"},
    {"lookahead": 3, "algorithm": "auto"},
    {"prompt": [1] * 5000},
]


@pytest.mark.slow
def test_engine_is_touched_by_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the event loop serves: completions, streams, health, metrics, traces."""

    async def serve_all(client: httpx.AsyncClient) -> None:
        for body in BODIES:
            answer = await client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 12, **body})
            ids = re.findall(r'"id": ?"(.*?)"', answer.text)[:1]
            paths = ["/health", "/metrics", "/v1/models", *(f"/v1/traces/{id}" for id in ids)]
            statuses = [(await client.get(path)).status_code for path in paths]
            await client.post("/v1/verify", json={"prompt": [5, 6], "num_positions": 1})
            assert answer.status_code != 500
            assert statuses == [200] * len(paths), answer.text

    async def scenario() -> None:
        engine = Engine.load()
        app, service = make_app(engine, "builtin", Limits(shutdown_seconds=5), local=True)
        trespasses = record_trespasses(monkeypatch)  # until here the engine was this thread's
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                await serve_all(client)
            assert trespasses == []
            _ = engine.algorithm  # which the guard must notice
            assert trespasses[0] == "Engine.algorithm in scenario"
        finally:
            await asyncio.to_thread(service.close)

    run(scenario)
