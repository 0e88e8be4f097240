"""The shape of a draft tree: which nodes are worth a row of a verification, by the chances of a drafter's choices.

`chances[r]` is how often a drafter's choice of rank r is the target's token. A node is as likely to be text as the
product of the chances along its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

# Draft tokens after a text: the parent of each, as the index of an earlier one (END: the end of the text), and it.
Tree = tuple[tuple[int, int], ...]
Expansions = tuple[tuple[int, int], ...]  # nodes of a tree, by index, and how many children each is to have
Level = Sequence[tuple[int, int]]  # those that one forward expands
END = -1
TREE_BRANCHES = 3  # choices of a drafter at each node, by default

Chances = tuple[float, ...]
Path = tuple[int, ...]  # the ranks from the root to a node


def rank_chances(acceptance: float, runner_up: float, branches: int) -> Chances:
    """The chances by rank where each further choice is right this often if all before it are wrong."""
    chances, left = [acceptance], 1 - acceptance
    for _ in range(branches - 1):
        chances.append(left * runner_up)
        left *= 1 - runner_up
    return tuple(chances)


@lru_cache(1024)
def best_paths(chances: Chances, size: int, depth: int) -> tuple[tuple[Path, float], ...]:
    """The `size` likeliest nodes at most `depth` deep, each with its chance: the tree with most tokens accepted."""
    paths: list[tuple[Path, float]] = []
    heap: list[tuple[float, Path]] = []

    def add_children(chance: float, path: Path) -> None:
        for rank, factor in enumerate(chances if len(path) < depth else ()):
            if chance * factor > 0:
                heappush(heap, (-chance * factor, (*path, rank)))

    add_children(1.0, ())
    while heap and len(paths) < size:
        chance, path = heappop(heap)
        paths.append((path, -chance))
        add_children(-chance, path)
    return tuple(paths)


def num_accepted(chances: Chances, size: int, depth: int) -> float:
    """How many draft tokens of the best tree are accepted on average."""
    return sum(chance for _, chance in best_paths(chances, size, depth))


def levels(chances: Chances, size: int, depth: int) -> list[int]:
    """How many nodes of each level of the best tree have children, the root's level first: rows of a draft forward."""
    inner = {path[:-1] for path, _ in best_paths(chances, size, depth)}
    return [sum(len(path) == level for path in inner) for level in range(max(map(len, inner), default=-1) + 1)]


@lru_cache(1024)
def expansions(chances: Chances, size: int, depth: int) -> Expansions:
    """How a drafter grows the best tree from the end of a text, level by level."""
    children: dict[Path, int] = {}
    for path, _ in best_paths(chances, size, depth):
        children[path[:-1]] = max(children.get(path[:-1], 0), path[-1] + 1)
    index: dict[Path, int] = {(): END}
    grown: list[tuple[int, int]] = []
    for path in sorted(children, key=len):
        grown.append((index[path], children[path]))
        for rank in range(children[path]):
            index[*path, rank] = len(index) - 1
    return tuple(grown)


@lru_cache(1024)  # of few shapes, again and again
def by_level(grown: Expansions, num_nodes: int) -> tuple[Expansions, ...]:
    """Group expansions into forwards: those whose nodes are there when it begins. `num_nodes` are at first."""
    grouped: list[list[tuple[int, int]]] = [[]]
    known = num_nodes
    for node, count in grown:
        if node >= known:
            grouped.append([])
            known = num_nodes
        grouped[-1].append((node, count))
        num_nodes += count
    return tuple(map(tuple, grouped)) if grown else ()


@lru_cache(1024)
def num_grown(grown: Expansions) -> int:
    """The nodes that these expansions give, if the drafter has so many choices."""
    return sum(count for _, count in grown)


def with_ancestors(tree: Sequence[tuple[int, int]], nodes: Sequence[int]) -> list[int]:
    """These nodes and their ancestors, parents first."""
    needed = set(nodes)
    for node in range(len(tree) - 1, -1, -1):
        if node in needed and tree[node][0] != END:
            needed.add(tree[node][0])
    return sorted(needed)
