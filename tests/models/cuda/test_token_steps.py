"""Tokens of several texts that are generated ahead of the host, in torch on the CPU: only graphs need a GPU."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsi.core.messages import Sampling
from dsi.core.policies import autoregressive, policy_for
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import PrefixTable, Server, make_servers
from dsi.fleets.spans import Span
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.protocol import ForwardRequest, SamplingModel, StopFlag

MAX_LENGTH, VOCAB_SIZE = 192, 97


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=MAX_LENGTH, vocab_size=VOCAB_SIZE)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.2)
    return model


def text(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(1, VOCAB_SIZE), k=length)


def greedy(model: Any, tokens: Sequence[int], count: int) -> Tokens:
    """Without a cache."""
    written = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
    return tuple(written[len(tokens) :])


def generated(
    model: SamplingModel, texts: Sequence[list[int]], counts: Sequence[int], stop_after: int | None = None
) -> tuple[list[Tokens], bool]:
    """The tokens of each text, told to stop once so many were told of the first."""
    requests = [ForwardRequest(tokens, len(tokens), len(tokens) - 1) for tokens in texts]
    stop, tokens = StopFlag(), [list[int]() for _ in texts]
    steps = model.poll_generated(requests, counts, stop)
    while True:
        try:
            answers = next(steps)
        except StopIteration as end:
            return list(map(tuple, tokens)), end.value
        for own, answer in zip(tokens, answers or ()):
            own += answer.tokens
        if stop_after is not None and len(tokens[0]) >= stop_after:
            stop.set()


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16, 32), (4, 16)])
def test_poll_generated_gives_the_tokens_of_each_text_alone(llama: Any, sizes: Sequence[int]) -> None:
    """With different numbers of tokens; what is cached then is that of the texts, and no slot is lost."""
    packed = PackedCudaModel(llama, MAX_LENGTH, 700, sizes=sizes)
    model, texts = SamplingModel(packed), [text(i, length) for i, length in enumerate((5, 62, 3))]
    model.answer_packed([ForwardRequest(tokens, len(tokens)) for tokens in texts])
    for counts in ((20, 7, 13), (3, 9, 1), (1, 1, 1)):
        lengths = list(map(len, texts))
        tokens, ended = generated(model, texts, counts)
        assert ended
        assert tokens == [greedy(llama, own, count) for own, count in zip(texts, counts)]
        assert list(map(len, texts)) == lengths  # the lists of the requests are as before
        texts = [[*own, *new] for own, new in zip(texts, tokens)]
        assert [packed.pool.num_cached(own) for own in texts] == [len(own) - 1 for own in texts]
        assert packed.pool.slots.num_free == 700 - sum(len(own) - 1 for own in texts)
    after = packed.forward_packed([ForwardRequest(own, len(own)) for own in texts])
    assert [(int(logits.argmax()),) for logits in after] == [greedy(llama, own, 1) for own in texts]


def test_poll_generated_launches_no_more_where_it_is_to_stop(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 300)
    texts = [text(1, 4), text(2, 6)]
    tokens, ended = generated(SamplingModel(packed), texts, (30, 25), stop_after=1)
    assert ended
    [first, second] = tokens
    assert 4 <= len(first) == len(second) <= 12  # what was launched before
    assert tokens == [greedy(llama, own, len(first)) for own in texts]
    assert packed.pool.slots.num_free == 300 - sum(len(own) + len(first) - 1 for own in texts)


def test_poll_generated_leaves_what_it_cannot_generate_to_others(llama: Any) -> None:
    """Sampled texts, more texts than there is room for, and more new tokens than a forward has rows."""
    few = PackedCudaModel(llama, MAX_LENGTH, 40, max_texts=1)
    assert generated(SamplingModel(few), [text(1, 4), text(2, 4)], (8, 8)) == ([(), ()], False)
    assert generated(SamplingModel(few), [text(1, 30)], (24,)) == ([()], False)
    assert few.pool.slots.num_free == 40
    narrow = PackedCudaModel(llama, MAX_LENGTH, 100, sizes=(1, 4))
    assert generated(SamplingModel(narrow), [text(3, 9)], (5,)) == ([()], False)
    assert narrow.pool.slots.num_free == 100
    sampled = ForwardRequest([1, 2], 2, sampling=Sampling(temperature=1.0))
    assert list(SamplingModel(narrow).poll_generated([sampled], (3,), StopFlag())) == []


def test_poll_generated_gives_back_its_slots_where_it_is_given_up(llama: Any) -> None:
    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    steps = packed.poll_generated([ForwardRequest([1, 2, 3], 3)], (20,), StopFlag())
    assert next(steps)
    steps.close()
    assert packed.pool.slots.num_free == 200
    assert not packed.pool.has_in_flight
    assert generated(SamplingModel(packed), [[1, 2, 3]], (20,)) == ([greedy(llama, (1, 2, 3), 20)], True)


def test_poll_generated_takes_the_tokens_of_a_teacher(llama: Any) -> None:
    """What is cached is named by them: so forwards take as long as with a model that writes this text."""

    class Counting:
        def answer(self, request: ForwardRequest) -> Tokens:
            return (len(request.tokens) % 7 + sum(request.tokens[-2:]) % 3,)

    packed = PackedCudaModel(llama, MAX_LENGTH, 200)
    tokens, answers = [3, 4], list[int]()
    for answer in SamplingModel(packed).poll_generated([ForwardRequest(tokens, 2)], (9,), StopFlag(), Counting()):
        for [own] in [answer] if answer else ():
            answers += own.tokens
            tokens += own.tokens  # as a server does
    expected = [3, 4]
    for _ in range(9):
        expected += Counting().answer(ForwardRequest(expected, len(expected)))
    assert [3, 4, *answers] == tokens == expected
    assert packed.pool.num_cached(tokens) == len(tokens) - 1


@pytest.mark.parametrize("chosen", ["nonsi", "si", "both"])
def test_cuda_fleet_writes_many_texts_as_each_alone(llama: Any, chosen: str) -> None:
    """Under plain decoding ahead of the host, under SI and as both change; some come later, and one is given up."""
    models = {role: SamplingModel(PackedCudaModel(llama, MAX_LENGTH, 1500, drafts=role == "drafter")) for role in
              ("target", "drafter")}  # fmt: skip
    servers = make_servers([models["target"]], {"drafter": models["drafter"]})
    packed = {server.name: Server(server.name, server.role, server.model, PrefixTable(64)) for server in servers}
    log: list[Span] = []
    loop = EngineLoop(CudaFleet(servers, packed=packed, log=log))
    specs = {"nonsi": SpecConfig("nonsi"), "si": SpecConfig("si", 3)}
    calls: list[int] = []

    def shared_spec(*_: Any) -> SpecConfig:
        calls.append(0)
        return specs[chosen] if chosen in specs else list(specs.values())[len(calls) // 40 % 2]

    loop.load.shared_spec = shared_spec
    shared = SharedForwards("drafter", loop.load)
    requests = [
        Request(
            tuple(text(i, 2 + i)),
            3 + i * 5 % 31,
            shared.policy(policy_for(SpecConfig("si", 2)) if i else autoregressive()),
        )
        for i in range(14)
    ]
    try:
        running = [loop.submit(request) for request in requests[:9]]
        while not running[8].tokens:
            loop.step()
        loop.cancel(running[8])
        running += [loop.submit(request) for request in requests[9:]]
        while any(not active.done for active in running):
            loop.step()
        for active, request in zip(running, requests):
            tokens = active.completion().tokens
            expected = greedy(llama, request.prompt, request.max_new_tokens)
            assert tokens == expected[: len(tokens)]
            assert active is running[8] or len(tokens) == len(expected)
        widest = max(span.width for span in log if span.role == "target" and span.num_texts > 1)
        assert widest >= 4  # of blocks of the target's, or of drafted ones
    finally:
        loop.fleet.close()
