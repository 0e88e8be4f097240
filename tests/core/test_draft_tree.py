from dsi.core.draft_tree import DraftTree, Node


def tree() -> DraftTree:
    return DraftTree((1,))


def child(node: Node, token: int) -> Node:
    return tree().grow(node, token, 1)


def test_draft_tree_shares_the_node_of_equal_tokens() -> None:
    root = tree().root
    assert child(root, 5) is child(root, 5)
    assert child(root, 5) is not child(root, 6)
    assert tuple(child(child(root, 5), 6).context) == (1, 5, 6)


def test_node_lineage_ends_at_the_root() -> None:
    tip = child(child(tree().root, 1), 2)
    assert [node.depth for node in tip.lineage(2)] == [2, 1]
    assert [node.depth for node in tip.lineage(9)] == [2, 1, 0]


def test_node_prune_returns_the_jobs_of_the_branch() -> None:
    root = tree().root
    branch, other = child(root, 1), child(root, 2)
    branch.jobs.add(10)
    child(branch, 3).jobs.add(11)
    other.jobs.add(12)
    assert sorted(branch.prune()) == [10, 11]
    assert (branch.alive, child(branch, 3).alive, other.alive, root.alive) == (False, False, True, True)


def test_draft_tree_advance_keeps_only_the_branch_of_the_token() -> None:
    at = tree()
    kept, pruned = at.grow(at.root, 1, 1), at.grow(at.root, 2, 1)
    kept.jobs.add(10)
    pruned.jobs.add(11)
    assert at.advance(1, 1) == [11]
    assert (at.root, kept.parent, kept.alive, pruned.alive) == (kept, None, True, False)
