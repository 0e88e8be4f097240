"""Jobs of several requests in shared forwards: on one server, and in a fleet."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Barrier, Event as ThreadEvent, get_ident
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.messages import (
    WOKEN,
    Draft,
    Drafted,
    DraftedBlock,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    Verified,
    Verify,
)
from dsi.core.policies import Load, autoregressive, distributed, policy_for, speculative
from dsi.core.request import Request, ScoreRequest, VerifyRequest
from dsi.core.sequence import TokenSequence
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END, Level, Tree
from dsi.fleets.job_requests import TreeGrowth
from dsi.fleets.loop import EngineLoop, FleetError
from dsi.fleets.packed import FEW_TEXTS, MAX_STEPS, MAX_TOKENS, MIN_CHUNK, PackedServer
from dsi.fleets.processes import MAX_AT_ONCE, MIN_SPLIT, ProcessFleet
from dsi.fleets.servers import Server
from dsi.fleets.spans import Span
from dsi.fleets.worker import work
from dsi.models.protocol import (
    Answer,
    ForwardRequest,
    LaunchedGrowth,
    Model,
    SamplingModel,
    StopFlag,
    top_k_or_answer,
    tree_answer,
)
from dsi.models.toy import ToyDrafter, ToyTarget

TARGET, BAD = ToyTarget(5), 1000


@dataclass
class Packing:
    """A toy model that computes several texts at once, and records how many tokens of each."""

    model: Model
    can_pack: bool = True
    computes_trees: bool = True
    forwards_at_once: int = 1
    meeting: Barrier | None = None  # of forwards that are to run at once
    forwards: list[list[int]] = field(default_factory=list)

    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        if BAD in request.tokens:
            raise OSError("a bad token")
        return self.model.answer(request) if request.num_positions else ()

    def top_k(self, request: ForwardRequest, count: int) -> tuple[int, ...]:
        return top_k_or_answer(self.model, request, count)

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        if at_once > 1 and self.meeting is not None:
            self.meeting.wait(10)
        answers = [tree_answer(self, request) for request in requests]
        self.forwards.append(
            [len(request.tokens) - (request.num_cached or 0) + request.num_new_nodes for request in requests]
        )
        return answers


def text(*tokens: int) -> TokenSequence:
    return TokenSequence.of(tokens)


def packed_server(model: Model = TARGET) -> tuple[PackedServer, Packing]:
    packing = Packing(model)
    server = PackedServer.of(Server("target-1", "target", packing))
    assert server is not None
    return server, packing


def after(tokens: Sequence[int], count: int = 1) -> tuple[int, ...]:
    """The target's text after these tokens."""
    written = list(tokens)
    for _ in range(count):
        written += TARGET.answer(ForwardRequest(written, len(written)))
    return tuple(written[len(tokens) :])


def test_packed_server_answers_jobs_of_several_requests_in_one_forward() -> None:
    server, packing = packed_server()
    prompts = [(1, 2), (3,), (4, 5, 6)]
    for id, prompt in enumerate(prompts):
        server.add(Verify(id, text(*prompt), 1))
    assert [event for *_, event in server.step()] == [Verified(id, after(prompt)) for id, prompt in enumerate(prompts)]
    assert packing.forwards == [[2, 1, 3]]
    assert server.jobs == {}


def test_packed_server_lets_jobs_join_between_two_forwards() -> None:
    server, packing = packed_server()
    first = text(1, 2)
    server.add(Draft(0, first, 3))
    events = [server.step()]
    server.add(Draft(1, text(9), 1))
    events += [server.step(), server.step()]
    a, b, c = after((1, 2), 3)
    assert [[event for *_, event in step] for step in events] == [
        [Drafted(0, a)],
        [Drafted(0, b), Drafted(1, after((9,))[0])],
        [Drafted(0, c)],
    ]
    assert [tuple(context) for _, context, _ in events[1]] == [(1, 2, a), (9,)]
    assert packing.forwards == [[2], [1, 1], [1]]


def test_packed_server_reads_long_prompts_in_chunks_beside_others() -> None:
    server, packing = packed_server()
    prompt = [i % 50 for i in range(300)]
    server.add(Verify(0, text(*prompt), 1))
    events = []
    for id in range(1, 5):
        server.add(Verify(id, text(id), 1))
        events.append([event for *_, event in server.step()])
    assert [len(step) for step in events] == [1, 1, 2, 1]
    assert events[2] == [Verified(3, after((3,))), Verified(0, after(prompt))]
    assert packing.forwards == [[1, MAX_TOKENS - 1], [1, MAX_TOKENS - 1], [1, 300 - 2 * (MAX_TOKENS - 1)], [1]]


class Caching(Packing):
    """One that has ten tokens of every text in its KV cache."""

    def num_cached(self, tokens: Sequence[int]) -> int:
        return min(10, len(tokens))


def test_packed_server_asks_what_is_cached_of_a_new_text() -> None:
    packing = Caching(TARGET)
    server = PackedServer(Server("target-1", "target", packing), packing)
    server.max_tokens = 16
    first, second = text(*range(25)), text(*range(10))
    server.add(Verify(0, first, 1))
    server.add(Verify(1, second, 1))
    assert [event.id for *_, event in server.step()] == [0, 1]
    server.add(Verify(2, first.then(1).then(2), 1))
    assert [event.id for *_, event in server.step()] == [2]
    assert packing.forwards == [[15, 0], [2]]


def test_packed_server_reads_prompts_where_others_fill_its_forwards() -> None:
    server, packing = packed_server()
    server.add(Verify(0, text(*range(40)), 1))
    for id in range(1, MAX_TOKENS + 5):
        server.add(Verify(id, text(id % 60), 1))
    assert len(server.step()) == MAX_TOKENS
    assert sum(packing.forwards[0]) == MAX_TOKENS + MIN_CHUNK
    assert [event.id for *_, event in server.step()] == [
        MAX_TOKENS + 1,
        MAX_TOKENS + 2,
        MAX_TOKENS + 3,
        MAX_TOKENS + 4,
        0,
    ]


TREE: Tree = ((END, 5), (END, 6), (0, 7), (1, 8))  # after a text


def tree_after(id: int, *prompt: int, lead: int = 0) -> Verify:
    """A verification of the root, and of a tree after it."""
    return Verify(id, text(*prompt), 1, lead, tree=TREE, asked=(0, 1, 2, 3))


def after_tree(*prompt: int) -> tuple[int, ...]:
    paths = ((), (5,), (6,), (5, 7), (6, 8))
    return tuple(token for path in paths for token in after((*prompt, *path)))


def test_packed_server_verifies_trees_beside_other_texts() -> None:
    server, packing = packed_server()
    server.add(first := tree_after(0, 1, 2))
    server.add(Verify(1, text(3), 1))
    server.add(tree_after(2, 4))
    forward = server.begin(MAX_TOKENS)
    server.run(forward)
    assert [event for *_, event in server.finish(forward)] == [
        Verified(0, after_tree(1, 2)),
        Verified(1, after((3,))),
        Verified(2, after_tree(4)),
    ]
    assert packing.forwards == [[2 + 4, 1, 1 + 4]]
    assert forward.num_rows == 6 + 1 + 5
    accepted = server.server.prefixes.lookup(first.context.then(6).then(8))
    assert accepted.num_cached == 4  # a path that was computed as a part of the tree


def test_packed_server_drafts_a_level_of_each_tree_in_a_forward() -> None:
    drafter = ToyDrafter(TARGET, 0.7, 8, runner_up_acceptance=0.5)
    prompts = [(1, 2), (3,), (4, 5, 6)]
    expansions = [((END, 2), (0, 2), (1, 1)), ((END, 1),), ((0, 1), (4, 2))]  # the last one after a tree
    jobs = [
        Draft(id, text(*prompt), 1, tree=TREE if id == 2 else (), expansions=grown)
        for id, (prompt, grown) in enumerate(zip(prompts, expansions))
    ]
    server, packing = packed_server(drafter)
    for job in jobs:
        server.add(job)
    server.add(Draft(3, text(9), 2))
    steps = [[event for *_, event in server.step()] for _ in range(2)]
    alone = [list(work(job, Server("drafter", "drafter", drafter))) for job in jobs]
    assert [[event for step in steps for event in step if event.id == id] for id in range(3)] == alone
    assert [[event.id for event in step] for step in steps] == [[0, 1, 2, 3], [0, 2, 3]]
    assert packing.forwards == [[2, 1, 3 + 1, 1], [2, 1, 1]]
    assert server.jobs == {}


def test_packed_server_goes_on_with_a_tree_whose_drafter_has_no_more_choices() -> None:
    server, packing = packed_server(SamplingModel(TARGET))
    only = Sampling(allowed_token_ids=(8,))
    server.add(Draft(0, text(1, 2), 1, sampling=only, expansions=((END, 2), (1, 3), (3, 1))))
    events = [event for _ in range(3) for *_, event in server.step()]
    assert events == [DraftedLevel(0, ((8,),)), DraftedLevel(0, ((),), 1), DraftedLevel(0, ((),), 2)]
    assert packing.forwards == [[2], [0], [0]]


def test_packed_server_reads_the_prompt_of_a_tree_in_chunks() -> None:
    server, packing = packed_server()
    prompt = [i % 50 for i in range(130)]
    server.add(tree_after(0, *prompt))
    server.add(Verify(1, text(3), 1))
    assert [[event for *_, event in server.step()] for _ in range(2)] == [
        [Verified(1, after((3,)))],
        [Verified(0, after_tree(*prompt))],
    ]
    assert packing.forwards == [[1, MAX_TOKENS - 1], [3 + 4]]


class Growing(Packing):
    """One that says it computes all levels of any tree together, and records after which texts it was asked to."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.grown: list[int] = []

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        yield None
        return self.answer_packed(requests)

    def can_grow(self, request: ForwardRequest, levels: Sequence[Level]) -> bool:  # noqa: ARG002
        return True

    def poll_levels(self, request: ForwardRequest, levels: Sequence[Level]) -> Iterator[Answer | None]:
        self.grown.append(len(request.tokens))
        yield from [tree_answer(self, request), *[Answer(children=((),) * len(level)) for level in levels]]


def test_packed_server_grows_a_tree_when_all_of_a_long_prompt_is_read() -> None:
    model = Growing()
    server = PackedServer.of(Server("drafter", "drafter", model))
    assert server is not None
    prompt = [i % 50 for i in range(MAX_TOKENS + 2)]
    server.add(Draft(0, text(*prompt), 1, expansions=((END, 1), (0, 1))))
    for grown in ([], [MAX_TOKENS + 2]):
        forward = server.begin(MAX_TOKENS)
        answers = [answer for answer in server.poll(forward) if isinstance(answer, Answer)]
        levels = [event for answer in answers for *_, event in server.finish_level(forward, answer)]
        assert (server.finish(forward), model.grown, len(levels)) == ([], grown, 2 * len(grown))
    assert model.forwards == [[MAX_TOKENS]]
    assert server.jobs == {}


def test_packed_server_takes_jobs_as_wide_as_the_forwards_of_its_model() -> None:
    model = Growing()
    tree = tuple((END, token) for token in range(200))
    for max_rows, accepts in ((128, False), (256, True)):
        model.max_rows = max_rows  # type: ignore[attr-defined]
        server = PackedServer.of(Server("target-1", "target", model))
        assert server is not None
        assert server.accepts(Verify(0, text(1), 1, tree=tree, asked=tuple(range(200)))) == accepts


def test_packed_server_begins_a_second_forward_for_what_has_no_room_in_the_next() -> None:
    server, packing = packed_server()
    server.max_tokens, server._most_in_flight = 3, 2
    for id in range(2):
        server.add(Verify(id, text(id), 1))
    first = server.begin(server.max_tokens)
    assert not server.should_begin([first])  # there is nothing
    server.add(Verify(2, text(2), 1))
    assert not server.should_begin([first])  # all three have room in one
    server.add(Verify(3, text(3), 1))
    assert server.should_begin([first])
    second = server.begin(server.max_tokens)
    server.add(Verify(4, text(4), 1))
    assert not server.should_begin([first, second])
    for forward in (first, second):
        server.run(forward)
        server.finish(forward)
    assert server.should_begin([])
    assert packing.forwards == [[1, 1], [1, 1]]


def test_packed_server_lets_few_jobs_wait_for_many_that_are_coming() -> None:
    server, _ = packed_server()
    assert not server.should_begin([], 0)
    server.add(Verify(0, text(1), 1))
    assert server.should_begin([], 3)
    assert not server.should_begin([], 4)
    server.add(Verify(1, text(*range(40)), 1))
    assert server.should_begin([], 4)
    assert server.num_drafting == 1  # the other one reads a prompt


def test_packed_server_computes_what_somebody_waits_for_before_speculation_and_prompts() -> None:
    server, packing = packed_server()
    server.max_tokens = 12
    server.add(Verify(0, text(*range(40)), 1))  # a prompt
    server.add(tree_after(1, 1, 2, lead=3))  # six rows
    server.add(tree_after(2, 3))
    server.add(Draft(3, text(4), 1))
    server.add(tree_after(4, 5))
    assert [event.id for *_, event in server.step()] == [2, 3, 4]
    assert [event.id for *_, event in server.step()] == [1]
    assert packing.forwards == [[1 + 4, 1, 1 + 4, MIN_CHUNK], [2 + 4, MIN_CHUNK]]


def test_packed_server_computes_speculation_that_somebody_waits_for_now() -> None:
    server, packing = packed_server()
    server.max_tokens = 2
    server.add(Verify(0, text(1, 2), 1, lead=3))
    server.add(Verify(1, text(3), 1))
    server.add(Verify(2, text(4), 1))
    server.promote(0)
    server.promote(99)
    assert [[event.id for *_, event in server.step()] for _ in range(2)] == [[0], [1, 2]]
    assert packing.forwards == [[2], [1, 1]]


def test_packed_server_computes_a_tree_that_is_larger_than_its_forwards() -> None:
    server, packing = packed_server()
    server.max_tokens = 3
    server.add(tree_after(0, 1))
    server.add(tree_after(1, 2))
    assert [[event.id for *_, event in server.step()] for _ in range(2)] == [[0], [1]]
    assert packing.forwards == [[5], [5]]


def test_packed_server_refuses_trees_where_the_model_computes_chains() -> None:
    server, packing = packed_server()
    packing.computes_trees = False
    assert not server.accepts(tree_after(0, 1))
    assert not server.accepts(Draft(0, text(1), 1, expansions=((END, 2),)))
    assert server.accepts(Draft(0, text(1), 1))
    packing.computes_trees = True
    wide = tuple((END, token) for token in range(MAX_TOKENS))
    assert not server.accepts(Verify(0, text(1), 1, tree=wide, asked=tuple(range(MAX_TOKENS))))
    assert server.accepts(Verify(0, text(1), 0, tree=wide, asked=tuple(range(MAX_TOKENS))))


def test_packed_server_fails_only_the_job_that_cannot_be_computed() -> None:
    server, _ = packed_server()
    for id, prompt in enumerate([(1,), (2, BAD), (3,)]):
        server.add(Verify(id, text(*prompt), 1))
    assert [event for *_, event in server.step()] == [
        Verified(0, after((1,))),
        Failed(1, "OSError: a bad token"),
        Verified(2, after((3,))),
    ]


def test_packed_server_accepts_one_job_of_a_request_that_gives_tokens_only() -> None:
    server, _ = packed_server()
    origin = text(1)
    server.add(Verify(0, origin, 1))
    assert not server.accepts(Verify(1, origin.then(2), 2))
    assert server.accepts(Verify(1, text(1), 2))
    assert not server.accepts(Verify(1, text(1), MAX_TOKENS + 1))
    assert server.accepts(Prefill(1, text(1)))
    assert not server.accepts(Draft(1, text(1), 3, sampling=Sampling(temperature=1, rule="reject")))
    assert server.discard(0)
    assert not server.discard(0)
    assert server.accepts(Verify(1, origin.then(2), 2))


def test_packed_server_keeps_forwards_that_run_at_once_apart() -> None:
    server, packing = packed_server()
    for id in range(4):
        server.add(Verify(id, text(id), 1))
    first, second = server.begin(2), server.begin(2)
    assert (server.has_ready_jobs, server.begin(2).parts) == (False, [])
    server.run(second, 2)
    server.run(first, 2)
    assert [event for *_, event in server.finish(first)] == [Verified(id, after((id,))) for id in (0, 1)]
    assert [event for *_, event in server.finish(second)] == [Verified(id, after((id,))) for id in (2, 3)]
    assert packing.forwards == [[1, 1], [1, 1]]


def test_packed_server_takes_the_first_job_however_little_room_there_is() -> None:
    server, packing = packed_server()
    server.add(Verify(0, text(*range(9)), 1))
    server.add(Verify(1, text(1), 1))
    assert [[part.packed.job.id for part in server.begin(4).parts] for _ in range(2)] == [[0], [1]]
    assert packing.forwards == []


def test_packed_server_drops_a_job_amid_its_forward() -> None:
    server, _ = packed_server()
    origin = text(1, 2)
    server.add(Verify(0, origin, 1))
    server.add(Verify(1, text(3), 1))
    forward = server.begin(MAX_TOKENS)
    assert server.discard(0)
    assert not server.accepts(Verify(2, origin, 1))  # which would fill the KV cache that the forward fills
    server.run(forward)
    assert [event for *_, event in server.finish(forward)] == [Verified(1, after((3,)))]
    server.add(Verify(2, origin, 1))
    assert [event for *_, event in server.step()] == [Verified(2, after((1, 2)))]


@dataclass
class Interrupted(Packing):
    """One that calls this in its forward of this number."""

    number: int = 0
    call: Callable[[], Any] = lambda: None

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        if len(self.forwards) + 1 == self.number:
            self.call()
        return super().answer_packed(requests, at_once)


def interrupted_server(number: int) -> tuple[PackedServer, Interrupted]:
    """Where all can go on, four forwards follow one another."""
    packing = Interrupted(TARGET, number=number)
    server = PackedServer(Server("target-1", "target", packing), packing)
    server.steps_for = lambda _: 4
    return server, packing


def going_on(id: int, count: int, *prompt: int, sampling: Sampling | None = None) -> Draft:
    """A text that the target continues."""
    return Draft(id, text(*prompt), count, "target", sampling or Sampling(), alone=True)


def events_of(server: PackedServer) -> list[Event]:
    return [event for *_, event in server.step()]


def drafted(events: Sequence[Event], id: int) -> tuple[int, ...]:
    """The tokens of a job."""
    blocks = [event for event in events if isinstance(event, DraftedBlock) and event.id == id]
    ones = [event for event in events if isinstance(event, Drafted) and event.id == id]
    assert not (blocks and ones)
    return tuple(token for block in blocks for token in block.tokens) or tuple(one.token for one in ones)


def test_packed_server_generates_several_tokens_of_each_text() -> None:
    server, packing = packed_server()
    rows: list[int] = []

    def steps_for(num_rows: int) -> int:
        rows.append(num_rows)
        return 4

    server.steps_for, server.tells_meanwhile = steps_for, True
    jobs = [going_on(0, 6, 1, 2), going_on(1, 1, 3), going_on(2, 3, 4, 5, 6)]
    for job in jobs:
        server.add(job)
    forward = server.begin(MAX_TOKENS)
    assert (forward.num_steps, forward.counts, rows) == (4, [4, 1, 3], [6])
    server.run(forward)
    written = after((1, 2), 6)
    assert [(job, tuple(context), event) for job, context, event in server.finish(forward)] == [
        (jobs[0], (1, 2), DraftedBlock(0, written[:4])),
        (jobs[1], (3,), Drafted(1, after((3,))[0])),
        (jobs[2], (4, 5, 6), DraftedBlock(2, after((4, 5, 6), 3))),
    ]
    assert packing.forwards == [[2, 1, 3], [1, 1], [1, 1], [1]]
    assert list(server.jobs) == [0]
    prefixes = [server.server.prefixes.entries[job.context.origin] for job in jobs]
    assert [prefix.tokens for prefix in prefixes] == [
        [1, 2, *written[:4]],
        [3, *after((3,))],
        [4, 5, 6, *after((4, 5, 6), 3)],
    ]
    assert [tuple(prefix.context) for prefix in prefixes] == [tuple(prefix.tokens) for prefix in prefixes]
    assert [prefix.num_cached for prefix in prefixes] == [5, 1, 5]  # all but the last token
    assert events_of(server) == [DraftedBlock(0, written[4:])]
    assert packing.forwards[4:] == [[1], [1]]
    assert (server.jobs, rows) == ({}, [6, 1])


def test_packed_server_verifies_what_it_has_generated() -> None:
    """Its last token is new to the model."""
    server, packing = interrupted_server(0)
    server.add(job := going_on(0, 3, 1, 2))
    [event] = events_of(server)
    assert isinstance(event, DraftedBlock)
    context = job.context
    for token in event.tokens:
        context = context.then(token)
    server.add(Verify(1, context, 1))
    assert events_of(server) == [Verified(1, after(tuple(context)))]
    assert packing.forwards == [[2], [1], [1], [1]]


PROMPT = tuple(i % 50 for i in range(2 * MAX_TOKENS))
EXPANSIONS = ((END, 2), (0, 2))


@pytest.mark.parametrize(
    ("jobs", "num_steps"),
    [
        ([], 1),
        ([going_on(1, 9, 3)], 4),
        ([going_on(1, 9, 3), going_on(2, 1, 4)], 1),  # one of few texts does not wait for the others
        ([going_on(1, 9, 3), *(going_on(2 + i, 1, 4 + i) for i in range(FEW_TEXTS))], 4),  # as long as one goes on
        ([Draft(1, text(3), 9, alone=True)], 4),
        ([Verify(1, text(3), 1, alone=True)], 1),
        ([going_on(1, 9, 3), tree_after(2, 4)], 1),
        ([Prefill(1, text(3))], 1),
        ([Draft(1, text(3), 1, expansions=EXPANSIONS, alone=True)], 1),
        ([going_on(1, 9, *PROMPT)], 1),  # a prompt that is read in chunks
    ],
)
def test_packed_server_runs_one_forward_where_a_job_does_not_only_go_on(jobs: list[Job], num_steps: int) -> None:
    server, packing = interrupted_server(0)
    server.add(going_on(0, 4 if jobs else 1, 1, 2))
    for job in jobs:
        server.add(job)
    forward = server.begin(MAX_TOKENS)
    assert (forward.num_steps, len(forward.parts)) == (num_steps, 1 + len(jobs))
    server.run(forward)
    assert len(packing.forwards) == num_steps
    tokens = after((1, 2), num_steps)
    expected = DraftedBlock(0, tokens) if num_steps > 1 else Drafted(0, tokens[0])
    assert server.finish(forward)[0][2] == expected


def test_packed_server_begins_an_empty_forward_of_one_step() -> None:
    server, _ = interrupted_server(0)
    forward = server.begin(MAX_TOKENS)
    assert (forward.num_steps, forward.parts) == (1, [])


@pytest.mark.parametrize(("number", "tokens"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_packed_server_stops_after_the_forward_in_progress(number: int, tokens: int) -> None:
    server, packing = interrupted_server(number)
    prompts = [(1, 2), (3,), (4, 5, 6)]
    for id, prompt in enumerate(prompts):
        server.add(going_on(id, 5, *prompt))
    forward = server.begin(MAX_TOKENS)
    packing.call = forward.stop.set
    server.run(forward)
    events = [event for *_, event in server.finish(forward)]
    assert [drafted(events, id) for id in range(3)] == [after(prompt, tokens) for prompt in prompts]
    assert len(packing.forwards) == tokens
    later = events_of(server)
    while server.jobs:
        later += events_of(server)
    assert [drafted(later, id) for id in range(3)] == [after(prompt, 5)[tokens:] for prompt in prompts]


def test_packed_server_gives_one_token_where_it_is_to_stop_before_it_runs() -> None:
    server, packing = interrupted_server(0)
    for id, prompt in enumerate([(1, 2), (3,)]):
        server.add(going_on(id, 5, *prompt))
    forward = server.begin(MAX_TOKENS)
    forward.stop.set()
    server.run(forward)
    assert [event for *_, event in server.finish(forward)] == [
        Drafted(0, after((1, 2))[0]),
        Drafted(1, after((3,))[0]),
    ]
    assert packing.forwards == [[2, 1]]


def test_packed_server_fails_only_the_text_that_cannot_go_on() -> None:
    server, packing = interrupted_server(0)
    prompts = [(1,), (2, BAD), (3,)]
    for id, prompt in enumerate(prompts):
        server.add(going_on(id, 5, *prompt))
    assert events_of(server) == [
        Drafted(0, after((1,))[0]),
        Failed(1, "OSError: a bad token"),
        Drafted(2, after((3,))[0]),
    ]
    assert events_of(server) == [DraftedBlock(id, after(prompts[id], 5)[1:]) for id in (0, 2)]
    assert packing.forwards == [[1], [1], *[[1, 1]] * 4]


def test_packed_server_computes_each_text_again_where_a_later_forward_fails() -> None:
    def fail() -> None:
        packing.number = 0
        raise OSError("once")

    server, packing = interrupted_server(3)
    packing.call = fail
    prompts = [(1, 2), (3,), (4, 5, 6)]
    for id, prompt in enumerate(prompts):
        server.add(going_on(id, 5, *prompt))
    assert events_of(server) == [Drafted(id, after(prompt)[0]) for id, prompt in enumerate(prompts)]
    assert packing.forwards == [[2, 1, 3], [1, 1, 1], [2], [1], [3]]
    assert events_of(server) == [DraftedBlock(id, after(prompt, 5)[1:]) for id, prompt in enumerate(prompts)]
    assert server.jobs == {}


def test_packed_server_drops_a_text_amid_the_forwards_that_generate_it() -> None:
    server, packing = interrupted_server(2)
    server.add(job := going_on(0, 9, 1, 2))
    server.add(going_on(1, 9, 3))
    packing.call = lambda: server.discard(0)
    assert events_of(server) == [DraftedBlock(1, after((3,), 4))]
    prefix = server.server.prefixes.entries[job.context.origin]
    assert (prefix.tokens, prefix.num_cached) == ([1, 2], None)
    server.add(replace(job, id=2))
    assert events_of(server) == [DraftedBlock(1, after((3,), 8)[4:]), DraftedBlock(2, after((1, 2), 4))]


PROCESSED = Sampling(0.8, seed=4, frequency_penalty=1.5, min_tokens=9, end_token_ids=tuple(range(0, 64, 4)))


def test_packed_server_samples_the_tokens_of_one_forward_at_a_time() -> None:
    """Positions, and what is the prompt, count for each of the forwards that follow one another."""
    model = SamplingModel(TARGET)
    samplings = [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, seed=3, top_k=5), PROCESSED]
    prompts = [(1, 2), (3, 5, 8), (4,), tuple(range(0, 26, 2))]
    written = []
    for steps in (1, 3, 8):
        server, packing = packed_server(model)
        server.steps_for = lambda _, steps=steps: steps  # type: ignore[misc]
        for id, (prompt, sampling) in enumerate(zip(prompts, samplings)):
            server.add(going_on(id, 8 + id, *prompt, sampling=sampling))
        events = list[Event]()
        while server.jobs:
            events += events_of(server)
        written.append(
            [tuple(token for event in events if event.id == id for token in drafted([event], id)) for id in range(4)]
        )
        assert list(map(len, packing.forwards)) == [4] * 8 + [3, 2, 1]
    alone = []
    for id, (prompt, sampling) in enumerate(zip(prompts, samplings)):
        tokens = list(prompt)
        for _ in range(8 + id):
            request = ForwardRequest(tokens, len(tokens), sampling=sampling, prompt_length=len(prompt))
            tokens += model.answer(request)
        alone.append(tuple(tokens[len(prompt) :]))
    assert written == [alone] * 3


def test_packed_server_takes_those_first_that_were_ready_first() -> None:
    """Texts of which only some have room take turns."""
    server, _ = packed_server()
    for id in range(5):
        server.add(going_on(id, 4, id))
    taken = []
    for _ in range(10):
        forward = server.begin(2)
        taken.append([part.packed.job.id for part in forward.parts])
        server.run(forward)
        server.finish(forward)
    assert taken == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]] * 2
    assert server.jobs == {}


def test_packed_server_has_urgent_jobs_where_some_have_not_begun() -> None:
    server, _ = packed_server()
    states = [server.has_urgent_jobs]
    for job in (going_on(0, 9, 1), Draft(1, text(2), 3), Verify(2, text(3), 1)):
        server.add(job)
        states.append(server.has_urgent_jobs)
    server.begin(MAX_TOKENS)
    states.append(server.has_urgent_jobs)  # which a forward computes
    assert states == [False, True, True, True, False]


def test_packed_server_is_not_for_models_that_compute_one_text_at_a_time() -> None:
    assert PackedServer.of(Server("target-1", "target", TARGET)) is None
    assert PackedServer.of(Server("target-1", "target", Packing(TARGET, can_pack=False))) is None


@pytest.fixture(scope="module", params=[(1, 1), (1, 8), (2, 8)])
def shared_loop(request: pytest.FixtureRequest) -> Iterator[EngineLoop]:
    """One for all: the ids of its jobs are its fleet's. Some of the forwards are large enough to be split."""
    at_once, steps = request.param
    fleet = packing_fleet(at_once, steps)
    yield EngineLoop(fleet)
    fleet.close()


def packing_fleet(at_once: int = 1, steps: int = 0, target: Packing | None = None) -> ProcessFleet:
    """Where the target goes on with its texts, so many forwards follow one another; 0: as before that is known."""
    drafter = ToyDrafter(TARGET, 0.7, 8, runner_up_acceptance=0.5)
    servers = [Server(f"target-{i}", "target", TARGET) for i in (1, 2)] + [Server("drafter", "drafter", drafter)]
    models = {"target": target or Packing(TARGET, forwards_at_once=at_once), "drafter": Packing(drafter)}
    inline = {role: Server(role, role, model) for role, model in models.items()}
    fleet = ProcessFleet(servers, use_cores=lambda *_: None, inline=inline)
    if steps:
        fleet.limit_inline(alone=True, max_tokens=MAX_TOKENS, steps_for=lambda _: steps)
    return fleet


def shared(load: Load) -> Request:
    return Request((1, 2), 30, SharedForwards("drafter", load).policy(distributed(3)))


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=9
    ),
    st.sampled_from([SpecConfig("nonsi"), SpecConfig("si", 1), SpecConfig("si", 4), SpecConfig("si", 3, tree=6)]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40)
def test_texts_in_shared_forwards_are_those_alone(
    shared_loop: EngineLoop, asked: list[tuple[int, int, int, bool]], turns: SpecConfig, random: object
) -> None:
    """Requests of every algorithm come at any time, and some are cancelled."""
    loop = shared_loop
    loop.load.shared_spec = lambda *_: turns
    trees = (policy_for(SpecConfig(algorithm, 3, tree=6)) for algorithm in ("si", "pearl", "dsi"))
    shared = SharedForwards("drafter", loop.load)
    policies = [autoregressive(), speculative(3), distributed(2), None, *trees, shared.plain(autoregressive())]
    submitted = []
    for kind, prompt_length, new, sampled in asked:
        prompt = tuple(range(prompt_length))
        policy = policies[kind] or shared.policy(distributed(2))
        sampling = Sampling(temperature=0.9, seed=new) if sampled else Sampling()
        submitted.append((loop.submit(Request(prompt, new, policy, sampling)), prompt, new, sampling))
        for _ in range(random.randrange(12)):  # type: ignore[attr-defined]
            if any(not active.done for active, *_ in submitted):
                loop.step()
    for number, (active, prompt, new, sampling) in enumerate(submitted):
        if number % 4 == 3 and not active.done:
            loop.cancel(active)
            continue
        while not active.done:
            loop.step()
        expected = list(prompt)
        for _ in range(new):
            expected += TARGET.answer(ForwardRequest(expected, len(expected), sampling=sampling))
        assert active.completion().tokens == tuple(expected[len(prompt) :])


def test_process_fleet_shares_forwards_of_waiting_requests() -> None:
    fleet = packing_fleet()
    target, loop, fleet.log = fleet._packed["target"]._model, EngineLoop(fleet), []
    assert isinstance(target, Packing)
    requests = [Request((i, 2), 20, autoregressive()) for i in range(16)]
    assert [done.tokens for done in loop.run(*requests)] == [after((i, 2), 20) for i in range(16)]
    assert [len(forward) for forward in target.forwards] == [16] * 20
    assert fleet.packs
    spans = [span for span in fleet.log if span.start == fleet.log[-1].start]
    assert len({span.context.origin for span in spans}) == 16  # who shared the last forward
    fleet.close()


def alone(prompt: tuple[int, ...], new: int, sampling: Sampling, stop: frozenset[int]) -> tuple[int, ...]:
    """The target's text, token by token."""
    written = list(prompt)
    while len(written) < len(prompt) + new:
        written += TARGET.answer(ForwardRequest(written, len(written), sampling=sampling))
        if written[-1] in stop:
            break
    return tuple(written[len(prompt) :])


@pytest.mark.parametrize(("at_once", "steps"), [(1, 1), (1, 8), (2, 3), (2, 8)])
def test_process_fleet_decodes_many_texts_plainly_as_each_alone(at_once: int, steps: int) -> None:
    """Prompts and texts of any length, greedy and sampled, that end at stop tokens: some come later, one is given up.

    The last text is alone in the end.
    """
    fleet = packing_fleet(at_once, steps)
    target, log = fleet._packed["target"]._model, list[Span]()
    assert isinstance(target, Packing)
    try:
        loop, fleet.log = EngineLoop(fleet), log
        loop.load.shared_spec = lambda *_: SpecConfig("nonsi")
        shared, asked = SharedForwards("drafter", loop.load), []
        for i in range(40):
            prompt = tuple(range(i % 7, i % 7 + 1 + i * i % 37))
            stop = frozenset[int]((2 * i % 64, 2 * i % 64 + 20) if i % 3 else ())
            sampling = Sampling(temperature=0.9, seed=i) if i % 2 else Sampling()
            policy = shared.plain(autoregressive()) if i % 5 else shared.policy(distributed(2))
            length = {36: 90, 39: 120}.get(i, 1 + i * 7 % 45)
            asked.append(Request(prompt, length, policy, sampling, stop))
        running = [loop.submit(request) for request in asked[:30]]
        while len(running[6].tokens) < 9:
            loop.step()
        loop.cancel(running[6])
        running += [loop.submit(request) for request in asked[30:]]
        while any(not active.done for active in running):
            loop.step()
        done = [active.completion() for active in running]
        expected = [alone(request.prompt, request.max_new_tokens, request.sampling, request.stop) for request in asked]
        assert [each.tokens for each in done[:6] + done[7:]] == expected[:6] + expected[7:]
        assert done[6].tokens == expected[6][: len(done[6].tokens)]
        assert {each.finish_reason for each in done} == {"length", "stop", "cancelled"}
        shared_widths = [span.width for span in log if span.num_texts > 1]
        assert max(shared_widths) == steps
        assert max(map(len, target.forwards)) > (12 if at_once == 1 else 6)
    finally:
        fleet.close()


def test_process_fleet_fails_a_request_whose_texts_cannot_go_on() -> None:
    """It does not try for ever beside the others."""
    fleet = packing_fleet(steps=8)
    try:
        loop = EngineLoop(fleet)
        loop.load.shared_spec = lambda *_: SpecConfig("nonsi")
        policy = SharedForwards("drafter", loop.load).plain(autoregressive())
        healthy, bad = (loop.submit(Request(prompt, new, policy)) for prompt, new in (((1, 2), 400), ((3, BAD), 5)))
        while not bad.done and not healthy.done:
            loop.step()
        assert not healthy.done
        with pytest.raises(FleetError, match="33 verifications of one request failed in a row, the last: OSError: a b"):
            bad.completion()
        while not healthy.done:
            loop.step()
        assert healthy.completion().tokens == after((1, 2), 400)
    finally:
        fleet.close()


def test_process_fleet_ends_its_forwards_soon_when_it_is_woken() -> None:
    target = Interrupted(TARGET, number=2)
    fleet = packing_fleet(steps=8, target=target)
    fleet.num_requests, target.call = 3, fleet.wake
    try:
        for id in range(3):
            fleet.start(going_on(id, 11, id, 5))
        events = [fleet.next_event() for _ in range(4)]
        assert events == [*(DraftedBlock(id, after((id, 5), 2)) for id in range(3)), WOKEN]
        events = [fleet.next_event() for _ in range(6)]
        assert events == [
            *(DraftedBlock(id, after((id, 5), 10)[2:]) for id in range(3)),
            *(Drafted(id, after((id, 5), 11)[10]) for id in range(3)),
        ]
        assert target.forwards == [[2, 2, 2], *[[1, 1, 1]] * 10]
    finally:
        fleet.close()


@dataclass
class Gated(Packing):
    """One that in the second forward of each of two threads waits for that of the other, and then for a gate."""

    gate: ThreadEvent = field(default_factory=ThreadEvent)
    calls: Counter[int] = field(default_factory=Counter)  # by thread

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        self.calls[get_ident()] += at_once > 1
        if self.calls[get_ident()] == 2 and self.meeting is not None:
            self.meeting.wait(10)
            self.gate.wait(10)
        return [tree_answer(self, request) for request in requests]


def test_process_fleet_goes_on_in_shared_forwards_where_no_other_request_is_left() -> None:
    """A whole text in one go could not be cancelled."""
    fleet = packing_fleet(steps=4)
    fleet.num_requests, target = 1, fleet._packed["target"]._model
    assert isinstance(target, Packing)
    try:
        fleet.start(going_on(0, 9, 1, 2))
        assert fleet.next_event() == DraftedBlock(0, after((1, 2), 4))
        assert target.forwards == [[2], [1], [1], [1]]
        fleet.cancel(0)
        with pytest.raises(RuntimeError, match="nothing to do"):
            fleet.next_event()
    finally:
        fleet.close()


def test_process_fleet_ends_a_forward_in_a_thread_soon_for_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one of two at once which began first, where all others only go on with their texts."""
    target, set_flag = Gated(TARGET, forwards_at_once=2), StopFlag.set

    def open_gate(flag: StopFlag) -> None:
        set_flag(flag)
        target.gate.set()

    monkeypatch.setattr(StopFlag, "set", open_gate)
    fleet = packing_fleet(steps=6, target=target)
    fleet.num_requests, target.meeting = MIN_SPLIT + 1, Barrier(2, fleet.wake)
    try:
        for id in range(MIN_SPLIT):
            fleet.start(going_on(id, 6, id, 5))
        assert fleet.next_event() == WOKEN  # both are in their second forward
        fleet.start(Verify(MIN_SPLIT, text(1, 2), 1, alone=True))
        events = list[Event]()
        while not any(isinstance(event, Verified) for event in events):
            events.append(fleet.next_event())
        assert events.pop() == Verified(MIN_SPLIT, after((1, 2)))
        blocks = [event for event in events if isinstance(event, DraftedBlock)]
        first = {event.id: event.tokens for event in reversed(blocks)}
        half = MIN_SPLIT // MAX_AT_ONCE
        assert [first[id] for id in range(half)] == [after((id, 5), 2) for id in range(half)]
    finally:
        target.gate.set()
        fleet.close()


def test_process_fleet_drafts_a_block_in_forwards_that_follow_one_another() -> None:
    """However many follow one another of the target."""
    fleet = packing_fleet(steps=1)
    drafter, observed, fleet.log = fleet._packed["drafter"]._model, list[tuple[Job, float, int]](), []
    fleet.observe = lambda *forward: observed.append(forward)
    fleet.num_requests = 2
    try:
        assert [fleet._packed[role].steps_for(9) for role in ("target", "drafter")] == [1, MAX_STEPS]
        job = Draft(0, text(1, 2), 4, alone=True)
        fleet.start(job)
        expected = [1, 2]
        for _ in range(4):
            expected += drafter.answer(ForwardRequest(expected, len(expected)))
        assert fleet.next_event() == DraftedBlock(0, tuple(expected[2:]))
        [span] = fleet.log
        assert (span.kind, tuple(span.context), span.width, span.token) == (
            "draft",
            tuple(expected[:-1]),
            4,
            expected[2],
        )
        assert observed == [(job, (span.end - span.start) / 4, 1 - 1)]  # each forward, beside no target
        assert fleet.usage["drafter"].forwards == 4
    finally:
        fleet.close()


def test_process_fleet_shares_forwards_of_trees() -> None:
    fleet = packing_fleet()
    try:
        loop, fleet.log = EngineLoop(fleet), []
        requests = [Request((i, 2), 20, policy_for(SpecConfig("si", 3, tree=6))) for i in range(8)]
        running = [loop.submit(request) for request in requests]
        while len(running[0].tokens) < 8:
            loop.step()
        loop.cancel(running[0])
        while any(not active.done for active in running):
            loop.step()
        assert [active.completion().tokens for active in running[1:]] == [after((i, 2), 20) for i in range(1, 8)]
        assert all(active.completion().tally.accepted for active in running)
        assert {span.server for span in fleet.log if span.num_texts == 1} <= {"target-1", "drafter"}  # none by others
        assert sum(span.num_texts > 1 for span in fleet.log) > 0.9 * len(fleet.log)
        for forwards in (packed._model.forwards for packed in fleet._packed.values()):  # type: ignore[attr-defined]
            assert max(map(len, forwards)) == 8
    finally:
        fleet.close()


def test_process_fleet_divides_many_texts_into_two_forwards_at_once() -> None:
    fleet = packing_fleet(2)
    target = fleet._packed["target"]._model
    assert isinstance(target, Packing)
    target.meeting = Barrier(2)  # a forward that ran alone would break it
    fleet.log = []
    try:
        requests = [Request((i, 2), 6, autoregressive()) for i in range(MIN_SPLIT)]
        done = EngineLoop(fleet).run(*requests)
        assert [completion.tokens for completion in done] == [after((i, 2), 6) for i in range(MIN_SPLIT)]
        assert {len(forward) for forward in target.forwards} == {MIN_SPLIT // 2}
        times = {(span.start, span.end) for span in fleet.log}
        assert len(times) == 2 * 6
        halves = sum(end - start for start, end in times) / 2  # each had half of the cores
        assert sum(fleet.busy.values()) == pytest.approx(halves)
    finally:
        fleet.close()


@pytest.mark.parametrize("at_once", [1, 2])
def test_process_fleet_runs_a_job_that_cannot_share_forwards_in_turn(at_once: int) -> None:
    fleet = packing_fleet(at_once)
    try:
        loop = EngineLoop(fleet)
        sampling = Sampling(temperature=1.0, rule="reject", seed=3)
        [expected] = loop.run(Request((9,), 8, speculative(2), sampling))
        texts = [loop.submit(Request((i, 2), 40, autoregressive())) for i in range(MIN_SPLIT)]
        odd = loop.submit(Request((9,), 8, speculative(2), sampling))
        while not odd.done:
            loop.step()
        assert odd.completion().tokens == expected.tokens
        assert 0 < min(len(active.tokens) for active in texts) <= max(len(active.tokens) for active in texts) < 40
        while any(not active.done for active in texts):
            loop.step()
        assert [active.completion().tokens for active in texts] == [after((i, 2), 40) for i in range(MIN_SPLIT)]
    finally:
        fleet.close()


@pytest.mark.parametrize("others", [0, 1, MIN_SPLIT])
@pytest.mark.parametrize("at_once", [1, 2])
def test_process_fleet_verifies_one_text_for_several_requests(at_once: int, others: int) -> None:
    """They have one cached prefix: only one of them computes at a time, beside requests with texts of their own."""
    fleet = packing_fleet(at_once)
    try:
        loop, origin = EngineLoop(fleet), text(1, 2)
        texts = [loop.submit(Request((i, 9), 12, autoregressive())) for i in range(others)]
        contexts = [(3,), (4, 5, 6), (3, 7), (4, 5), (8,), (4, 5, 6, 1)]
        for _ in range(3):
            verified = []
            for tokens in contexts:
                context = origin
                for token in tokens:
                    context = context.then(token)
                verified.append(loop.submit(VerifyRequest(context, len(tokens))))
            while any(not active.done for active in verified):
                loop.step()
            for tokens, active in zip(contexts, verified):
                whole = (1, 2, *tokens)
                expected = [token for end in range(3, len(whole) + 1) for token in after(whole[:end])]
                assert list(active.completion().tokens) == expected
        while any(not active.done for active in texts):
            loop.step()
        assert [active.completion().tokens for active in texts] == [after((i, 9), 12) for i in range(others)]
    finally:
        fleet.close()


@pytest.mark.parametrize(("at_once", "texts"), [(1, 6), (2, MIN_SPLIT)])
def test_process_fleet_shares_forwards_while_its_workers_die(at_once: int, texts: int) -> None:
    fleet = packing_fleet(at_once)
    try:
        loop, ids = EngineLoop(fleet), count()
        loop.load.shared_spec = lambda *_: SpecConfig("si", 2)
        running = [loop.submit(replace(shared(loop.load), prompt=(i, 2))) for i in range(texts)]
        while any(not active.done for active in running):
            loop.step()
            if next(ids) in (5, 40, 41):
                for pid in fleet.worker_pids:
                    with suppress(ProcessLookupError):  # dead, and not yet noticed
                        os.kill(pid, signal.SIGKILL)
        assert [active.completion().tokens for active in running] == [after((i, 2), 30) for i in range(texts)]
    finally:
        fleet.close()


def test_process_fleet_goes_on_with_a_draft_whose_companion_is_gone() -> None:
    fleet = packing_fleet()
    fleet.num_requests = 2
    drafter = fleet._packed["drafter"]._model
    try:
        for id in range(2):
            fleet.start(Draft(id, text(id, 2), 4, alone=True))
        events = [fleet.next_event() for _ in range(4)]  # two tokens of each
        fleet.cancel(1)
        events += [fleet.next_event(), fleet.next_event()]
        expected = [0, 2]
        for _ in range(4):
            expected += drafter.answer(ForwardRequest(expected, len(expected)))
        assert [event for event in events if event.id == 0] == [Drafted(0, token) for token in expected[2:]]
        with pytest.raises(RuntimeError, match="nothing to do"):
            fleet.next_event()
    finally:
        fleet.close()


def test_process_fleet_drops_a_cancelled_job_from_shared_forwards() -> None:
    fleet = packing_fleet()
    fleet.num_requests = 4
    try:
        for id in range(4):
            fleet.start(Verify(id, text(id), 1, alone=True))
        fleet.cancel(0)  # which a server was given
        fleet.cancel(3)  # which waited
        assert [fleet.next_event(), fleet.next_event()] == [Verified(1, after((1,))), Verified(2, after((2,)))]
        with pytest.raises(RuntimeError, match="nothing to do"):
            fleet.next_event()
    finally:
        fleet.close()


def test_process_fleet_promotes_jobs_that_share_forwards() -> None:
    fleet = packing_fleet()
    fleet.num_requests = 9
    fleet.limit_inline(alone=True, max_tokens=1)
    try:
        for id in range(6):  # of which the servers are given the first two
            fleet.start(Verify(id, text(id), 1, 0 if id in (1, 4) else 3, alone=True))
        fleet.promote(5)
        assert [fleet.next_event().id for _ in range(3)] == [1, 4, 5]
        fleet.promote(2)
        assert [fleet.next_event().id for _ in range(3)] == [2, 0, 3]
    finally:
        fleet.close()


def test_process_fleet_promotes_a_job_before_it_shares_forwards() -> None:
    """It waits for the end of another job of its text."""
    fleet = packing_fleet()
    fleet.num_requests = 9
    fleet.limit_inline(alone=True, max_tokens=1)
    origin = text(1)
    try:
        fleet.start(Verify(0, origin, 1, alone=True))
        fleet.start(Verify(1, origin.then(2), 1, 3, alone=True))
        for id in (2, 3):
            fleet.start(Verify(id, text(id), 1, alone=True))
        fleet.promote(1)
        assert [fleet.next_event().id for _ in range(2)] == [0, 2]
        fleet.start(Verify(4, text(4), 1, alone=True))
        assert [fleet.next_event().id for _ in range(3)] == [3, 1, 4]
    finally:
        fleet.close()


def test_process_fleet_leaves_slow_forwards_of_one_request_to_workers() -> None:
    fleet = packing_fleet()
    try:
        fleet.limit_inline(alone=False, max_tokens=2)
        loop, target = EngineLoop(fleet), fleet._packed["target"]._model
        assert isinstance(target, Packing)
        [done] = loop.run(Request((1,), 5, autoregressive()))
        assert (done.tokens, target.forwards) == (after((1,), 5), [])
        done_at_once = loop.run(*(Request((i,), 5, autoregressive()) for i in range(3)))
        assert [completion.tokens for completion in done_at_once] == [after((i,), 5) for i in range(3)]
        assert max(map(len, target.forwards)) == 2
    finally:
        fleet.close()


def test_packed_server_prefills_beside_other_texts() -> None:
    server, packing = packed_server()
    server.add(Prefill(0, text(*range(9))))
    server.add(Verify(1, text(3), 1))
    assert not server.knows(Prefill(2, text(4)))
    assert [event for *_, event in server.step()] == [Verified(1, after((3,))), Prefilled(0)]
    assert packing.forwards == [[1, 9]]
    assert server.jobs == {}


@dataclass
class Following(Packing):
    """One that computes the forward over a draft tree while that is drafted, and takes one more poll."""

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        yield None
        return self.answer_packed(requests)

    def can_follow(self, request: ForwardRequest, launched: LaunchedGrowth) -> bool:  # noqa: ARG002
        return True

    def poll_following(
        self, request: ForwardRequest, launched: LaunchedGrowth, grown: Callable[[], Tree | None]
    ) -> Generator[None, None, Answer]:
        while (tree := grown()) is None:
            yield None
        assert len(tree) == len(launched.tree)
        yield None
        return tree_answer(self.model, replace(request, tree=tree, asked=range(len(tree))))


@dataclass
class Launched:
    tree: Tree


def test_a_tree_is_recorded_while_its_verification_is_computed() -> None:
    """So that only tokens are left to handle when that has ended, and the next draft begins sooner."""
    text = TokenSequence.of((1, 2))
    server = PackedServer(Server("target", "target", Following(TARGET)), Following(TARGET))
    growth = TreeGrowth(Draft(0, text, 1, expansions=((END, 2),), alone=True))
    server.add(job := Verify(1, text, 1, alone=True, draft=0, num_drafted=2))
    launched, prefix = Launched(((END, -1), (END, -2))), server.jobs[1].prefix
    forward = server.begin_following(growth, launched)
    assert forward is not None
    steps = server.poll_following(forward, launched)
    next(steps)
    assert server.jobs[1].job == job
    growth.add([(5, 6)])
    next(steps)
    assert server.jobs[1].job == growth.verification(job)
    assert prefix.new_nodes(growth.tree) == []
    assert list(steps) == []
    [(verified, _, event)] = server.finish(forward)
    tokens = tuple(TARGET.answer(ForwardRequest([1, 2, *node], 2 + len(node)))[0] for node in ((), (5,), (6,)))
    assert (verified, event) == (growth.verification(job), Verified(1, tokens))


def test_process_fleet_leaves_its_servers_to_others_while_texts_go_on() -> None:
    """What shares no forward does not wait until a text is complete."""
    fleet = packing_fleet(steps=4)
    try:
        loop = EngineLoop(fleet)
        loop.load.shared_spec = lambda *_: SpecConfig("nonsi")
        policies = SharedForwards("drafter", loop.load)
        running = [loop.submit(Request((i, 2), 900, policies.plain(autoregressive()))) for i in range(3)]
        while len(running[0].tokens) < 8:
            loop.step()
        score = loop.submit(ScoreRequest((7, 8, 9), Sampling(logprobs=0)))
        while not score.done:
            loop.step()
        assert score.error is None
        assert max(len(active.tokens) for active in running) < 450
    finally:
        fleet.close()
