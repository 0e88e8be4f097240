"""What jobs ask of a model: the request of each forward, whether it computes one text or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from dsi.core.messages import GREEDY, Draft, DraftedLevel, Prefill, Verify
from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Level, Tree, by_level, with_ancestors
from dsi.fleets.servers import CachedPrefix
from dsi.models.protocol import NEVER, CancelFlag, ForwardRequest

Answered = TypeVar("Answered")


def verify_request(job: Prefill | Verify, prefix: CachedPrefix, cancelled: CancelFlag = NEVER) -> ForwardRequest:
    """The forward of a verification, or of a prefill."""
    tokens, prompt_length = prefix.tokens, len(job.context.origin)
    if isinstance(job, Prefill):
        return ForwardRequest(tokens, len(tokens) + 1, prefix.num_cached, GREEDY, cancelled, (), prompt_length)
    start = len(tokens) + 1 - job.width
    request = ForwardRequest(tokens, start, prefix.num_cached, job.sampling, cancelled, job.draft_tokens, prompt_length)
    if job.tree:
        request.tree, request.asked, request.num_new_nodes = job.tree, job.asked, prefix.num_new_nodes(job.tree)
    return request


def draft_request(job: Draft, prefix: CachedPrefix, cancelled: CancelFlag = NEVER) -> ForwardRequest:
    """The forward of the next draft token."""
    tokens, prompt_length = prefix.tokens, len(job.context.origin)
    return ForwardRequest(tokens, len(tokens), prefix.num_cached, job.sampling, cancelled, prompt_length=prompt_length)


class TreeGrowth:
    """The tree of a draft, which grows by a level with each forward."""

    def __init__(self, job: Draft) -> None:
        self._job = job
        self._tree = list(job.tree)
        self._indices: list[int | None] = list(range(len(job.tree)))  # in the tree, by number in the job; None: no node
        self._levels = by_level(job.expansions, len(job.tree))
        self._num_grown = 0
        self.given_up = False  # before it was done

    @property
    def done(self) -> bool:
        return self._num_grown == len(self._levels)

    @property
    def tree(self) -> Tree:
        """What has grown so far."""
        return tuple(self._tree)

    def verification(self, job: Verify) -> Verify:
        """The verification of all of the tree, once it is done, as one that says what the tree is."""
        asked = tuple(index for index in self._indices if index is not None)
        return replace(job, tree=self.tree, asked=asked, draft=None, num_drafted=0)

    def by_number(self, answer: Sequence[Answered], missing: Answered) -> tuple[Answered, ...]:
        """What was answered about the text, and then about each number: `missing` where there is no such node."""
        if None not in self._indices:
            return tuple(answer)
        own = len(answer) - sum(index is not None for index in self._indices)
        remaining = iter(answer[own:])
        return (*answer[:own], *(missing if index is None else next(remaining) for index in self._indices))

    @property
    def expanded(self) -> Tree:
        """The nodes that have children."""
        return subtree(self._tree, sorted({parent for parent, _ in self._tree if parent != END}))[0]

    def _level(self) -> list[tuple[int | None, int]]:
        """The nodes that the next forward expands, those that the drafter had no choice for too, and their counts."""
        level, indices = self._levels[self._num_grown], self._indices
        return [(END if number == END else indices[number], count) for number, count in level]

    def request(self, prefix: CachedPrefix, cancelled: CancelFlag = NEVER) -> ForwardRequest:
        """The forward of the next level; it asks for nothing where there is no node to expand."""
        wanted = [(node, count) for node, count in self._level() if node is not None]
        tree, asked = subtree(self._tree, [node for node, _ in wanted if node != END])
        at_end = bool(wanted) and wanted[0][0] == END
        return ForwardRequest(
            prefix.tokens,
            len(prefix.tokens) + (not at_end),
            prefix.num_cached,
            self._job.sampling,
            cancelled,
            prompt_length=len(self._job.context.origin),
            tree=tree,
            asked=asked,
            num_new_nodes=prefix.num_new_nodes(tree),
            num_children=[count for _, count in wanted],
        )

    def later_levels(self, request: ForwardRequest) -> Sequence[Level]:
        """The levels after the first, as models number nodes: those of this request's tree, then grown ones."""
        offset, levels = len(request.tree) - len(self._job.tree), self._levels[self._num_grown + 1 :]
        if not offset:
            return levels
        return [[(number + offset, count) for number, count in level] for level in levels]

    def add(self, answers: Sequence[Tokens]) -> DraftedLevel:
        """Add the children that the forward returned."""
        remaining, level = iter(answers), list[Tokens]()
        for node, count in self._level():
            tokens = () if node is None else next(remaining)[:count]
            self._indices += [*range(len(self._tree), len(self._tree) + len(tokens)), *[None] * (count - len(tokens))]
            self._tree += [(node, token) for token in tokens if node is not None]
            level.append(tokens)
        self._num_grown += 1
        return DraftedLevel(self._job.id, tuple(level), self._num_grown - 1)


def subtree(tree: Sequence[tuple[int, int]], nodes: Sequence[int]) -> tuple[Tree, list[int]]:
    """The part of a tree that ends in these nodes, and their indices in it."""
    if not nodes:
        return (), []
    needed = with_ancestors(tree, nodes)
    index = {node: i for i, node in enumerate(needed)} | {END: END}
    return tuple((index[tree[node][0]], tree[node][1]) for node in needed), [index[node] for node in nodes]
