"""What would hold the event loop runs in worker threads."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import httpx
import pytest

from dsi.engine.engine import Engine
from dsi.models.tokenizer import Tokenizer
from dsi.server import body_route, responses
from dsi.server.app import make_app
from dsi.server.choice import ChoiceOutput
from dsi.server.limits import Limits
from dsi.server.traces import Traces
from dsi.server.workers import Workers
from sample_tokenizers import MAKERS, SENTENCES, sample_tokenizer

STORY = "Once upon a time"


@pytest.mark.parametrize("name", MAKERS)
def test_tokenizer_encodes_the_same_in_many_threads(name: str) -> None:
    """Even one whose file asks for truncation and padding, once it has encoded a text."""
    fresh = deepcopy(sample_tokenizer(name))
    fresh._tokenizer.enable_truncation(4)
    fresh._tokenizer.enable_padding(length=8)
    tokenizer, expected = Tokenizer(fresh), [Tokenizer(sample_tokenizer(name)).encode(text) for text in SENTENCES]
    tokenizer.encode("a")
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(lambda: [tokenizer.encode(text) for text in SENTENCES]) for _ in range(64)]
        decoded = [pool.submit(tokenizer.decode, tokens) for tokens in expected * 8]
        assert all(run.result() == expected for run in runs)
        assert [text.result() for text in decoded] == [tokenizer.decode(tokens) for tokens in expected] * 8


def test_workers_let_a_short_request_go_between_the_calls_of_a_long_one() -> None:
    order: list[str] = []

    async def request(workers: Workers, name: str, calls: int) -> None:
        for _ in range(calls):
            await workers.run(order.append, name)

    async def scenario() -> None:
        workers = Workers(1)
        await asyncio.gather(request(workers, "long", 20), request(workers, "short", 1))
        workers.close()

    asyncio.run(scenario())
    assert order.index("short") < 3


@pytest.fixture
def in_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of expensive functions, as they are called in the thread of the event loop."""
    called: list[str] = []

    def watch(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                called.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (Tokenizer, "encode"),
        (Tokenizer, "apply_chat_template"),
        (ChoiceOutput, "echo_prompt"),
        (responses, "full_response"),
        (body_route, "parse_body"),
        (Traces, "json"),
    ):
        watch(owner, name)
    return called


@pytest.mark.slow
def test_event_loop_neither_parses_nor_tokenizes_nor_writes_long_responses(in_loop: list[str]) -> None:
    async def scenario() -> None:
        app, service = make_app(Engine.load(), "builtin", Limits(shutdown_seconds=5))
        in_loop.clear()  # the tokenizer was tried at the start
        transport, messages = httpx.ASGITransport(app), [{"role": "user", "content": STORY}]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in (
                ("completions", {"prompt": [STORY, STORY], "max_tokens": 2, "echo": True}),
                ("completions", {"prompt": STORY, "max_tokens": 2, "echo": True, "logprobs": 1}),
                ("completions", {"prompt": STORY, "max_tokens": 2, "echo": True, "stream": True}),
                ("chat/completions", {"messages": messages, "max_tokens": 2}),
            ):
                answer = await client.post(f"/v1/{path}", json=body)
                assert answer.status_code == 200
            assert (await client.get(f"/v1/traces/{json.loads(answer.text)['id']}")).status_code == 200
        await asyncio.to_thread(service.close)

    asyncio.run(scenario())
    assert in_loop == []
