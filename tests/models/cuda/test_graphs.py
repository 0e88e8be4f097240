"""Static KV caches and padded forwards, on any device: only capturing them needs a GPU."""

import copy
from collections.abc import Iterator
from itertools import accumulate, cycle, islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import GPTNeoConfig, MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

from cancel_flags import CancelAfter
from decoders import MAX_LENGTH, MODELS
from dsi.core.messages import Sampling
from dsi.models.cuda.graphs import CudaGraphModel, EagerForward, hand_over, static_cache
from dsi.models.hf import Transformer
from dsi.models.protocol import Cancelled, ForwardRequest, SamplingModel
from dsi.models.toy import ToyTarget
from oracle import Oracle


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    return MODELS[request.param]().eval()


def greedy_text(model: Any, prompt: list[int], count: int) -> list[int]:
    """The model's greedy text without a cache."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def test_cuda_graph_model_text_is_that_of_the_model_up_to_max_length(model: Any) -> None:
    text = greedy_text(model, [1, 5, 9], MAX_LENGTH - 3)
    tokens, graphed = [1, 5, 9], CudaGraphModel(model, MAX_LENGTH)
    while len(tokens) < MAX_LENGTH:
        tokens += graphed.answer(ForwardRequest(tokens, len(tokens)))
    assert tokens == text
    assert graphed.answer(ForwardRequest(text, 3)) == (*text[3:], *graphed.answer(ForwardRequest(text, MAX_LENGTH)))


def test_cuda_graph_model_poll_draft_streams_the_greedy_text(model: Any) -> None:
    text = greedy_text(model, [4, 4, 2], 20)
    tokens = [
        token
        for token in CudaGraphModel(model, MAX_LENGTH).poll_draft(ForwardRequest([4, 4, 2], 3), 20)
        if token is not None
    ]
    assert tokens == text[3:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hand_over_makes_the_current_stream_wait() -> None:
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    zeros = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        ones = zeros + 1
    hand_over([ones], stream)
    total = ones.sum()
    del ones
    with torch.cuda.stream(stream):
        zeros.clone()  # not in the same memory
    assert int(total) == 1 << 20


def rows_of(model: Any, cut: list[int], text: list[int]) -> torch.Tensor:
    """The logits of all positions of an exact model, the text read in forwards of these widths."""
    exact, rows, length = CudaGraphModel(model, MAX_LENGTH, exact_size=16), list[torch.Tensor](), 0
    for new in cut:
        exact.answer(ForwardRequest(text[: length + new], length + 1))
        begin = min(length, MAX_LENGTH - 16)
        rows.append(exact.last_logits()[length - begin : length - begin + new].clone())
        length += new
    return torch.cat(rows)


def test_exact_model_gives_the_same_bits_for_every_cut(model: Any) -> None:
    """Up to the last token of the context, in bfloat16."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    text = torch.randint(1, 90, (MAX_LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    whole, last = divmod(MAX_LENGTH, 16)
    expected = rows_of(rounded, [16] * whole + [last] * bool(last), text)
    for widths in ([1], [5], [2, 9, 1]):
        cut = list(islice(cycle(widths), MAX_LENGTH))
        ends = [end for end in accumulate(cut) if end < MAX_LENGTH]
        assert torch.equal(rows_of(rounded, [b - a for a, b in pairwise([0, *ends, MAX_LENGTH])], text), expected)


def test_exact_model_text_is_that_of_the_model(model: Any) -> None:
    text, exact = greedy_text(model, [1, 5, 9], 20), CudaGraphModel(model, MAX_LENGTH, exact_size=16)
    assert exact.answer(ForwardRequest(text, 3)) == (*text[3:], *exact.answer(ForwardRequest(text, len(text))))
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=4)
    plain = CudaGraphModel(model, MAX_LENGTH)
    request = ForwardRequest(text, 3, sampling=sampling)
    assert exact.answer(request) == plain.answer(request)


def pipelined(model: Any) -> CudaGraphModel:
    """A model that drafts with a pipeline although its forwards are eager."""
    drafter = CudaGraphModel(model, MAX_LENGTH, drafts=True)
    assert drafter._followers == []
    drafter._followers = [EagerForward(drafter._follower(buffer), ()) for buffer in (0, 1)]
    return drafter


def test_cuda_graph_model_pipelined_draft_is_the_greedy_text(model: Any) -> None:
    """Up to the maximum length and no further."""
    text = greedy_text(model, [4, 4, 2], MAX_LENGTH - 2)
    drafter = pipelined(model)
    tokens = [token for token in drafter.poll_draft(ForwardRequest([4, 4, 2], 3), 20) if token is not None]
    assert tokens == text[3:23]
    assert drafter.cached_tokens == text[:22]
    stream = drafter.poll_draft(ForwardRequest(text[:30], 30), 99)
    for token in text[30:]:
        assert next(token for token in stream if token is not None) == token
    with pytest.raises(ValueError, match=f"a text of {MAX_LENGTH + 1} tokens: there is room for {MAX_LENGTH}"):
        next(stream)


@pytest.mark.parametrize("checks", range(1, 9))
def test_cuda_graph_model_recovers_from_a_cancelled_pipelined_draft(checks: int) -> None:
    torch.manual_seed(6)
    llama = MODELS["llama"]().eval()
    drafter, plain = pipelined(llama), SamplingModel(Transformer(llama, max_sequences=1))
    with pytest.raises(Cancelled):
        list(drafter.poll_draft(ForwardRequest([1, 2, 3], 3, cancelled=CancelAfter(checks)), 30))
    cached = drafter.cached_tokens
    assert drafter.answer(ForwardRequest(cached, 1)) == plain.answer(ForwardRequest(cached, 1))
    other = [1, 2, 3, *cached[3:5], 7, 7]
    assert drafter.answer(ForwardRequest(other, 4)) == plain.answer(ForwardRequest(other, 4))


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 20)), max_size=6))
@settings(max_examples=25, deadline=None)
def test_cuda_graph_model_answers_are_independent_of_the_cache(requests: list[tuple[list[int], int]]) -> None:
    torch.manual_seed(2)
    llama = MODELS["llama"]().eval()
    graphed, plain = CudaGraphModel(llama, MAX_LENGTH), SamplingModel(Transformer(llama, max_sequences=1))
    for text, start in requests:
        request = ForwardRequest(text, min(start, len(text) + 1))
        assert graphed.answer(request) == plain.answer(request)


@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=3), Sampling(1.0, 20, 0.9, seed=7)])
def test_cuda_graph_model_sampled_tokens_are_those_of_the_backend(sampling: Sampling) -> None:
    torch.manual_seed(3)
    llama = MODELS["llama"]().eval()
    text = list(range(30))
    request = ForwardRequest(text, 11, sampling=sampling)
    assert CudaGraphModel(llama, MAX_LENGTH).answer(request) == SamplingModel(Transformer(llama)).answer(request)
    stream = CudaGraphModel(llama, MAX_LENGTH).poll_draft(ForwardRequest([1, 2], 2, sampling=sampling), 9)
    tokens = [1, 2]
    for _ in range(9):
        tokens += SamplingModel(Transformer(llama)).answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
    assert [token for token in stream if token is not None] == tokens[2:]


@pytest.mark.parametrize("checks", [0, 1])
def test_cuda_graph_model_cancels_between_segments_and_restores_the_cache(checks: int) -> None:
    torch.manual_seed(4)
    llama = MODELS["llama"]().eval()
    graphed = CudaGraphModel(llama, MAX_LENGTH, segments=3)
    assert graphed.segments == 3
    before = graphed.answer(ForwardRequest([1, 2, 3], 1))
    with pytest.raises(Cancelled):
        graphed.answer(ForwardRequest([1, 2, 9, 9, 9], 3, cancelled=CancelAfter(checks)))
    assert graphed.answer(ForwardRequest([1, 2, 3], 1)) == before


def test_cuda_graph_model_gives_its_eager_reason() -> None:
    assert CudaGraphModel(MODELS["llama"](), MAX_LENGTH).eager_reason == "forwards on cpu are not captured"


def test_cuda_graph_model_refuses_a_recurrent_model_by_name() -> None:
    with pytest.raises(ValueError, match="a mamba model keeps a state that cannot be cut back"):
        CudaGraphModel(MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)), MAX_LENGTH)


def test_cuda_graph_model_refuses_texts_beyond_max_length() -> None:
    graphed = CudaGraphModel(MODELS["llama"](), 16)
    with pytest.raises(ValueError, match="a text of 17 tokens: there is room for 16"):
        graphed.answer(ForwardRequest([1] * 17, 17))
    with pytest.raises(ValueError, match="an empty text"):
        graphed.answer(ForwardRequest([], 0))


def test_oracle_gives_the_tokens_of_its_teacher() -> None:
    torch.manual_seed(5)
    model, teacher = CudaGraphModel(MODELS["llama"](), MAX_LENGTH), ToyTarget(3)
    oracle = Oracle(model, teacher)
    text = [1, 2, 3]
    for _ in range(8):
        text += teacher.answer(ForwardRequest(text, len(text)))
    assert oracle.answer(ForwardRequest(text, 4)) == teacher.answer(ForwardRequest(text, 4))
    assert oracle.answer(ForwardRequest(text, len(text) + 1)) == ()
    assert [token for token in oracle.poll_draft(ForwardRequest([1, 2, 3], 3), 8) if token is not None] == text[3:]
    assert model.cached_tokens == text[:-1]  # it has computed the teacher's tokens, not its own


def test_oracle_calls_its_teacher_while_the_model_computes() -> None:
    """At the second poll, when the forward is running: the teacher adds nothing to the latency."""
    polls: list[int] = []

    class FakeModel:
        def poll_answer(self, request: ForwardRequest) -> Iterator[None]:  # noqa: ARG002
            for poll in range(3):
                polls.append(poll)
                yield None

    class Teacher:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:
            return (len(polls),) * request.num_positions

    steps = Oracle(FakeModel(), Teacher()).poll_answer(ForwardRequest([1, 2, 3], 2))  # type: ignore[arg-type]
    for _ in range(3):
        next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == (1, 1)


def test_cuda_graph_model_refuses_models_that_ignore_the_cache() -> None:
    rwkv = RwkvForCausalLM(RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=9, context_length=MAX_LENGTH))
    with pytest.raises(ValueError, match="a rwkv model does not use the cache it is given"):
        CudaGraphModel(rwkv, MAX_LENGTH)
    with pytest.raises(ValueError, match="a gpt_neo model keeps a state that cannot be cut back"):
        static_cache(GPTNeoConfig(hidden_size=16, num_layers=2, attention_types=[[["local"], 2]]), MAX_LENGTH)


def test_cuda_graph_model_refuses_to_share_a_drafting_cache() -> None:
    llama = MODELS["llama"]()
    with pytest.raises(ValueError, match="has its cache to itself"):
        CudaGraphModel(llama, MAX_LENGTH, share_cache_with=CudaGraphModel(llama, MAX_LENGTH), drafts=True)
