"""The verified text and every draft token that may follow it, as one trie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop
from itertools import chain, count as counter, repeat
from math import inf, log
from typing import Any

from dsi.core.messages import DraftToken, TopLogprobs
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.tree_shape import END, Chances, Expansions, Tree, by_level

MOST_PRUNED = 1000  # nodes that a queue may keep although they were pruned


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A position in the tree: the text up to here, and the next token as drafted or verified so far."""

    context: TokenSequence
    parent: Node | None
    depth: int  # tokens generated up to here
    block_start: int  # where the block begins to which the next token belongs
    children: dict[int, Node] = field(default_factory=dict)
    alive: bool = True  # neither passed by the root nor pruned
    jobs: set[int] = field(default_factory=set)  # open jobs whose text ends here
    drafted_by: dict[str, int] = field(default_factory=dict)  # the next token according to each drafter
    draft_tokens: tuple[DraftToken, ...] = ()  # drafts of the next token, where the rule needs them
    verifier: int | None = None  # the verification that covers the next token, in flight or answered
    target_token: int | None = None  # the next token according to the target, once verified
    top_logprobs: TopLogprobs = ()  # of the next token, where the request asks for them
    log_chance: float = 0.0  # that it becomes text, by its path's ranks: only differences between nodes count
    queued: bool = False  # whether it was drafted as a part of a tree, and so has its chance
    sampled: bool = False  # whether the target sampled the next token instead of accepting a draft token

    @property
    def token(self) -> int:
        return self.context.token

    def lineage(self, count: int) -> list[Node]:
        """Return this node, its parent, and so on: `count` nodes, or fewer where the root comes first."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and len(nodes) < count:
            nodes.append(node)
            node = node.parent
        return nodes

    def num_unverified(self) -> int:
        """Count the positions, ending here, that no verification covers."""
        count = 0
        node: Node | None = self
        while node is not None and node.verifier is None:
            count += 1
            node = node.parent
        return count

    def prune(self) -> list[int]:
        """Cut this node and all below it off the tree; return the jobs whose text ended there."""
        jobs: list[int] = []
        nodes = [self]
        while nodes:
            node = nodes.pop()
            node.alive = False
            if node.jobs:
                jobs += node.jobs
            if node.children:
                nodes += node.children.values()
        return jobs


class NodeQueue:
    """Nodes of a draft tree, the likeliest first; a parent comes before its children. Pruned ones drop out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []  # sorted as one when a node is taken
        self._is_heap = True
        self._order = counter()
        self._most = MOST_PRUNED  # nodes, with which pruned ones are removed

    def push(self, node: Node) -> None:
        if len(self._heap) >= self._most:
            self._remove_pruned()
            self._most = MOST_PRUNED + 2 * len(self._heap)
        self._heap.append((-node.log_chance, node.depth, next(self._order), node))
        self._is_heap = False

    def has(self, least: int) -> bool:
        """Whether there are so many nodes that were not pruned."""
        if len(self._heap) >= least:
            self._remove_pruned()
        return len(self._heap) >= least

    def _remove_pruned(self) -> None:
        self._heap = [entry for entry in self._heap if entry[-1].alive]
        self._is_heap = False

    def pop(self, most: int, wanted: Callable[[Node], bool]) -> list[Node]:
        """Take so many at most; those that are not wanted now stay."""
        taken: list[Node] = []
        kept: list[Node] = []
        if not self._is_heap:
            heapify(self._heap)
            self._is_heap = True
        while self._heap and len(taken) < most:
            node = heappop(self._heap)[-1]
            if node.alive:
                (taken if wanted(node) else kept).append(node)
        for node in kept:
            self.push(node)
        return taken


class TreeDraft:
    """A tree that a drafter grows, a level at a time; its nodes have numbers, as in the job."""

    def __init__(self, root: Node, nodes: Sequence[Node], expansions: Expansions, chances: Chances) -> None:
        self._root, self._log_chances = root, log_chances(chances)
        self._nodes: list[Node | None] = list(nodes)  # None: the drafter had no such choice
        self._levels = by_level(expansions, len(nodes))
        self.level = 0  # that is drafted next
        self.verifier: int | None = None  # the verification of all its nodes that is in flight, too
        self.expanded = [self._node(index) for index, _ in self._levels[0]]  # by the first forward

    def _node(self, index: int) -> Any:
        return self._root if index == END else self._nodes[index]

    def grow(self, tree: DraftTree, children: Sequence[Tokens], model: str, block_size: int) -> bool:
        """Add the children that a forward returned; return whether it was the last one."""
        for (index, count), tokens in zip(self._levels[self.level], children):
            node: Node | None = self._node(index)
            grown: list[Node | None] = []
            if node is not None and node.alive and tokens:
                node.drafted_by[model] = tokens[0]
                grown += [
                    self._child(tree, node, chance, token, block_size)
                    for token, chance in zip(tokens[:count], chain(self._log_chances, repeat(-inf)))
                ]
            self._nodes += grown + [None] * (count - len(grown))
        self.level += 1
        return self.level == len(self._levels)

    def grown(self, after: int) -> list[Node | None]:
        """The nodes from a number on, by number; None where the drafter had no such choice."""
        return self._nodes[after:]

    def _child(self, tree: DraftTree, node: Node, chance: float, token: int, block_size: int) -> Node:
        is_new = token not in node.children
        child = tree.grow(node, token, block_size)
        child.log_chance = node.log_chance + chance
        if child.verifier is None:
            child.verifier = self.verifier
        if is_new:
            tree.queue(child)
        return child

    def stop(self, tree: DraftTree) -> None:
        """No more levels come; nodes that were not expanded can be again."""
        for node in self.expanded:
            if node.alive and not node.children and node is not tree.root:
                tree.leaves.push(node)


@lru_cache(1024)
def log_chances(chances: Chances) -> Sequence[float]:
    """The logarithms of the chances that a drafter's choices are the target's token, by rank."""
    return [log(chance) if chance > 0 else -inf for chance in chances]


class DraftTree:
    """The root is the end of the verified text; every node below it ends one possible continuation."""

    def __init__(self, prompt: Iterable[int]) -> None:
        context = TokenSequence.of(prompt)
        self.root = Node(context, None, 0, context.length)
        self.tips: dict[str, Node] = {}  # the last draft token of each drafter
        self.leaves = NodeQueue()  # of trees that drafters grow: to be continued...
        self.unverified = NodeQueue()  # ...and to be verified

    def grow(self, node: Node, token: int, block_size: int) -> Node:
        """Return the child for this token: equal draft tokens share a node, whichever drafter returned them.

        It lies in the block of its parent unless that is full or was cut short.
        """
        child = node.children.get(token)
        if child is None:
            context = node.context.then(token)
            same_block = not node.sampled and context.length - node.block_start < block_size
            block_start = node.block_start if same_block else context.length
            child = node.children[token] = Node(context, node, node.depth + 1, block_start)
        return child

    def queue(self, node: Node) -> None:
        """Let a draft token be continued, and verified unless a verification covers it."""
        node.queued = True
        if not node.children:
            self.leaves.push(node)
        if node.verifier is None:
            self.unverified.push(node)

    def queue_all(self, chances: Chances) -> None:
        """Make all that was drafted a tree, whose chances are those of its ranks."""
        self.leaves, self.unverified = NodeQueue(), NodeQueue()
        nodes = [self.root]
        for node in nodes:
            for child, chance in zip(node.children.values(), chain(log_chances(chances), repeat(-inf))):
                child.log_chance = node.log_chance + chance
                self.queue(child)
                nodes.append(child)

    def advance(self, token: int, block_size: int) -> list[int]:
        """Move the root on to this token and prune every other branch; return the jobs that ended there."""
        passed = self.root
        self.root = self.grow(passed, token, block_size)
        del passed.children[token]
        self.root.parent = None  # what lies behind the root is only text
        return passed.prune()

    def tip(self, model: str, among: Iterable[str] = ()) -> Node:
        """Return where a drafter's tokens end; if they were pruned, where those of the first survivor do."""
        root = self.root
        for name in (model, *among):
            node = self.tips.get(name)
            if node is not None and node.alive and node is not root:
                return node
        return root

    def first_choices(self) -> Node:
        """Where the path of first choices ends."""
        node = self.root
        while node.children:
            node = next(iter(node.children.values()))
        return node

    def with_ancestors(self, nodes: Iterable[Node]) -> list[Node]:
        """These nodes and those between them and the root, which is left out: parents before children."""
        needed: dict[Node, None] = {}  # in an order that does not depend on memory
        for node in nodes:
            while node is not self.root and node not in needed:
                needed[node] = None
                node = node.parent  # type: ignore[assignment]
        return sorted(needed, key=lambda node: node.depth)

    def encode(self, nodes: Sequence[Node]) -> Tree:
        """The nodes as messages carry them; the parent of each is among those before it, or the root."""
        index = {node: i for i, node in enumerate(nodes)}
        return tuple((index.get(node.parent, END), node.token) for node in nodes)  # type: ignore[arg-type]

    def max_depth(self) -> int:
        """The depth of the furthest draft token, or of the root."""
        return max((node.depth for node in self.tips.values() if node.alive), default=self.root.depth)
