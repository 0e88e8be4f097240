"""Toy models that answer about several texts and trees after some polls."""

from collections.abc import Generator, Iterator, Sequence

from dsi.core.sequence import Tokens
from dsi.models.protocol import Answer, ForwardRequest, tree_answer
from dsi.models.toy import ToyDrafter, ToyTarget


class PolledPair:
    """A toy model that answers about several texts and trees after so many polls."""

    can_pack = computes_trees = True
    forwards_at_once = 1

    def __init__(self, model: ToyTarget | ToyDrafter, polls: int) -> None:
        self._model, self._polls = model, polls
        self.forwards: list[int] = []  # texts of each

    def answer(self, request: ForwardRequest) -> Tokens:
        return self._model.answer(request)

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        yield from [None] * self._polls
        return self._model.answer(request) if request.num_positions else ()

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        text = list(request.tokens)
        for _ in range(count):
            yield from [None] * self._polls
            text += self._model.answer(ForwardRequest(text, len(text)))
            yield text[-1]

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:  # noqa: ARG002
        return [tree_answer(self._model, request) if request.num_positions else Answer() for request in requests]

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        self.forwards.append(len(requests))
        yield from [None] * self._polls
        return self.answer_packed(requests)
