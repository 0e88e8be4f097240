"""What travels is the difference, and what arrives is the whole."""

import pickle
from threading import Thread

import pytest
from hypothesis import given, strategies as st

from dsi.core.messages import (
    Draft,
    Drafted,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    Verified,
    Verify,
)
from dsi.core.sequence import TokenSequence
from dsi.fleets.connection import MAX_REQUESTS, Connection, JobDecoder, JobEncoder, decode_event, encode_event

tails = st.lists(st.integers(0, 3), max_size=6)


@given(
    st.lists(tails, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), tails), max_size=12),
)
def test_encoder_round_trips_every_job(prompts: list[list[int]], steps: list[tuple[int, int, list[int]]]) -> None:
    encoder, decoder = JobEncoder(), JobDecoder()
    texts = [[TokenSequence.of(prompt)] for prompt in prompts]
    for id, (request, base, tail) in enumerate(steps):
        known = texts[request % len(texts)]
        text = known[base % len(known)]
        for token in tail:
            text = text.then(token)
        known.append(text)
        job: Job = (Prefill(id, text), Draft(id, text, 3), Verify(id, text, 2, 1, Sampling(0.5)))[id % 3]
        arrived = decoder.decode(pickle.loads(pickle.dumps(encoder.encode(job))))
        assert (type(arrived), arrived.id, list(arrived.context)) == (type(job), id, list(text))
        assert len(arrived.context.origin) == len(text.origin)
        if isinstance(job, Verify) and isinstance(arrived, Verify):
            assert (arrived.width, arrived.lead, arrived.sampling) == (2, 1, Sampling(0.5))


def test_encoder_sends_only_the_difference() -> None:
    encoder = JobEncoder()
    text = TokenSequence.of(range(1000))
    assert len(encoder.encode(Prefill(1, text))[4]) == 1000
    longer = text.then(5).then(6)
    assert encoder.encode(Verify(2, longer, 1))[3:5] == (1000, [5, 6])
    assert encoder.encode(Verify(3, text.then(5).then(7), 1))[3:5] == (1001, [7])


def test_encoder_and_decoder_evict_alike() -> None:
    encoder, decoder = JobEncoder(), JobDecoder()
    texts = [TokenSequence.of((i,)) for i in range(MAX_REQUESTS + 3)]
    for _ in range(2):
        for id, text in enumerate(texts):
            assert list(decoder.decode(encoder.encode(Prefill(id, text))).context) == list(text)


@pytest.mark.parametrize("event", [Prefilled(7), Drafted(7, 3), Verified(7, (1, 2)), Failed(7, "why")])
def test_events_round_trip(event: Event) -> None:
    assert decode_event(encode_event(event), 7) == event


def test_connection_carries_messages_of_any_size_in_order() -> None:
    ours, theirs = Connection.pair()
    messages = [(0,), list(range(300_000)), "end"]
    sending = Thread(target=lambda: list(map(theirs.send, messages)))
    sending.start()
    received: list[object] = []
    while len(received) < len(messages):
        received += ours.receive()
    sending.join()
    assert received == messages
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_event_round_trips_alternates() -> None:
    assert decode_event(encode_event(Drafted(7, 3, alternates=(4,))), 7) == Drafted(7, 3, alternates=(4,))
