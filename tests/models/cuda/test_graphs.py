"""Static caches and padded forwards, as they run on any device: only recording them needs a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPTNeoConfig, MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

from decoders import MODELS, ROOM
from dsi.core.messages import Sampling
from dsi.models.cuda.graphs import CudaGraphModel, EagerForward, static_cache
from dsi.models.hf import Transformer
from dsi.models.protocol import Cancelled, ForwardRequest, SamplingModel
from dsi.models.toy import ToyTarget
from oracle import Oracle


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    return MODELS[request.param]().eval()


def written(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the model writes without any cache."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def test_it_writes_what_the_model_writes_to_the_end_of_its_room(model: Any) -> None:
    text = written(model, [1, 5, 9], ROOM - 3)
    found, graphed = [1, 5, 9], CudaGraphModel(model, ROOM)
    while len(found) < ROOM:
        found += graphed.answer(ForwardRequest(found, len(found)))
    assert found == text
    assert graphed.answer(ForwardRequest(text, 3)) == (*text[3:], *graphed.answer(ForwardRequest(text, ROOM)))


def test_guesses_stream_as_if_asked_for_one_by_one(model: Any) -> None:
    text = written(model, [4, 4, 2], 20)
    tokens = [
        token for token in CudaGraphModel(model, ROOM).poll_draft(ForwardRequest([4, 4, 2], 3), 20) if token is not None
    ]
    assert tokens == text[3:]


def in_a_chain(model: Any) -> CudaGraphModel:
    """As if its forwards had been recorded: those that are not guess better one by one."""
    found = CudaGraphModel(model, ROOM, drafts=True)
    assert found._followers == []
    found._followers = [EagerForward(found._follower(turn), ()) for turn in (0, 1)]
    return found


def test_a_chain_of_guesses_is_what_one_after_the_other_would_be(model: Any) -> None:
    """To the end of the room and no further."""
    text = written(model, [4, 4, 2], ROOM - 2)
    chained = in_a_chain(model)
    tokens = [token for token in chained.poll_draft(ForwardRequest([4, 4, 2], 3), 20) if token is not None]
    assert tokens == text[3:23]
    assert chained.cached_tokens == text[:22]
    stream = chained.poll_draft(ForwardRequest(text[:30], 30), 99)
    for token in text[30:]:
        assert next(token for token in stream if token is not None) == token
    with pytest.raises(ValueError, match=f"a text of {ROOM + 1} tokens: there is room for {ROOM}"):
        next(stream)


@pytest.mark.parametrize("looks", range(1, 9))
def test_a_chain_that_is_broken_off_leaves_no_trace(looks: int) -> None:
    torch.manual_seed(6)
    llama = MODELS["llama"]().eval()
    chained, plain = in_a_chain(llama), SamplingModel(Transformer(llama, max_sequences=1))
    with pytest.raises(Cancelled):
        list(chained.poll_draft(ForwardRequest([1, 2, 3], 3, cancelled=After(looks)), 30))
    held = chained.cached_tokens
    assert chained.answer(ForwardRequest(held, 1)) == plain.answer(ForwardRequest(held, 1))
    other = [1, 2, 3, *held[3:5], 7, 7]
    assert chained.answer(ForwardRequest(other, 4)) == plain.answer(ForwardRequest(other, 4))


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 20)), max_size=6))
@settings(max_examples=25, deadline=None)
def test_it_answers_as_if_it_had_no_memory(asks: list[tuple[list[int], int]]) -> None:
    torch.manual_seed(2)
    llama = MODELS["llama"]().eval()
    graphed, plain = CudaGraphModel(llama, ROOM), SamplingModel(Transformer(llama, max_sequences=1))
    for text, start in asks:
        request = ForwardRequest(text, min(start, len(text) + 1))
        assert graphed.answer(request) == plain.answer(request)


@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=3), Sampling(1.0, 20, 0.9, seed=7)])
def test_a_seed_gives_the_same_tokens_as_without_a_static_cache(sampling: Sampling) -> None:
    torch.manual_seed(3)
    llama = MODELS["llama"]().eval()
    text = list(range(30))
    asked = ForwardRequest(text, 11, sampling=sampling)
    assert CudaGraphModel(llama, ROOM).answer(asked) == SamplingModel(Transformer(llama)).answer(asked)
    stream = CudaGraphModel(llama, ROOM).poll_draft(ForwardRequest([1, 2], 2, sampling=sampling), 9)
    found = [1, 2]
    for _ in range(9):
        found += SamplingModel(Transformer(llama)).answer(ForwardRequest(found, len(found), sampling=sampling))
    assert [token for token in stream if token is not None] == found[2:]


class After:
    """A flag that is set after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: float) -> bool:  # noqa: ARG002
        return self.is_set()


@pytest.mark.parametrize("looks", [0, 1])
def test_a_cancelled_forward_ends_between_pieces_and_leaves_no_trace(looks: int) -> None:
    torch.manual_seed(4)
    llama = MODELS["llama"]().eval()
    graphed = CudaGraphModel(llama, ROOM, segments=3)
    assert graphed.segments == 3
    before = graphed.answer(ForwardRequest([1, 2, 3], 1))
    with pytest.raises(Cancelled):
        graphed.answer(ForwardRequest([1, 2, 9, 9, 9], 3, cancelled=After(looks)))
    assert graphed.answer(ForwardRequest([1, 2, 3], 1)) == before


def test_where_nothing_is_recorded_it_says_why() -> None:
    assert CudaGraphModel(MODELS["llama"](), ROOM).eager_reason == "forwards on cpu are not recorded"


def test_a_recurrent_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a mamba model keeps a state that cannot be cut back"):
        CudaGraphModel(MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)), ROOM)


def test_texts_beyond_the_room_are_refused() -> None:
    graphed = CudaGraphModel(MODELS["llama"](), 16)
    with pytest.raises(ValueError, match="a text of 17 tokens: there is room for 16"):
        graphed.answer(ForwardRequest([1] * 17, 17))
    with pytest.raises(ValueError, match="an empty text"):
        graphed.answer(ForwardRequest([], 0))


def test_an_oracle_says_what_its_mind_says_and_computes_with_its_body() -> None:
    torch.manual_seed(5)
    body, teacher = CudaGraphModel(MODELS["llama"](), ROOM), ToyTarget(3)
    oracle = Oracle(body, teacher)
    text = [1, 2, 3]
    for _ in range(8):
        text += teacher.answer(ForwardRequest(text, len(text)))
    assert oracle.answer(ForwardRequest(text, 4)) == teacher.answer(ForwardRequest(text, 4))
    assert oracle.answer(ForwardRequest(text, len(text) + 1)) == ()
    assert [token for token in oracle.poll_draft(ForwardRequest([1, 2, 3], 3), 8) if token is not None] == text[3:]
    assert body.cached_tokens == text[:-1]  # it has read what the mind said, not what it found itself


def test_an_oracle_thinks_while_its_body_computes() -> None:
    """At the second look, when the forward has long begun: nobody waits for the mind in the end."""
    looks: list[int] = []

    class Body:
        def poll_answer(self, request: ForwardRequest) -> Iterator[None]:  # noqa: ARG002
            for look in range(3):
                looks.append(look)
                yield None

    class AdaptiveController:
        def answer(self, request: ForwardRequest) -> tuple[int, ...]:
            return (len(looks),) * request.num_positions

    poll_answer = Oracle(Body(), AdaptiveController()).poll_answer(ForwardRequest([1, 2, 3], 2))  # type: ignore[arg-type]
    for _ in range(3):
        next(poll_answer)
    with pytest.raises(StopIteration) as end:
        next(poll_answer)
    assert end.value.value == (1, 1)


def test_models_that_do_not_use_the_cache_are_refused_by_name() -> None:
    rwkv = RwkvForCausalLM(RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=9, context_length=ROOM))
    with pytest.raises(ValueError, match="a rwkv model does not use the cache it is given"):
        CudaGraphModel(rwkv, ROOM)
    with pytest.raises(ValueError, match="a gpt_neo model keeps a state that cannot be cut back"):
        static_cache(GPTNeoConfig(hidden_size=16, num_layers=2, attention_types=[[["local"], 2]]), ROOM)


def test_one_that_guesses_shares_its_cache_with_nobody() -> None:
    llama = MODELS["llama"]()
    with pytest.raises(ValueError, match="has its cache to itself"):
        CudaGraphModel(llama, ROOM, share_cache_with=CudaGraphModel(llama, ROOM), drafts=True)
