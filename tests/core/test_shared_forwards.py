"""The policy of requests that share forwards."""

from dsi.core.generation import Generation
from dsi.core.messages import Draft, Drafted, DraftedLevel, Sampling, Verified, Verify
from dsi.core.policies import Load, pearl
from dsi.core.shared_forwards import SharedForwards
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END

PLAIN = SpecConfig("nonsi")


def generation(load: Load, sampling: Sampling | None = None) -> Generation:
    policy = SharedForwards("drafter", load).policy(pearl(4), tree=8)
    return Generation((1,), 50, policy, sampling=sampling or Sampling())


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


def test_share_forwards_decodes_plainly_without_a_block() -> None:
    g = generation(Load(requests=9, shared_spec=lambda *_: PLAIN))
    [job] = g.start().start
    assert isinstance(job, Verify)
    assert (job.width, job.alone) == (1, True)


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
    [plain] = g.handle(Verified(verify.id, (6, 1, 2, 3, 4))).start  # the runner-up, which was accepted
    assert isinstance(plain, Verify)
    assert (tuple(plain.context), plain.tree, plain.width) == ((1, 6, 3), (), 1)
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
    assert [type(job) for job in steps[-1].start] == [Verify]
