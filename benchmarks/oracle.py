"""A model that computes real forwards but answers with another model's tokens.

Random weights take as long as trained ones but agree on nothing; this gives them a chosen acceptance rate.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from dsi.core.sequence import Tokens
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.protocol import ForwardRequest, Model


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
