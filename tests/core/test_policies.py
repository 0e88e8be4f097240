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


def test_pearl_drafts_one_block_while_another_is_verified_and_no_more() -> None:
    g = Generation((7,), 20, pearl(2))
    step = g.start()
    assert (verifications(step.start), drafts(step.start)) == ([((7,), 1)], [(DRAFTER, (7,), 2)])
    for guess in (1, 2):
        assert g.handle(Drafted(open_draft(g), guess)).start == ()
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert step.emit == (1,)
    assert verifications(step.start) == [((7, 1, 2), 2)]
    assert drafts(step.start) == [(DRAFTER, (7, 1, 2), 2)]


def test_patience_holds_the_watch_on_a_fresh_root_until_guesses_are_there() -> None:
    g = Generation((7,), 20, distributed(5, min_draft=2))
    assert verifications(g.start().start) == []
    assert verifications(g.handle(Drafted(open_draft(g), 1)).start) == []
    assert verifications(g.handle(Drafted(open_draft(g), 2)).start) == [((7, 1, 2), 3)]


def test_patience_ends_where_the_room_does() -> None:
    g = Generation((7,), 2, distributed(5, min_draft=4))
    assert verifications(g.start().start) == []
    assert verifications(g.handle(Drafted(open_draft(g), 1)).start) == [((7, 1), 2)]


def test_the_horizon_bounds_how_far_a_drafter_runs_ahead() -> None:
    g = Generation((7,), 50, distributed(5, max_lead=3))
    assert drafts(g.start().start) == [(DRAFTER, (7,), 3)]
    steps = [g.handle(Drafted(open_draft(g), guess)) for guess in (1, 2, 3)]
    assert [drafts(step.start) for step in steps] == [[], [], []]
    assert verifications(steps[-1].start) == [((7, 1, 2, 3), 3)]  # it will not fill: judged as it is
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert drafts(step.start) == [(DRAFTER, (7, 1, 2, 3), 1)]


def two_drafters(lookahead: int = 1) -> Generation:
    g = Generation((7,), 50, distributed(lookahead, ("fast", "wise")))
    assert drafts(g.start().start) == [("fast", (7,), 49), ("wise", (7,), 49)]
    return g


def test_drafters_that_agree_share_one_node_and_one_verification() -> None:
    g = two_drafters()
    assert verifications(g.handle(Drafted(open_draft(g, "fast"), 1)).start) == [((7, 1), 1)]
    assert verifications(g.handle(Drafted(open_draft(g, "wise"), 1)).start) == []


def test_drafters_that_differ_have_a_branch_each() -> None:
    g = two_drafters()
    assert verifications(g.handle(Drafted(open_draft(g, "fast"), 1)).start) == [((7, 1), 1)]
    assert verifications(g.handle(Drafted(open_draft(g, "wise"), 2)).start) == [((7, 2), 1)]


def test_a_drafter_whose_branch_fell_follows_the_survivor() -> None:
    g = two_drafters()
    g.handle(Drafted(open_draft(g, "fast"), 1))
    g.handle(Drafted(open_draft(g, "wise"), 2))
    g.handle(Drafted(open_draft(g, "wise"), 3))
    fallen = open_draft(g, "fast")
    step = g.handle(Verified(open_watch(g, 7), (2,)))
    assert fallen in step.cancel
    assert step.emit == (2,)
    assert drafts(step.start) == [("fast", (7, 2, 3), 47)]


def test_of_several_survivors_the_smallest_index_is_followed() -> None:
    g = Generation((7,), 50, distributed(1, ("a", "b", "c")))
    g.start()
    for model, guesses in (("a", (1, 3)), ("b", (1, 4)), ("c", (9,))):
        for guess in guesses:
            g.handle(Drafted(open_draft(g, model), guess))
    step = g.handle(Verified(open_watch(g, 7), (1,)))
    assert drafts(step.start) == [("c", (7, 1, 3), 47)]


def test_when_no_branch_survives_all_begin_at_the_root() -> None:
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
def test_impossible_numbers_are_refused(refused: object) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        refused()  # type: ignore[operator]


def among(targets: int, requests: int, verifying: int) -> Generation:
    crowd = Load(targets, requests, verifying)
    return Generation((7,), 50, load_aware(distributed(5, max_lead=20), SpecConfig(lookahead=3), crowd))


def test_a_request_alone_goes_as_far_ahead_as_it_may() -> None:
    step = among(targets=2, requests=1, verifying=0).start()
    assert (verifications(step.start), drafts(step.start)) == ([((7,), 1)], [(DRAFTER, (7,), 20)])


def test_in_a_crowd_it_drafts_one_block_and_has_it_verified_whole() -> None:
    g = among(targets=1, requests=4, verifying=1)
    step = g.start()
    assert (verifications(step.start), drafts(step.start)) == ([], [(DRAFTER, (7,), 3)])
    steps = [g.handle(Drafted(open_draft(g), guess)) for guess in (1, 2, 3)]
    assert [verifications(step.start) for step in steps] == [[], [], [((7, 1, 2, 3), 4)]]
    assert drafts(steps[-1].start) == []


def test_in_a_crowd_an_idle_target_never_waits_for_guesses() -> None:
    step = among(targets=1, requests=4, verifying=0).start()
    assert verifications(step.start) == [((7,), 1)]


def test_with_several_targets_for_each_it_goes_as_far_as_its_share() -> None:
    step = among(targets=6, requests=2, verifying=6).start()
    assert drafts(step.start) == [(DRAFTER, (7,), 12)]  # a block for each of three targets and one more


def test_a_rule_whose_text_depends_on_its_blocks_keeps_to_them_in_a_crowd() -> None:
    crowd = Load(1, 9, 1)
    policy = load_aware(distributed(5, max_lead=20), SpecConfig(lookahead=3), crowd)
    g = Generation((7,), 50, policy, sampling=Sampling(temperature=1.0, rule="reject"))
    assert drafts(g.start().start) == [(DRAFTER, (7,), 20)]
