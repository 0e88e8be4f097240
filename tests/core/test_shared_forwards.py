"""The policy of requests that share forwards."""

import pytest

from dsi.core.generation import Generation
from dsi.core.jobs import MAX_FAILURES
from dsi.core.messages import (
    NO_STEP,
    TARGET,
    Draft,
    Drafted,
    DraftedBlock,
    DraftedLevel,
    Failed,
    Job,
    Sampling,
    Step,
    Verified,
    Verify,
)
from dsi.core.policies import Load, autoregressive, pearl, speculative
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END

PLAIN = SpecConfig("nonsi")
TOKENS = 30  # of a text


def generation(load: Load, sampling: Sampling | None = None) -> Generation:
    policy = SharedForwards("drafter", load).policy(pearl(4), tree=8)
    return Generation((1,), TOKENS, policy, sampling=sampling or Sampling())


def test_share_forwards_leaves_a_request_alone_to_its_own_policy() -> None:
    for load, sampling in (
        (Load(requests=1, shared_spec=lambda *_: PLAIN), Sampling()),
        (Load(requests=9), Sampling()),
    ):
        jobs = generation(load, sampling).start().start
        assert [type(job) for job in jobs] == [Verify, Draft]  # PEARL does both at once
    blocks = Sampling(temperature=1, rule="block")  # whose text depends on them
    [draft] = generation(Load(requests=9, shared_spec=lambda *_: PLAIN), blocks).start().start
    assert isinstance(draft, Draft)
    assert draft.model != TARGET


def streamed(*text: int) -> list[tuple[str, tuple[int, ...], int, bool]]:
    """The target continues this text to its end."""
    return [(TARGET, text, TOKENS + 1 - len(text), True)]


def summary(job: Job) -> tuple[str, tuple[int, ...], int, bool]:
    """Who is asked what: the model that drafts, or the text that is verified; and whether nothing runs beside it."""
    if isinstance(job, Draft):
        return job.model, tuple(job.context), job.count, job.alone
    assert isinstance(job, Verify)
    return "verify", tuple(job.context), job.width, job.alone


def started(step: Step) -> list[tuple[str, tuple[int, ...], int, bool]]:
    return list(map(summary, step.start))


def test_share_forwards_decodes_plainly_without_a_block() -> None:
    """The target continues the text by itself, where nothing but its tokens is wanted."""
    load = Load(requests=9, shared_spec=lambda *_: PLAIN)
    assert started(generation(load).start()) == streamed(1)
    assert started(generation(load, Sampling(temperature=1)).start()) == streamed(1)
    g = generation(load, Sampling(logprobs=2))
    [job] = g.start().start
    assert summary(job) == ("verify", (1,), 1, True)
    logprobs = ((4, -0.1), (6, -2.5))
    step = g.handle(Verified(job.id, (4,), (logprobs,)))
    assert (step.emit, started(step), g.top_logprobs) == ((4,), [("verify", (1, 4), 1, True)], [logprobs])


def test_share_forwards_takes_turns_with_the_block_of_the_load() -> None:
    load = Load(requests=4, shared_spec=lambda requests, *_: SpecConfig("si", 8 // requests))
    g = generation(load)
    [draft] = g.start().start
    assert isinstance(draft, Draft)
    assert (draft.count, draft.alone) == (2, True)
    g.handle(Drafted(draft.id, 7))
    [verify] = g.handle(Drafted(draft.id, 8)).start
    assert isinstance(verify, Verify)
    assert verify.width == 3
    load.requests = 8
    [draft] = g.handle(Verified(verify.id, (7, 8, 9))).start
    assert isinstance(draft, Draft)
    assert draft.count == 1


def test_share_forwards_learns_the_acceptance_rate_of_its_request() -> None:
    rates: list[float] = []

    def shared_spec(_: int, rate: float, *__: float) -> SpecConfig:
        rates.append(rate)
        return SpecConfig("si", 1)

    load = Load(requests=2, shared_spec=shared_spec)
    g = generation(load)
    step = g.start()
    for _ in range(12):
        [draft] = step.start
        [verify] = g.handle(Drafted(draft.id, 5)).start
        step = g.handle(Verified(verify.id, (6, 6)))  # another token than drafted
    assert rates[-1] < 0.4 < rates[0]


def test_share_forwards_verifies_as_a_tree_what_was_drafted_as_one() -> None:
    asked = []

    def shared_spec(requests: int, _: float, runner_up: float, tree: int) -> SpecConfig:
        asked.append((requests, round(runner_up, 2), tree))
        return SpecConfig("si", 2, tree=4, chances=(0.6, 0.3)) if requests < 9 else PLAIN

    load = Load(requests=2, shared_spec=shared_spec)
    g = generation(load)
    [draft] = g.start().start
    assert isinstance(draft, Draft)
    assert (draft.expansions, draft.alone) == (((END, 2), (0, 2)), True)
    load.requests = 9  # which changes what comes next, and not what has begun
    g.handle(DraftedLevel(draft.id, ((5, 6),)))
    [verify] = g.handle(DraftedLevel(draft.id, ((7, 8),), 1)).start
    assert isinstance(verify, Verify)
    assert (verify.tree, verify.width, verify.alone) == (((END, 5), (END, 6), (0, 7), (0, 8)), 1, True)
    assert verify.asked == (0, 2, 1, 3)  # by their chances
    plain = g.handle(Verified(verify.id, (6, 1, 2, 3, 4)))  # the runner-up, which was accepted
    assert started(plain) == streamed(1, 6, 3)
    assert asked == [(2, 0.4, 8), (9, 0.59, 8)]


def test_share_forwards_waits_for_what_its_own_policy_has_started() -> None:
    load = Load(requests=1, shared_spec=lambda *_: PLAIN)
    g = generation(load)
    verify, draft = g.start().start
    load.requests = 2
    assert isinstance(draft, Draft)
    steps = [g.handle(Drafted(draft.id, 3)), g.handle(Verified(verify.id, (3,)))]
    steps += [g.handle(Drafted(draft.id, 5)) for _ in range(draft.count - 1)]
    assert [job for step in steps[:-1] for job in step.start] == []
    assert started(steps[-1]) == streamed(1, 3)


def plain_generation(load: Load, sampling: Sampling | None = None, stop: int = 0) -> Generation:
    policy = SharedForwards("drafter", load).plain(autoregressive())
    return Generation((1,), TOKENS, policy, sampling=sampling or Sampling(), stop={stop})


def streaming(load: Load, stop: int = 0) -> tuple[Generation, int]:
    """A generation that does not speculate, and the job in which the target continues its text."""
    g = plain_generation(load, stop=stop)
    step = g.start()
    assert started(step) == streamed(1)
    return g, step.start[0].id


def test_plain_streams_only_where_a_request_shares_forwards() -> None:
    reject = Sampling(temperature=1, rule="reject")  # whose positions are verified with their draft tokens
    for load, sampling in (
        (Load(requests=1, shared_spec=lambda *_: PLAIN), Sampling()),
        (Load(requests=9), Sampling()),
        (Load(requests=9, shared_spec=lambda *_: PLAIN), reject),
        (Load(requests=9, shared_spec=lambda *_: PLAIN), Sampling(logprobs=0)),
    ):
        assert started(plain_generation(load, sampling=sampling).start()) == [("verify", (1,), 1, True)]
    load = Load(requests=2, shared_spec=lambda *_: SpecConfig("si", 4))  # which is for others
    assert started(plain_generation(load).start()) == streamed(1)


def test_generation_moves_the_root_with_each_token_of_a_target_block() -> None:
    g, stream = streaming(Load(requests=9, shared_spec=lambda *_: PLAIN))
    assert g.handle(DraftedBlock(stream, (4, 5, 6))) == Step(emit=(4, 5, 6))
    assert (tuple(g.root.context), g.root.depth, g.progress) == ((1, 4, 5, 6), 3, (3, 3))
    assert g.verified == [({}, 4, ()), ({}, 5, ()), ({}, 6, ())]
    assert g.origins == ["plain"] * 3
    assert (g.tally.forwards, g.tally.useful, g.tally.exposed, g.tally.drafted) == (3, 3, 3, 0)
    assert g.handle(Drafted(stream, 7)) == Step(emit=(7,))  # one token, and one block after another
    assert g.handle(DraftedBlock(stream, (8, 9))) == Step(emit=(8, 9))
    assert tuple(g.root.context) == (1, 4, 5, 6, 7, 8, 9)


def test_generation_accepts_the_draft_tokens_that_a_target_block_takes() -> None:
    load = Load(requests=1, shared_spec=lambda *_: PLAIN)
    g = generation(load)
    verify, draft = g.start().start
    load.requests = 2
    g.handle(Drafted(draft.id, 3))
    g.handle(Verified(verify.id, (3,)))
    step = [g.handle(Drafted(draft.id, token)) for token in (5, 7, 9)][-1]
    assert started(step) == streamed(1, 3)
    [stream] = step.start
    assert g.handle(DraftedBlock(stream.id, (5, 7, 8, 2))) == Step(emit=(5, 7, 8, 2))
    assert g.origins == ["accepted"] * 3 + ["corrected", "plain"]
    assert g.verified[1:] == [
        ({"drafter": 5}, 5, (5,)),
        ({"drafter": 7}, 7, (7,)),
        ({"drafter": 9}, 8, (9,)),
        ({}, 2, ()),
    ]


def test_generation_ends_amid_a_target_block_at_a_stop_token() -> None:
    g, stream = streaming(Load(requests=9, shared_spec=lambda *_: PLAIN), stop=5)
    assert g.handle(DraftedBlock(stream, (4, 5, 6, 5))) == Step(emit=(4, 5), cancel=(stream,))
    assert (g.done, g.finish_reason, tuple(g.root.context)) == (True, "stop", (1, 4, 5))
    assert (g.tally.forwards, g.jobs.open) == (2, {})
    assert g.handle(DraftedBlock(stream, (7,))) == NO_STEP


def test_generation_takes_no_more_of_a_target_block_than_was_asked_for() -> None:
    g, stream = streaming(Load(requests=9, shared_spec=lambda *_: PLAIN))
    tokens = tuple(range(2, TOKENS + 2))
    assert g.handle(DraftedBlock(stream, tokens[:-2])) == Step(emit=tokens[:-2])
    assert g.handle(DraftedBlock(stream, (*tokens[-2:], 99))) == Step(emit=tokens[-2:])
    assert (g.done, g.finish_reason, g.jobs.open) == (True, "length", {})


def test_share_forwards_asks_a_target_again_where_its_stream_has_failed() -> None:
    g, stream = streaming(Load(requests=9, shared_spec=lambda *_: PLAIN))
    g.handle(DraftedBlock(stream, (4, 5)))
    step = g.handle(Failed(stream))
    assert (step.emit, step.cancel, started(step)) == ((), (), streamed(1, 4, 5))
    assert g.tally.failed == 1


def test_share_forwards_verifies_a_text_whose_streams_keep_failing() -> None:
    """Failures of verifications are counted: the request fails if they go on."""
    g, stream = streaming(Load(requests=9, shared_spec=lambda *_: PLAIN))
    for _ in range(MAX_FAILURES - 1):
        step = g.handle(Failed(stream))
        assert started(step) == streamed(1)
        stream = step.start[0].id
    step = g.handle(Failed(stream))
    assert started(step) == [("verify", (1,), 1, True)]
    assert started(g.handle(Verified(step.start[0].id, (4,)))) == streamed(1, 4)


@pytest.mark.parametrize("block", [(4,), (4, 5, 6)])
def test_share_forwards_stops_a_stream_to_speculate_again(block: tuple[int, ...]) -> None:
    load = Load(requests=9, shared_spec=lambda requests, *_: PLAIN if requests > 4 else SpecConfig("si", 2))
    g = generation(load)
    [stream] = g.start().start
    load.requests = 4
    step = g.handle(DraftedBlock(stream.id, block))
    assert (step.emit, step.cancel) == (block, (stream.id,))
    assert started(step) == [("drafter", (1, *block), 2, True)]
    assert g.handle(DraftedBlock(stream.id, (7, 8))) == NO_STEP  # which comes late
    assert tuple(g.root.context) == (1, *block)
    [draft] = step.start
    g.handle(Drafted(draft.id, 2))
    [verify] = g.handle(Drafted(draft.id, 3)).start
    load.requests = 9
    assert started(g.handle(Verified(verify.id, (2, 3, 9)))) == streamed(1, *block, 2, 3, 9)


def test_share_forwards_stops_a_stream_where_a_request_is_alone_again() -> None:
    load = Load(requests=2, shared_spec=lambda *_: PLAIN)
    g, stream = streaming(load)
    load.requests = 1
    step = g.handle(DraftedBlock(stream, (4, 5)))
    assert (step.emit, step.cancel, started(step)) == ((4, 5), (stream,), [("verify", (1, 4, 5), 1, True)])
    for alone, jobs in (
        (pearl(4), [("verify", (1,), 1, False), ("drafter", (1,), 4, False)]),  # both at once
        (speculative(3), [("drafter", (1,), 3, True)]),
    ):
        load.requests = 2
        g = Generation((1,), TOKENS, SharedForwards("drafter", load).policy(alone))
        [job] = g.start().start
        load.requests = 1
        step = g.replan()
        assert (step.emit, step.cancel, started(step)) == ((), (job.id,), jobs)


def test_generation_drops_a_target_block_after_a_text_that_has_gone_on() -> None:
    g = Generation((1,), TOKENS, lambda _: None)
    g.verify(g.root, 1)
    g.stream()
    verify, stream = g.start().start
    assert (summary(verify), summary(stream)) == (("verify", (1,), 1, False), *streamed(1))
    assert g.handle(Verified(verify.id, (4,))) == Step(emit=(4,))
    assert g.handle(DraftedBlock(stream.id, (4, 5))) == Step(cancel=(stream.id,))
    assert tuple(g.root.context) == (1, 4)


def test_generation_handles_a_block_of_a_drafter_before_its_policy_runs_again() -> None:
    load = Load(requests=4, shared_spec=lambda *_: SpecConfig("si", 3))
    g = generation(load)
    [draft] = g.start().start
    step = g.handle(DraftedBlock(draft.id, (7, 8, 9)))
    assert (step.emit, step.cancel, started(step)) == ((), (), [("verify", (1, 7, 8, 9), 4, True)])
    assert g.tally.drafted == 3


def test_generation_ends_a_block_of_a_drafter_at_a_stop_token() -> None:
    load = Load(requests=4, shared_spec=lambda *_: SpecConfig("si", 4))
    g = Generation((1,), 50, SharedForwards("drafter", load).policy(pearl(4)), stop={8})
    [draft] = g.start().start
    step = g.handle(DraftedBlock(draft.id, (7, 8, 9)))
    assert (step.cancel, started(step)) == ((draft.id,), [("verify", (1, 7, 8), 3, True)])
    assert g.tally.drafted == 2
