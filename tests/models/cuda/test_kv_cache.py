"""Servers that fill one KV cache: real forwards in segments, interleaved in every allowed order."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.kv_cache import SharedKVCache
from dsi.models.hf import Transformer
from dsi.models.protocol import NEVER, CancelFlag, Cancelled, ForwardRequest, SamplingModel

MAX_LENGTH, LAYERS, SERVERS = 48, 4, 3
ACTIONS = ("extend", "branch", "cancel", "kill")


class Halt(Exception):
    pass


class FakeEvent:
    """An event that has completed at the second query."""

    def __init__(self) -> None:
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 1


class SteppedForward:
    """A forward computed by its own thread, one segment per launch, as by a GPU's stream."""

    def __init__(self, compute: Callable[[], Any], segment_starts: list[Any]) -> None:
        self._compute, self.segments = compute, len(segment_starts) + 1
        self._go, self._reached = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._halt = False
        self.logits: Any = None
        for layer in segment_starts:
            layer.register_forward_pre_hook(self._pause)

    def _pause(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._reached.release()
            self._go.acquire()
            if self._halt:
                raise Halt

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                self.logits = self._compute()
            except Halt:
                return
        self._reached.release()

    def halt(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._halt = True
            self._go.release()
            self._thread.join()
            self._halt = False

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> FakeEvent:  # noqa: ARG002
        if segment:
            self._go.release()
        else:
            self.halt()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._reached.acquire()
        return FakeEvent()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(6)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **shape, num_hidden_layers=LAYERS, vocab_size=50, max_position_embeddings=MAX_LENGTH, pad_token_id=0
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def servers(llama: Any) -> Iterator[list[CudaGraphModel]]:
    servers: list[CudaGraphModel] = []
    for _ in range(SERVERS):
        share_cache_with = servers[0] if servers else None
        servers.append(
            CudaGraphModel(llama, MAX_LENGTH, segments=LAYERS, sizes=(1, 2, 4, 8), share_cache_with=share_cache_with)
        )
    for server in servers:
        stepped = {
            size: SteppedForward(partial(server._compute, size), server._segment_starts) for size in server._sizes
        }
        server._forwards = stepped  # type: ignore[assignment]
    yield servers
    for server in servers:
        for forward in server._forwards.values():
            forward.halt()  # type: ignore[union-attr]


class Interleaving:
    """Requests for growing and branching texts, each polled at random."""

    def __init__(self, servers: list[CudaGraphModel], llama: Any) -> None:
        self.servers, self.plain = servers, SamplingModel(Transformer(llama, max_sequences=1))
        self.text = [1, 2, 3]
        self.running: dict[int, tuple[ForwardRequest, threading.Event, Any]] = {}
        self.dead: set[int] = set()

    def request(self, server: int, action: str, amount: int) -> None:
        if action == "branch":
            self.text = self.text[: max(1, len(self.text) - amount)]
        self.text = (self.text + [(7 * amount + len(self.text)) % 50] * amount)[: MAX_LENGTH - 8]
        flag = threading.Event()
        request = ForwardRequest(list(self.text), max(1, len(self.text) + 1 - amount), cancelled=flag)
        self.running[server] = request, flag, self.servers[server].poll_answer(request)

    def poll(self, server: int) -> None:
        request, flag, steps = self.running[server]
        try:
            next(steps)
            return
        except Cancelled:
            tokens = None
        except StopIteration as end:
            tokens = end.value
        del self.running[server]
        if tokens is None:
            assert flag.is_set()
        else:
            assert tokens == self.plain.answer(ForwardRequest(request.tokens, request.start))

    def cancel(self, server: int, action: str) -> None:
        """A killed server stops computing; forwards that others depend on continue without it."""
        _, flag, steps = self.running[server]
        flag.set()
        if action == "kill":
            steps.close()
            del self.running[server]
            self.dead.add(server)

    def end(self) -> None:
        while self.running:
            for server in list(self.running):
                self.poll(server)
        assert self.servers[0].cached_tokens == self.servers[1].cached_tokens


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, SERVERS - 1), st.sampled_from(ACTIONS), st.integers(1, 5)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_shared_kv_cache_keeps_answers_under_any_interleaving(
    servers: list[CudaGraphModel], llama: Any, actions: list[tuple[int, str, int]]
) -> None:
    run = Interleaving(servers, llama)
    for server, action, amount in actions:
        if server not in run.running and server not in run.dead:
            run.request(server, action, amount)
        elif server in run.running and action in ("cancel", "kill"):
            run.cancel(server, action)
        for _ in range(amount):
            if server in run.running:
                run.poll(server)
    run.end()
    assert not servers[0]._kv._inflight


def test_shared_kv_cache_skips_tokens_in_flight(servers: list[CudaGraphModel]) -> None:
    text = list(range(20, 40))
    kv = servers[0]._kv
    first = servers[0].poll_answer(ForwardRequest(text[:12], 12))
    for _ in range(8):
        next(first)
    before = len(kv.tokens)
    second = servers[1].poll_answer(ForwardRequest(text, 13))
    next(second)
    assert (before, kv._inflight[-1].begin) == (12, 12)
    for steps in (first, second):
        for _ in steps:
            pass


class LoggedForward:
    """Two segments; logs every launch."""

    segments = 2

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def launch(self, segment: int, after: Any, cancelled: CancelFlag) -> FakeEvent:  # noqa: ARG002
        self.log.append(f"{self.name}{segment}")
        return FakeEvent()


def test_shared_kv_cache_runs_segments_in_order() -> None:
    kv, log = SharedKVCache(), list[str]()
    a = kv.run(kv.begin(LoggedForward("a", log), 0, [1, 2], NEVER))
    b = kv.run(kv.begin(LoggedForward("b", log), 2, [3], NEVER))
    for _ in range(5):
        next(b)  # it waits for a, however often it is polled
    assert log == ["a0", "b0"]
    for steps in (a, b):
        for _ in steps:
            pass
    assert log == ["a0", "b0", "a1", "b1"]
    assert kv.tokens == [1, 2, 3]


def test_shared_kv_cache_continues_a_cancelled_forward_that_is_needed() -> None:
    kv, log, flag = SharedKVCache(), list[str](), threading.Event()
    a = kv.run(kv.begin(LoggedForward("a", log), 0, [1, 2], flag))
    b = kv.run(kv.begin(LoggedForward("b", log), 2, [3], NEVER))
    flag.set()
    for steps in (a, b):
        for _ in steps:
            pass
    assert log == ["a0", "b0", "a1", "b1"]


def test_shared_kv_cache_drops_a_cancelled_forward() -> None:
    kv, log, flag = SharedKVCache(), list[str](), threading.Event()
    for _ in kv.run(kv.begin(LoggedForward("a", log), 0, [1, 2], NEVER)):
        pass
    b = kv.run(kv.begin(LoggedForward("b", log), 2, [3, 4], flag))
    flag.set()
    with pytest.raises(Cancelled):
        for _ in b:
            pass
    assert (log, kv.tokens) == (["a0", "a1", "b0"], [1, 2])
