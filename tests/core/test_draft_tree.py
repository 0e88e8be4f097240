from dsi.core.draft_tree import Node
from dsi.core.sequence import TokenSequence


def test_equal_guesses_meet_in_one_node() -> None:
    root = Node(TokenSequence.of((1,)), None, 0)
    assert root.child(5) is root.child(5)
    assert root.child(5) is not root.child(6)
    assert tuple(root.child(5).child(6).context) == (1, 5, 6)


def test_lineage_goes_up_to_the_root_at_most() -> None:
    root = Node(TokenSequence.of(()), None, 0)
    tip = root.child(1).child(2)
    assert [node.depth for node in tip.lineage(2)] == [2, 1]
    assert [node.depth for node in tip.lineage(9)] == [2, 1, 0]


def test_a_falling_branch_takes_its_jobs_with_it() -> None:
    root = Node(TokenSequence.of(()), None, 0)
    branch, other = root.child(1), root.child(2)
    branch.jobs.add(10)
    branch.child(3).jobs.add(11)
    other.jobs.add(12)
    assert sorted(branch.fall()) == [10, 11]
    assert (branch.alive, branch.child(3).alive, other.alive, root.alive) == (False, False, True, True)
