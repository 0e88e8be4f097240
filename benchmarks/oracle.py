"""A model that computes real forwards but answers with another model's tokens.

Random weights take as long as trained ones but agree on nothing; this gives them a chosen acceptance rate.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Level, Tree
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.protocol import Answer, ForwardRequest, LaunchedGrowth, Model, SamplingModel, StopFlag, tree_answer


@dataclass(frozen=True)
class Oracle:
    model: CudaGraphModel  # computes the forwards; its tokens are discarded
    teacher: Model  # gives the tokens

    def answer(self, request: ForwardRequest) -> Tokens:
        self.model.answer(request)
        return self._teach(request)

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """Call the teacher while the GPU computes, so that it adds nothing to the latency."""
        tokens: Tokens | None = None
        for _ in self.model.poll_answer(request):
            yield None
            tokens = self._teach(request) if tokens is None else tokens
        return self._teach(request) if tokens is None else tokens

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        return self.model.poll_draft(request, count, self.teacher)

    def _teach(self, request: ForwardRequest) -> Tokens:
        return self.teacher.answer(request) if request.num_positions else ()


@dataclass(frozen=True)
class PackedOracle:
    """The same for forwards that texts and draft trees share."""

    model: SamplingModel
    teacher: Model
    can_pack = computes_trees = True
    forwards_at_once = 1

    @property
    def max_rows(self) -> int:
        return self.model.max_rows

    @property
    def forwards_in_flight(self) -> int:
        return self.model.forwards_in_flight

    def num_cached(self, tokens: Sequence[int]) -> int:
        return self.model.num_cached(tokens)

    def answer(self, request: ForwardRequest) -> Tokens:
        [answer] = self.answer_packed([request])
        return answer.tokens

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:  # noqa: ARG002
        self.model.answer_packed(requests)
        return self._teach(requests)

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        answers: list[Answer] | None = None
        steps = self.model.poll_packed(requests)
        for _ in steps:
            yield None
            answers = self._teach(requests) if answers is None else answers
        return self._teach(requests) if answers is None else answers

    def poll_generated(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], stop: StopFlag
    ) -> Generator[list[Answer] | None, None, bool]:
        return self.model.poll_generated(requests, counts, stop, self.teacher)

    @property
    def launched(self) -> LaunchedGrowth | None:
        return self.model.launched

    def can_follow(self, request: ForwardRequest, launched: LaunchedGrowth) -> bool:
        return self.model.can_follow(request, launched)

    def poll_following(
        self, request: ForwardRequest, launched: LaunchedGrowth, grown: Callable[[], Tree | None]
    ) -> Generator[None, None, Answer]:
        answer: Answer | None = None
        for _ in self.model.poll_following(request, launched, grown):
            yield None
            if answer is None and (tree := grown()) is not None:
                answer = self._teach_tree(request, tree)
        return self._teach_tree(request, grown() or ()) if answer is None else answer

    def _teach_tree(self, request: ForwardRequest, tree: Tree) -> Answer:
        return tree_answer(self.teacher, replace(request, tree=tree, asked=range(len(tree))))

    def can_grow(self, request: ForwardRequest, levels: Sequence[Level]) -> bool:
        return self.model.can_grow(request, levels)

    def poll_levels(self, request: ForwardRequest, levels: Sequence[Level]) -> Iterator[Answer | None]:
        taught = self._teach_levels(request, levels)
        known: list[Answer] = []
        given = 0
        for answer in self.model.poll_levels(request, levels):
            known += [] if len(known) > given else islice(taught, 1)
            given += answer is not None
            yield answer and known[given - 1]

    def _teach_levels(self, request: ForwardRequest, levels: Sequence[Level]) -> Iterator[Answer]:
        tree, nodes = list(request.tree), [END] * (request.start <= len(request.tokens)) + list(request.asked)
        for level in (*levels, ()):
            [answer] = self._teach([request])
            yield answer
            for node, children in zip(nodes, answer.children):
                tree += [(node, token) for token in children]
            nodes = [node for node, _ in level]
            counts = [count for _, count in level]
            after = len(request.tokens) + 1
            request = replace(request, start=after, tree=tuple(tree), asked=nodes, num_children=counts)

    def _teach(self, requests: Sequence[ForwardRequest]) -> list[Answer]:
        return [tree_answer(self.teacher, request) if request.num_positions else Answer() for request in requests]
