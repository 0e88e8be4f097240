"""The sure text and every live guess about what follows it, as one trie."""

from __future__ import annotations

from dsi.core.messages import Guess, TopLogprobs
from dsi.core.sequence import TokenSequence


class Node:
    """A place in the tree: the text up to here, and what is known or guessed to follow it."""

    __slots__ = (
        "alive",
        "children",
        "context",
        "depth",
        "drawn",
        "guesses",
        "jobs",
        "note",
        "parent",
        "said",
        "start",
        "truth",
        "watcher",
    )

    def __init__(self, context: TokenSequence, parent: Node | None, depth: int) -> None:
        self.context = context
        self.parent = parent
        self.depth = depth  # tokens generated up to here
        self.truth: int | None = None  # the token the target says comes next, once known
        self.watcher: int | None = None  # the verification that judges, or has judged, what comes next
        self.children: dict[int, Node] = {}
        self.jobs: set[int] = set()  # open jobs whose text ends here
        self.alive = True  # not yet passed by the root, and not fallen
        self.guesses: tuple[Guess, ...] = ()  # about what comes next, where the rule needs to know them
        self.said: dict[str, int] = {}  # what each drafter guessed comes next
        self.note: TopLogprobs = ()  # what the target thinks may come next, where somebody asks
        self.drawn = False  # whether the truth was drawn by the target, and is no guess that stood
        self.start = context.length  # where the block of guesses begins to which what comes next belongs

    @property
    def token(self) -> int:
        return self.context.token

    def child(self, token: int) -> Node:
        """Equal guesses meet in one node, whichever model made them."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(self.context.then(token), self, self.depth + 1)
        return node

    def lineage(self, count: int) -> list[Node]:
        """This node, its parent, and so on: `count` nodes, or fewer where the root comes first."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None and len(line) < count:
            line.append(node)
            node = node.parent
        return line

    def fall(self) -> list[int]:
        """Cut this node and all below it off the tree; returns the jobs that lose their place."""
        lost: list[int] = []
        falling = [self]
        while falling:
            node = falling.pop()
            node.alive = False
            lost += node.jobs
            falling += node.children.values()
        return lost
