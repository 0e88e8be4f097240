"""The policy of requests that share forwards."""

from dsi.core.generation import Generation
from dsi.core.messages import Draft, Drafted, Sampling, Verified, Verify
from dsi.core.policies import Load, pearl
from dsi.core.shared_forwards import SharedForwards


def generation(load: Load, sampling: Sampling | None = None) -> Generation:
    return Generation((1,), 50, SharedForwards("drafter", load).policy(pearl(4)), sampling=sampling or Sampling())


def test_share_forwards_leaves_a_request_alone_to_its_own_policy() -> None:
    for load, sampling in (
        (Load(requests=1, shared_block=lambda *_: 0), Sampling()),
        (Load(requests=9), Sampling()),
    ):
        jobs = generation(load, sampling).start().start
        assert [type(job) for job in jobs] == [Verify, Draft]  # PEARL does both at once
    blocks = Sampling(temperature=1, rule="block")  # whose text depends on them
    [draft] = generation(Load(requests=9, shared_block=lambda *_: 0), blocks).start().start
    assert isinstance(draft, Draft)


def test_share_forwards_decodes_plainly_without_a_block() -> None:
    g = generation(Load(requests=9, shared_block=lambda *_: 0))
    [job] = g.start().start
    assert isinstance(job, Verify)
    assert (job.width, job.alone) == (1, True)


def test_share_forwards_takes_turns_with_the_block_of_the_load() -> None:
    load = Load(requests=4, shared_block=lambda requests, _: 8 // requests)
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
    rates = []
    load = Load(requests=2, shared_block=lambda _, rate: rates.append(rate) or 1)  # type: ignore[func-returns-value]
    g = generation(load)
    step = g.start()
    for _ in range(12):
        [draft] = step.start
        [verify] = g.handle(Drafted(draft.id, 5)).start
        step = g.handle(Verified(verify.id, (6, 6)))  # another token than drafted
    assert rates[-1] < 0.4 < rates[0]


def test_share_forwards_waits_for_what_its_own_policy_has_started() -> None:
    load = Load(requests=1, shared_block=lambda *_: 0)
    g = generation(load)
    verify, draft = g.start().start
    load.requests = 2
    assert isinstance(draft, Draft)
    steps = [g.handle(Drafted(draft.id, 3)), g.handle(Verified(verify.id, (3,)))]
    steps += [g.handle(Drafted(draft.id, 5)) for _ in range(draft.count - 1)]
    assert [job for step in steps[:-1] for job in step.start] == []
    assert [type(job) for job in steps[-1].start] == [Verify]
