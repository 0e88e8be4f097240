"""Trees in the core: what is verified together, what a caught rejection keeps, and what is refused."""

from dataclasses import replace

import pytest

from dsi.core.generation import Generation
from dsi.core.messages import Draft, Drafted, DraftedLevel, Failed, Sampling, Step, Verified, Verify
from dsi.core.policies import policy_for
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END

CHANCES = (0.6, 0.3)


def generation(algorithm: str, lookahead: int, tree: int, **fields: object) -> Generation:
    spec = SpecConfig(algorithm, lookahead, tree=tree, chances=CHANCES, **fields)  # type: ignore[arg-type]
    return Generation((7,), 20, policy_for(spec))


def verification(step: Step) -> Verify:
    [job] = [job for job in step.start if isinstance(job, Verify)]
    return job


def draft(step: Step) -> Draft:
    [job] = [job for job in step.start if isinstance(job, Draft)]
    return job


def test_si_verifies_a_tree_in_one_forward_and_walks_it() -> None:
    g = generation("si", 2, 4)
    job = draft(g.start())
    assert job.expansions == ((END, 2), (0, 2))  # of (0,), (0, 0), (1,), (0, 1)
    assert g.handle(DraftedLevel(job.id, ((1, 2),))).start == ()
    asked = verification(g.handle(DraftedLevel(job.id, ((3, 4),), 1)))
    assert (asked.width, asked.tree, len(asked.asked)) == (1, ((END, 1), (END, 2), (0, 3), (0, 4)), 4)
    after = {END: 1, 0: 4, 1: 9, 2: 9, 3: 8}  # the target's tokens: 1, then 4, which is a second choice, then 8
    answer = (after[END], *(after[node] for node in asked.asked))
    step = g.handle(Verified(asked.id, answer))
    assert step.emit == (1, 4, 8)
    assert (g.tally.accepted, g.tally.exposed) == (2, 1)


def test_dsi_continues_below_a_sibling_that_catches_a_rejection() -> None:
    g = generation("dsi", 1, 4)
    start = g.start()
    root, job = verification(start), draft(start)
    second = g.handle(DraftedLevel(job.id, ((1, 2),)))
    below, next_draft = verification(second), draft(second)
    assert {below.tree[node] for node in below.asked} == {(END, 1), (END, 2)}
    step = g.handle(DraftedLevel(next_draft.id, ((3, 4), (5, 6))))
    assert step.emit == ()
    caught = g.handle(Verified(root.id, (2,)))  # the second choice
    assert (caught.emit, below.id in caught.cancel) == ((2,), False)
    assert g.handle(Verified(below.id, (3, 5))).emit == (5,)  # after 1 and after 2: what follows 2 was drafted
    assert g.origins == ["accepted", "accepted"]


def test_dsi_verifies_again_what_failed() -> None:
    g = generation("dsi", 1, 4)
    start = g.start()
    job = draft(start)
    below = verification(g.handle(DraftedLevel(job.id, ((1, 2),))))
    again = [job for job in g.handle(Failed(below.id)).start if isinstance(job, Verify)]
    assert [[job.tree[node] for node in job.asked] for job in again] == [[(END, 1), (END, 2)]]


def test_dsi_repeated_level_changes_nothing() -> None:
    g = generation("si", 3, 6)
    job = draft(g.start())
    g.handle(DraftedLevel(job.id, ((1, 2),)))
    drafted = g.tally.drafted
    g.handle(DraftedLevel(job.id, ((1, 2),)))
    assert g.tally.drafted == drafted


@pytest.mark.parametrize("rule", ["reject", "block", "specinfer"])
def test_trees_are_refused_by_rules_that_need_drafts(rule: str) -> None:
    policy = policy_for(SpecConfig("dsi", 1, tree=4))
    with pytest.raises(ValueError, match=f"rule {rule} with trees of 4 draft tokens: .* or the rule match"):
        Generation((7,), 20, policy, sampling=Sampling(1.0, rule=rule)).start()
    Generation((7,), 20, policy, sampling=Sampling(0.0, rule=rule)).start()


def test_spec_refuses_chances_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"chances \(0.7, 0.6\): must be between 0 and 1, and at most 1 together"):
        SpecConfig("si", 3, tree=4, chances=(0.7, 0.6))
    with pytest.raises(ValueError, match="tree -1: must be at least 0"):
        SpecConfig("si", 3, tree=-1)


def test_tree_goes_on_from_what_was_drafted_as_a_chain() -> None:
    """As `auto` changes from one to the other: the chain is a part of the tree, and its draft ends."""
    chain, tree = (SpecConfig("dsi", 3, tree=size, chances=CHANCES) for size in (0, 4))
    policies = [policy_for(chain)]
    g = Generation((7,), 20, lambda g: policies[0](g))
    drafting = draft(g.start())
    g.handle(Drafted(drafting.id, 1))
    policies = [policy_for(replace(tree, lookahead=2))]
    step = g.handle(Drafted(drafting.id, 2))
    assert step.cancel == (drafting.id,)
    verifying, growing = verification(step), draft(step)
    assert [verifying.tree[node] for node in verifying.asked] == [(END, 1), (0, 2)]
    assert (growing.tree, growing.expansions) == (((END, 1), (0, 2)), ((1, 2),))


def test_chain_verifies_a_position_that_a_failed_tree_left_out() -> None:
    policies = [policy_for(SpecConfig("dsi", 1, tree=4, chances=CHANCES))]
    g = Generation((7,), 20, lambda g: policies[0](g))
    start = g.start()
    root, job = verification(start), draft(start)
    second = g.handle(DraftedLevel(job.id, ((1, 2),)))
    first_level, job = verification(second), draft(second)
    third = g.handle(DraftedLevel(job.id, ((3, 4), (5, 6))))
    second_level, job = verification(third), draft(third)
    policies = [policy_for(SpecConfig("dsi", 2))]
    g.handle(Failed(first_level.id))
    chain = draft(g.handle(DraftedLevel(job.id, ((),))))
    g.handle(Drafted(chain.id, 1))
    g.handle(Drafted(chain.id, 3))
    step = g.handle(Verified(root.id, (1,)))
    again = verification(step)
    assert (step.emit, again.context.token, again.width) == ((1,), 1, 1)
    assert g.handle(Verified(again.id, (3,))).emit == (3,)
    assert second_level.id in g.jobs.open
