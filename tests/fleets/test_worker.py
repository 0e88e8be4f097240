"""What a server remembers between jobs."""

import pytest

from cancel_flags import CancelAfter
from dsi.core.messages import Draft, Drafted, Failed, Job, Prefill, Prefilled, Verify
from dsi.core.sequence import Tokens, TokenSequence
from dsi.fleets.servers import PrefixTable, Server, by_name
from dsi.fleets.worker import work
from dsi.models.protocol import NEVER, Cancelled, ForwardRequest


class RecordingModel:
    """A model that writes down how much it was asked, and how much of it was new."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tokens, int, int | None]] = []  # tokens, places, kept
        self.cancels = False

    def answer(self, request: ForwardRequest) -> Tokens:
        if self.cancels:
            raise Cancelled
        self.asked.append((tuple(request.tokens), request.num_positions, request.num_cached))
        return tuple(len(request.tokens) + i for i in range(request.num_positions))


def make_server() -> tuple[Server, RecordingModel]:
    model = RecordingModel()
    return Server("s", "target", model), model


def run_job(job: Job, server: Server) -> list[object]:
    return list(work(job, server))


def test_worker_computes_only_uncached_tokens() -> None:
    server, model = make_server()
    text = TokenSequence.of((1, 2))
    run_job(Prefill(0, text), server)
    run_job(Verify(1, text.then(3), 1), server)
    run_job(Verify(2, text.then(3).then(4).then(5), 2), server)
    assert [(places, kept) for _, places, kept in model.asked] == [(0, None), (1, 2), (2, 3)]


def test_worker_with_shared_kv_needs_no_prefill() -> None:
    """Nor does one make them forget what they have read beyond the sure text."""
    server, model = make_server()
    server.prefixes.shared_kv = True
    text = TokenSequence.of((1, 2))
    run_job(Verify(1, text.then(3).then(4), 2), server)
    assert run_job(Prefill(0, text), server) == [Prefilled(0)]
    run_job(Verify(2, text.then(3).then(4).then(5), 1), server)
    assert [(places, kept) for _, places, kept in model.asked] == [(2, None), (1, 4)]


def test_worker_truncates_rejected_tokens() -> None:
    server, model = make_server()
    text = TokenSequence.of((1, 2))
    run_job(Verify(1, text.then(3).then(4), 3), server)
    run_job(Verify(2, text.then(9), 1), server)
    assert model.asked[-1] == ((1, 2, 9), 1, 2)


def test_worker_keeps_its_draft_tokens_cached() -> None:
    server, model = make_server()
    text = TokenSequence.of((1, 2))
    guesses = [event.token for event in run_job(Draft(1, text, 3), server) if isinstance(event, Drafted)]
    assert [kept for *_, kept in model.asked] == [None, 2, 3]
    accepted = text.then(guesses[0]).then(guesses[1])
    run_job(Draft(2, accepted.then(77), 1), server)
    assert model.asked[-1] == ((1, 2, *guesses[:2], 77), 1, 4)


class GeneratingModel(RecordingModel):
    """The same, which generates up to three tokens in one call."""

    def generate(self, request: ForwardRequest, count: int) -> Tokens:
        self.asked.append((tuple(request.tokens), count, request.num_cached))
        return tuple(range(len(request.tokens), len(request.tokens) + min(count, 3)))


def test_worker_drafts_in_one_call_what_nobody_waits_for_one_by_one() -> None:
    text, one_by_one = TokenSequence.of((1, 2)), [(1, None), (1, 2), (1, 3), (1, 4), (1, 5)]
    for alone, flag, calls in (
        (True, NEVER, [(5, None), (2, 4)]),
        (False, NEVER, one_by_one),
        (True, CancelAfter(99), one_by_one),  # a worker, whose silence would be taken for its death
    ):
        model = GeneratingModel()
        server = Server("s", "drafter", model)
        events = list(work(Draft(1, text, 5, alone=alone), server, flag))
        assert events == [Drafted(1, token) for token in (2, 3, 4, 5, 6)]
        assert [(count, kept) for _, count, kept in model.asked] == calls
        assert server.prefixes.lookup(text).tokens == [1, 2]


def test_worker_caches_nothing_of_a_cancelled_forward() -> None:
    server, model = make_server()
    text = TokenSequence.of((1, 2))
    model.cancels = True
    with pytest.raises(Cancelled):
        run_job(Verify(1, text, 1), server)
    model.cancels = False
    untaken = work(Verify(2, text, 1), server)
    next(untaken)
    del untaken
    run_job(Verify(3, text, 1), server)
    assert model.asked[-1] == ((1, 2), 1, None)


def test_worker_keeps_requests_of_one_prompt_apart() -> None:
    server, model = make_server()
    one, two = TokenSequence.of((1, 2)), TokenSequence.of((1, 2))
    run_job(Verify(1, one.then(3), 1), server)
    run_job(Verify(2, two.then(4), 1), server)
    run_job(Verify(3, one.then(3).then(5), 1), server)
    assert [kept for *_, kept in model.asked] == [None, None, 3]


def test_prefix_table_evicts_the_oldest() -> None:
    prefixes = PrefixTable(capacity=3)
    texts = [TokenSequence.of((i,)) for i in range(4)]
    for text in texts:
        prefixes.lookup(text)
    assert len(prefixes.entries) == 3
    assert texts[0] not in prefixes.entries
    assert texts[-1] in prefixes.entries


def test_worker_prefills_an_empty_prompt_once() -> None:
    server, model = make_server()
    text = TokenSequence.of(())
    run_job(Verify(1, text, 1), server)
    run_job(Verify(2, text.then(5), 1), server)
    assert [kept for *_, kept in model.asked] == [None, 0]


def test_worker_fails_an_answer_of_the_wrong_length() -> None:
    class Short:
        def answer(self, request: ForwardRequest) -> Tokens:  # noqa: ARG002
            return (1,)

    [event] = run_job(Verify(1, TokenSequence.of((1, 2)), 2), Server("s", "target", Short()))
    assert event == Failed(1, "ValueError: 1 tokens in answer to 2 positions")


def test_by_name_refuses_duplicates() -> None:
    with pytest.raises(ValueError, match="two servers are called 's'"):
        by_name([make_server()[0], make_server()[0]])
