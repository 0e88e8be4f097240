"""What only a fleet that is looked at can do wrong."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count

import pytest

from dsi.core.messages import DRAFTER, TARGET, Draft, DraftedBlock, DraftedLevel, Failed, Sampling, Verified, Verify
from dsi.core.policies import autoregressive, policy_for
from dsi.core.request import Request, ScoreRequest
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server, make_servers
from dsi.models.protocol import Answer, ForwardRequest, StopFlag, tree_answer
from dsi.models.toy import ToyDrafter, ToyTarget
from polled_pair import PolledPair


class Interrupted:
    """A model during whose forward somebody presses Ctrl-C."""

    def answer(self, request: ForwardRequest) -> Tokens:
        raise NotImplementedError(str(request))

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:  # noqa: ARG002
        yield None
        raise KeyboardInterrupt

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:  # noqa: ARG002
        return iter([None] * count)


def test_cuda_fleet_fails_an_interrupted_job() -> None:
    fleet = CudaFleet([Server("target-1", "target", Interrupted())])
    fleet.start(Verify(7, TokenSequence.of((1, 2)), 1))
    with pytest.raises(KeyboardInterrupt):
        fleet.next_event()
    assert fleet.next_event() == Failed(7, "interrupted")
    fleet.close()


def packed_fleet() -> tuple[CudaFleet, dict[str, PolledPair]]:
    target = ToyTarget(3)
    drafter = ToyDrafter(target, 0.7, 5, runner_up_acceptance=0.5)
    models = {TARGET: PolledPair(target, 6), DRAFTER: PolledPair(drafter, 1)}
    names = {TARGET: "target-1", DRAFTER: DRAFTER}
    packed = {names[role]: Server(role, role, model) for role, model in models.items()}
    return CudaFleet(make_servers([models[TARGET]], {DRAFTER: models[DRAFTER]}), packed=packed), models


def test_cuda_fleet_shares_forwards_of_requests_and_trees() -> None:
    specs = [SpecConfig("nonsi"), SpecConfig("si", 3), SpecConfig("si", 3, tree=6), SpecConfig("dsi", 2, 1, tree=8)]
    fleet, models = packed_fleet()
    requests = [Request((1, 2, i), 20, policy_for(spec)) for i, spec in enumerate(specs)]
    done = EngineLoop(fleet).run(*requests)
    for request, completion in zip(requests, done):
        plain, _ = packed_fleet()
        [alone] = EngineLoop(plain).run(replace(request, policy=autoregressive()))
        assert completion.tokens == alone.tokens
    assert max(models[TARGET].forwards) > 2
    assert max(models[DRAFTER].forwards) > 1


def test_cuda_fleet_computes_trees_of_one_request() -> None:
    fleet, models = packed_fleet()
    for spec in (SpecConfig("si", 3, tree=6), SpecConfig("pearl", 2, tree=6), SpecConfig("dsi", 2, 1, tree=8)):
        [done] = EngineLoop(fleet).run(Request((4, 2), 20, policy_for(spec)))
        assert done.tally.accepted > 0
    assert set(models[TARGET].forwards) == {1}


def verification(id: int, prompt: tuple[int, ...]) -> Verify:
    return Verify(id, TokenSequence.of(prompt), 1, alone=True)


def test_cuda_fleet_begins_the_forward_of_a_lone_request_with_its_job() -> None:
    draft = Draft(0, TokenSequence.of((1, 2)), 1, DRAFTER, expansions=((END, 2),), alone=True)
    for num_requests, forwards in ((1, [1]), (2, [])):
        fleet, models = packed_fleet()
        fleet.num_requests = num_requests
        fleet.start(draft)
        assert models[DRAFTER].forwards == forwards
        assert isinstance(fleet.next_event(), DraftedLevel)
        assert models[DRAFTER].forwards == [1]
        fleet.close()


def test_cuda_fleet_drops_a_job_of_a_forward_in_flight_at_its_end() -> None:
    """Until then no other job of the same text joins, since the forward writes that text's keys and values."""
    fleet, models = packed_fleet()
    fleet.num_requests = 2
    first, second = verification(1, (1, 2)), verification(2, (3, 4))
    fleet.start(first)
    fleet.start(second)
    fleet._wait_for_events()  # both are in flight
    fleet.cancel(1)
    again = replace(first, id=3)
    fleet.start(again)
    assert fleet.next_event() == Verified(2, ToyTarget(3).answer(ForwardRequest([3, 4], 2)))
    assert fleet.next_event() == Verified(3, ToyTarget(3).answer(ForwardRequest([1, 2], 2)))
    assert models[TARGET].forwards == [2, 1]
    fleet.close()


def test_cuda_fleet_promotes_jobs_that_share_forwards() -> None:
    fleet, models = packed_fleet()
    fleet.num_requests, fleet._packed["target-1"].max_tokens = 9, 1
    jobs = [replace(verification(id, (id,)), lead=3 * (id in (1, 3))) for id in range(5)]
    for job in jobs:
        fleet.start(job)
    fleet.promote(3)
    assert [fleet.next_event().id for _ in range(3)] == [0, 2, 4]
    fleet.start(verification(5, (5,)))
    fleet._wait_for_events()  # all have joined
    fleet.promote(1)
    assert [fleet.next_event().id for _ in range(3)] == [3, 1, 5]
    assert models[TARGET].forwards == [1] * 6
    fleet.close()


class Failing(PolledPair):
    """A drafter whose forwards over a growing tree end after the first level."""

    def can_grow(self, *_: object) -> bool:
        return True

    def poll_levels(self, request: ForwardRequest, _: object) -> Iterator[Answer | None]:
        yield tree_answer(self._model, request)
        yield None
        raise RuntimeError("out of memory")


def test_cuda_fleet_fails_a_growing_tree_whose_forward_fails_between_two_levels() -> None:
    server = Server(DRAFTER, DRAFTER, Failing(ToyDrafter(ToyTarget(3), 0.7, 5, runner_up_acceptance=0.5), 1))
    fleet = CudaFleet([server], packed={DRAFTER: server})
    fleet.start(Draft(0, TokenSequence.of((1, 2)), 1, DRAFTER, expansions=((END, 2), (0, 2), (1, 1)), alone=True))
    level = fleet.next_event()
    assert isinstance(level, DraftedLevel)
    assert len(level.children[0]) == 2
    assert fleet.next_event() == Failed(0, "RuntimeError: out of memory")
    fleet.close()


def test_a_text_goes_on_where_the_draft_that_a_verification_follows_fails() -> None:
    """The verification fails with it, and without a tree the target goes on alone."""
    models = {TARGET: PolledPair(ToyTarget(3), 2), DRAFTER: Failing(ToyDrafter(ToyTarget(3), 0.7, 5, 0.5), 1)}
    names = {TARGET: "target-1", DRAFTER: DRAFTER}
    servers = {names[role]: Server(role, role, model) for role, model in models.items()}
    fleet = CudaFleet(make_servers([models[TARGET]], {DRAFTER: models[DRAFTER]}), packed=servers)
    [done] = EngineLoop(fleet).run(Request((4, 2), 12, policy_for(SpecConfig("si", 3, tree=6))))
    [plain] = EngineLoop(packed_fleet()[0]).run(Request((4, 2), 12, autoregressive()))
    assert done.tokens == plain.tokens
    assert done.tally.failed > 0
    fleet.close()


def test_cuda_fleet_fails_a_verification_whose_draft_it_does_not_know() -> None:
    fleet, _ = packed_fleet()
    fleet.start(Verify(1, TokenSequence.of((1, 2)), 1, alone=True, draft=0, num_drafted=2))
    assert fleet.next_event() == Failed(1, "the draft that it verifies was given up")
    fleet.close()


def test_cuda_fleet_verifies_a_tree_when_it_is_drafted() -> None:
    """Nobody but the drafter and the target takes part. There is a token for each node, by its number."""
    fleet, models = packed_fleet()
    text = TokenSequence.of((1, 2))
    fleet.start(Draft(0, text, 1, DRAFTER, expansions=((END, 2), (0, 1)), alone=True))
    fleet.start(Verify(1, text, 1, alone=True, draft=0, num_drafted=3))
    levels = [fleet.next_event() for _ in range(2)]
    [[first, second]], [[below]] = (level.children for level in levels if isinstance(level, DraftedLevel))
    target, texts = ToyTarget(3), ([1, 2], [1, 2, first], [1, 2, second], [1, 2, first, below])
    tokens = tuple(target.answer(ForwardRequest(text, len(text)))[0] for text in texts)
    assert fleet.next_event() == Verified(1, tokens)
    assert models[TARGET].forwards == [1]
    fleet.close()


def test_cuda_fleet_tells_of_the_draft_tokens_of_a_turn_together() -> None:
    fleet, _ = packed_fleet()
    fleet.num_requests = 2
    drafts = [Draft(id, TokenSequence.of((1, id)), 3, DRAFTER, alone=id != 2) for id in range(3)]
    for draft in drafts[:2]:
        fleet.start(draft)
    events = [fleet.next_event() for _ in range(2)]
    drafter = ToyDrafter(ToyTarget(3), 0.7, 5, runner_up_acceptance=0.5)
    for event, draft in zip(events, drafts):
        tokens = list(draft.context)
        for _ in range(3):
            tokens += drafter.answer(ForwardRequest(tokens, len(tokens)))
        assert event == DraftedBlock(draft.id, tuple(tokens[2:]))
    fleet.start(drafts[0])
    fleet._wait_for_events()
    fleet.cancel(0)
    assert not fleet._blocks
    fleet.close()


def test_cuda_fleet_times_a_forward_that_others_events_come_beside() -> None:
    fleet, models = packed_fleet()
    models[TARGET] = fleet._packed["target-1"]._polled = PolledPair(ToyTarget(3), 60)
    ticks, seen = count(), list[tuple[type, float]]()
    fleet.now = lambda: float(next(ticks))  # type: ignore[method-assign]
    fleet.observe = lambda job, time, _: seen.append((type(job), float(time)))
    fleet.num_requests = 2
    fleet.start(Draft(1, TokenSequence.of((1, 9)), 30, DRAFTER, alone=True))
    fleet.start(verification(0, (1, 2)))
    while fleet.next_event().id:
        pass
    assert [time for job, time in seen if job is Verify] > [sum(job is Draft for job, _ in seen)]
    fleet.close()


def test_cuda_fleet_gives_up_shared_forwards_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, models = packed_fleet()
    closed: list[bool] = []

    def poll_packed(_: object) -> Generator[None, None, list[Answer]]:
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    monkeypatch.setattr(models[TARGET], "poll_packed", poll_packed)
    fleet.num_requests = 2
    fleet.start(verification(1, (1, 2)))
    fleet._wait_for_events()
    assert not closed
    fleet.close()
    assert closed


def test_cuda_fleet_fails_the_jobs_of_a_server_that_is_killed_in_a_shared_forward() -> None:
    fleet, _ = packed_fleet()
    fleet.num_requests = 2
    fleet.start(verification(1, (1, 2)))
    fleet._wait_for_events()
    fleet.kill("target-1")
    assert isinstance(fleet.next_event(), Failed)
    fleet.close()


class Generating(PolledPair):
    """It generates four tokens of each text at a time ahead of the host."""

    def poll_generated(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], stop: StopFlag
    ) -> Generator[list[Answer] | None, None, bool]:
        texts, done = [list(request.tokens) for request in requests], 0
        self.forwards.append(len(requests))
        while done < max(counts) and not stop.is_set():
            yield from [None] * self._polls
            told = [len(tokens) for tokens in texts]
            for _ in range(4):
                for i, tokens in enumerate(texts):
                    if len(tokens) - told[i] + done < counts[i]:
                        tokens += self._model.answer(ForwardRequest(tokens, len(tokens)))
            done += 4
            yield [Answer(tuple(tokens[before:])) for tokens, before in zip(texts, told)]
        return True


def generating_fleet() -> tuple[EngineLoop, Generating]:
    target = ToyTarget(3)
    models = {TARGET: Generating(target, 2), DRAFTER: PolledPair(ToyDrafter(target, 0.7, 5), 1)}
    packed = {"target-1": Server(TARGET, TARGET, models[TARGET]), DRAFTER: Server(DRAFTER, DRAFTER, models[DRAFTER])}
    servers = make_servers([models[TARGET]], {DRAFTER: models[DRAFTER]})
    loop = EngineLoop(CudaFleet(servers, packed=packed))
    loop.load.shared_spec = lambda *_: SpecConfig("nonsi")
    return loop, models[TARGET]  # type: ignore[return-value]


def test_cuda_fleet_leaves_its_server_to_others_while_texts_go_on() -> None:
    loop, _ = generating_fleet()
    policies = SharedForwards(DRAFTER, loop.load)
    running = [loop.submit(Request((i, 2), 900, policies.plain(autoregressive()))) for i in range(3)]
    while len(running[0].tokens) < 8:
        loop.step()
    score = loop.submit(ScoreRequest((7, 8, 9), Sampling(logprobs=0)))
    while not score.done:
        loop.step()
    assert score.error is None
    assert max(len(active.tokens) for active in running) < 450


def test_cuda_fleet_ends_a_run_ahead_in_which_a_text_was_given_up() -> None:
    """Or its request would wait for all tokens of the others."""
    loop, target = generating_fleet()
    policies = SharedForwards(DRAFTER, loop.load)
    requests = [Request((i, 2), 900, policies.plain(autoregressive())) for i in range(3)]
    first, second, _ = map(loop.submit, requests)
    while len(first.tokens) < 4:
        loop.step()
    num_forwards = len(target.forwards)
    loop.cancel(second)
    while len(target.forwards) == num_forwards:
        loop.step()
    assert len(first.tokens) <= 12
    loop.fleet.close()
