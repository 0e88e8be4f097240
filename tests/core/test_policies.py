"""What each algorithm asks for, and when."""

import pytest

from dsi.core.generation import Generation
from dsi.core.messages import DRAFTER, Draft, Drafted, Job, Sampling, Verified, Verify
from dsi.core.policies import Load, distributed, load_aware, pearl, speculative
from dsi.core.spec import SpecConfig


def verifications(jobs: tuple[Job, ...]) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(job.context), job.width) for job in jobs if isinstance(job, Verify)]


def drafts(jobs: tuple[Job, ...]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(job.model, tuple(job.context), job.count) for job in jobs if isinstance(job, Draft)]


def open_draft(g: Generation, model: str = DRAFTER) -> int:
    [id] = [job.id for job in g.jobs.open.values() if isinstance(job, Draft) and job.model == model]
    return id


def open_watch(g: Generation, *context: int) -> int:
    [id] = [job.id for job in g.jobs.open.values() if isinstance(job, Verify) and tuple(job.context) == context]
    return id


def test_pearl_drafts_one_block_during_verification() -> None:
    g = Generation((7,), 20, pearl(2))
    step = g.start()
    assert (verifications(step.start), drafts(step.start)) == ([((7,), 1)], [(DRAFTER, (7,), 2)])
    for token in (1, 2):
        assert g.handle(Drafted(open_draft(g), token)).start == ()
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert step.emit == (1,)
    assert verifications(step.start) == [((7, 1, 2), 2)]
    assert drafts(step.start) == [(DRAFTER, (7, 1, 2), 2)]


def test_distributed_verifies_a_new_root_after_min_draft_tokens() -> None:
    g = Generation((7,), 20, distributed(5, min_draft=2))
    started = g.start().start
    assert verifications(started) == []
    assert [job.first_block for job in started if isinstance(job, Draft)] == [2]
    assert verifications(g.handle(Drafted(open_draft(g), 1)).start) == []
    assert verifications(g.handle(Drafted(open_draft(g), 2)).start) == [((7, 1, 2), 3)]


def test_distributed_min_draft_ends_at_max_new_tokens() -> None:
    g = Generation((7,), 2, distributed(5, min_draft=4))
    assert verifications(g.start().start) == []
    assert verifications(g.handle(Drafted(open_draft(g), 1)).start) == [((7, 1), 2)]


def test_distributed_max_lead_bounds_the_draft() -> None:
    g = Generation((7,), 50, distributed(5, max_lead=3))
    assert drafts(g.start().start) == [(DRAFTER, (7,), 3)]
    steps = [g.handle(Drafted(open_draft(g), token)) for token in (1, 2, 3)]
    assert [drafts(step.start) for step in steps] == [[], [], []]
    assert verifications(steps[-1].start) == [((7, 1, 2, 3), 3)]  # it will not fill: verified as it is
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert drafts(step.start) == [(DRAFTER, (7, 1, 2, 3), 1)]


def two_drafters(lookahead: int = 1) -> Generation:
    g = Generation((7,), 50, distributed(lookahead, ("fast", "wise")))
    assert drafts(g.start().start) == [("fast", (7,), 49), ("wise", (7,), 49)]
    return g


def test_distributed_drafters_that_agree_share_one_verification() -> None:
    g = two_drafters()
    assert verifications(g.handle(Drafted(open_draft(g, "fast"), 1)).start) == [((7, 1), 1)]
    assert verifications(g.handle(Drafted(open_draft(g, "wise"), 1)).start) == []


def test_distributed_drafters_that_differ_have_a_branch_each() -> None:
    g = two_drafters()
    assert verifications(g.handle(Drafted(open_draft(g, "fast"), 1)).start) == [((7, 1), 1)]
    assert verifications(g.handle(Drafted(open_draft(g, "wise"), 2)).start) == [((7, 2), 1)]


def test_distributed_drafter_of_a_pruned_branch_follows_the_survivor() -> None:
    g = two_drafters()
    g.handle(Drafted(open_draft(g, "fast"), 1))
    g.handle(Drafted(open_draft(g, "wise"), 2))
    g.handle(Drafted(open_draft(g, "wise"), 3))
    fallen = open_draft(g, "fast")
    step = g.handle(Verified(open_watch(g, 7), (2,)))
    assert fallen in step.cancel
    assert step.emit == (2,)
    assert drafts(step.start) == [("fast", (7, 2, 3), 47)]


def test_distributed_follows_the_first_of_several_survivors() -> None:
    g = Generation((7,), 50, distributed(1, ("a", "b", "c")))
    g.start()
    for model, tokens in (("a", (1, 3)), ("b", (1, 4)), ("c", (9,))):
        for token in tokens:
            g.handle(Drafted(open_draft(g, model), token))
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert drafts(step.start) == [("c", (7, 1, 3), 47)]


def test_distributed_starts_at_the_root_when_no_branch_survives() -> None:
    g = two_drafters()
    g.handle(Drafted(open_draft(g, "fast"), 1))
    g.handle(Drafted(open_draft(g, "wise"), 2))
    step = g.handle(Verified(open_watch(g, 7), (9,)))
    assert drafts(step.start) == [("fast", (7, 9), 48), ("wise", (7, 9), 48)]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: speculative(0),
        lambda: pearl(0),
        lambda: distributed(0),
        lambda: distributed(1, min_draft=-1),
        lambda: distributed(1, max_lead=0),
        lambda: distributed(1, drafters=()),
        lambda: Generation((7,), 9, lambda g: g.draft(g.root, 0)).start(),
    ],
)
def test_spec_config_refuses_impossible_numbers(refused: object) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        refused()  # type: ignore[operator]


def among(targets: int, requests: int, verifying: int) -> Generation:
    load = Load(targets, requests, verifying)
    return Generation((7,), 50, load_aware(distributed(5, max_lead=20), SpecConfig(lookahead=3), load))


def test_load_aware_speculates_fully_when_alone() -> None:
    step = among(targets=2, requests=1, verifying=0).start()
    assert (verifications(step.start), drafts(step.start)) == ([((7,), 1)], [(DRAFTER, (7,), 20)])


def test_load_aware_verifies_one_whole_block_under_load() -> None:
    g = among(targets=1, requests=4, verifying=1)
    step = g.start()
    assert (verifications(step.start), drafts(step.start)) == ([], [(DRAFTER, (7,), 3)])
    steps = [g.handle(Drafted(open_draft(g), token)) for token in (1, 2, 3)]
    assert [verifications(step.start) for step in steps] == [[], [], [((7, 1, 2, 3), 4)]]
    assert drafts(steps[-1].start) == []


def test_load_aware_gives_an_idle_target_the_root() -> None:
    step = among(targets=1, requests=4, verifying=0).start()
    assert verifications(step.start) == [((7,), 1)]


def test_load_aware_lead_follows_the_share_of_targets() -> None:
    step = among(targets=6, requests=2, verifying=6).start()
    assert drafts(step.start) == [(DRAFTER, (7,), 12)]  # a block for each of three targets and one more


def test_load_aware_keeps_the_blocks_of_the_rule_block() -> None:
    load = Load(1, 9, 1)
    policy = load_aware(distributed(5, max_lead=20), SpecConfig(lookahead=3), load)
    g = Generation((7,), 50, policy, sampling=Sampling(temperature=1.0, rule="reject"))
    assert drafts(g.start().start) == [(DRAFTER, (7,), 20)]


def test_distributed_goes_on_without_a_drafter_at_its_context() -> None:
    """The other one keeps its blocks; the first, whose context is full, neither drafts nor hurries verifications."""
    g = Generation((7,), 50, distributed(3, ("fast", "wise")), drafter_contexts={"fast": 2})
    assert drafts(g.start().start) == [("fast", (7,), 2), ("wise", (7,), 49)]
    for token in (1, 2):
        g.handle(Drafted(open_draft(g, "wise"), token))
        g.handle(Drafted(open_draft(g, "fast"), token))
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert (verifications(step.start), drafts(step.start)) == ([((7, 1, 2), 2)], [])
    for token, verified in ((3, []), (4, []), (5, [((7, 1, 2, 3, 4, 5), 3)])):
        step = g.handle(Drafted(open_draft(g, "wise"), token))
        assert (verifications(step.start), drafts(step.start)) == (verified, [])


def test_distributed_without_a_drafter_in_context_verifies_one_token_at_a_time() -> None:
    g = Generation(
        (7, 8, 9), 50, distributed(3, ("fast", "wise"), min_draft=2), drafter_contexts={"fast": 2, "wise": 1}
    )
    step = g.start()
    assert (verifications(step.start), drafts(step.start)) == ([((7, 8, 9), 1)], [])
    step = g.handle(Verified(open_watch(g, 7, 8, 9), (1,)))
    assert (verifications(step.start), drafts(step.start)) == ([((7, 8, 9, 1), 1)], [])


def test_load_aware_drafts_with_a_drafter_that_has_room() -> None:
    spec = SpecConfig("dsi", 2, drafters=("fast", "wise"))
    policy = load_aware(distributed(2), spec, Load(targets=1, requests=2, verifying=1))
    g = Generation((7, 8), 50, policy, drafter_contexts={"fast": 1})
    assert drafts(g.start().start) == [("wise", (7, 8), 2)]
