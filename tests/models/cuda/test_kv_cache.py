"""Servers that fill one cache: real forwards in pieces, whose pieces come in any order that is allowed."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.kv_cache import SharedKVCache
from dsi.models.hf import Transformer
from dsi.models.protocol import NEVER, CancelFlag, Cancelled, ForwardRequest, SamplingModel

ROOM, LAYERS, SERVERS = 48, 4, 3
WISHES = ("extend", "branch", "cancel", "kill")


class Halt(Exception):
    pass


class Late:
    """A mark that has come at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 1


class Stepped:
    """A forward that a thread of its own computes, one piece for each launch, as a GPU's stream would."""

    def __init__(self, compute: Callable[[], Any], cuts: list[Any]) -> None:
        self._compute, self.segments = compute, len(cuts) + 1
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._halt = False
        self.rows: Any = None
        for layer in cuts:
            layer.register_forward_pre_hook(self._pause)

    def _pause(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._there.release()
            self._go.acquire()
            if self._halt:
                raise Halt

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                self.rows = self._compute()
            except Halt:
                return
        self._there.release()

    def halt(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._halt = True
            self._go.release()
            self._thread.join()
            self._halt = False

    def launch(self, piece: int, after: Any, cancelled: CancelFlag) -> Late:  # noqa: ARG002
        if piece:
            self._go.release()
        else:
            self.halt()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._there.acquire()
        return Late()


class Wish:
    gone = False

    def is_set(self) -> bool:
        return self.gone

    def wait(self, timeout: float) -> bool:  # noqa: ARG002
        return self.gone


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(6)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=LAYERS, vocab_size=50, max_position_embeddings=ROOM, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def crew(llama: Any) -> Iterator[list[CudaGraphModel]]:
    servers: list[CudaGraphModel] = []
    for _ in range(SERVERS):
        share_cache_with = servers[0] if servers else None
        servers.append(
            CudaGraphModel(llama, ROOM, segments=LAYERS, sizes=(1, 2, 4, 8), share_cache_with=share_cache_with)
        )
    for server in servers:
        stepped = {size: Stepped(server._computer(size), server._cuts) for size in server._sizes}
        server._forwards = stepped  # type: ignore[assignment]
    yield servers
    for server in servers:
        for forward in server._forwards.values():
            forward.halt()  # type: ignore[union-attr]


class Play:
    """Asks of growing and branching texts, each looked at when chance says so."""

    def __init__(self, crew: list[CudaGraphModel], llama: Any) -> None:
        self.crew, self.plain = crew, SamplingModel(Transformer(llama, max_sequences=1))
        self.text = [1, 2, 3]
        self.flying: dict[int, tuple[ForwardRequest, Wish, Any]] = {}
        self.dead: set[int] = set()

    def request(self, server: int, wish: str, amount: int) -> None:
        if wish == "branch":
            self.text = self.text[: max(1, len(self.text) - amount)]
        self.text = (self.text + [(7 * amount + len(self.text)) % 50] * amount)[: ROOM - 8]
        flag = Wish()
        request = ForwardRequest(list(self.text), max(1, len(self.text) + 1 - amount), cancelled=flag)
        self.flying[server] = request, flag, self.crew[server].poll_answer(request)

    def look(self, server: int) -> None:
        request, flag, steps = self.flying[server]
        try:
            next(steps)
            return
        except Cancelled:
            found = None
        except StopIteration as end:
            found = end.value
        del self.flying[server]
        if found is None:
            assert flag.gone
        else:
            assert found == self.plain.answer(ForwardRequest(request.tokens, request.start))

    def cancel(self, server: int, wish: str) -> None:
        """A server that is killed computes no more; what others build on goes on without it."""
        gone = self.flying[server]
        gone[1].gone = True
        if wish == "kill":
            gone[2].close()
            del self.flying[server]
            self.dead.add(server)

    def end(self) -> None:
        while self.flying:
            for server in list(self.flying):
                self.look(server)
        assert self.crew[0].cached_tokens == self.crew[1].cached_tokens


@given(st.lists(st.tuples(st.integers(0, SERVERS - 1), st.sampled_from(WISHES), st.integers(1, 5)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_whatever_the_order_each_answers_as_if_alone(
    crew: list[CudaGraphModel], llama: Any, moves: list[tuple[int, str, int]]
) -> None:
    play = Play(crew, llama)
    for server, wish, amount in moves:
        if server not in play.flying and server not in play.dead:
            play.request(server, wish, amount)
        elif server in play.flying and wish in ("cancel", "kill"):
            play.cancel(server, wish)
        for _ in range(amount):
            if server in play.flying:
                play.look(server)
    play.end()
    assert not crew[0]._shelf._flying


def test_a_server_reads_only_what_no_other_is_reading(crew: list[CudaGraphModel]) -> None:
    text = list(range(20, 40))
    shelf = crew[0]._shelf
    first = crew[0].poll_answer(ForwardRequest(text[:12], 12))
    for _ in range(8):
        next(first)
    before = len(shelf.tokens)
    second = crew[1].poll_answer(ForwardRequest(text, 13))
    next(second)
    assert (before, shelf._flying[-1].begin) == (12, 12)
    for steps in (first, second):
        for _ in steps:
            pass


class Counting:
    """Two pieces; says who has been where."""

    segments = 2

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def launch(self, piece: int, after: Any, cancelled: CancelFlag) -> Late:  # noqa: ARG002
        self.diary.append(f"{self.name}{piece}")
        return Late()


def test_each_piece_sees_the_forwards_in_the_order_in_which_they_began() -> None:
    shelf, diary = SharedKVCache(), list[str]()
    a = shelf.going_on(shelf.begin(Counting("a", diary), 0, [1, 2], NEVER))
    b = shelf.going_on(shelf.begin(Counting("b", diary), 2, [3], NEVER))
    for _ in range(5):
        next(b)  # it waits for a, however often it is looked at
    assert diary == ["a0", "b0"]
    for steps in (a, b):
        for _ in steps:
            pass
    assert diary == ["a0", "b0", "a1", "b1"]
    assert shelf.tokens == [1, 2, 3]


def test_what_a_wanted_forward_builds_on_goes_on_though_cancelled() -> None:
    shelf, diary, flag = SharedKVCache(), list[str](), Wish()
    a = shelf.going_on(shelf.begin(Counting("a", diary), 0, [1, 2], flag))
    b = shelf.going_on(shelf.begin(Counting("b", diary), 2, [3], NEVER))
    flag.gone = True
    for steps in (a, b):
        for _ in steps:
            pass
    assert diary == ["a0", "b0", "a1", "b1"]


def test_a_cancelled_forward_leaves_nothing_on_the_shelf() -> None:
    shelf, diary, flag = SharedKVCache(), list[str](), Wish()
    for _ in shelf.going_on(shelf.begin(Counting("a", diary), 0, [1, 2], NEVER)):
        pass
    b = shelf.going_on(shelf.begin(Counting("b", diary), 2, [3, 4], flag))
    flag.gone = True
    with pytest.raises(Cancelled):
        for _ in b:
            pass
    assert (diary, shelf.tokens) == (["a0", "a1", "b0"], [1, 2])
