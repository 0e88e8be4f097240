"""A model that computes in earnest and says what another one tells it to.

Random weights take as long as trained ones and agree on nothing; with this, guesses are right at a chosen
rate.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from dsi.core.sequence import Tokens
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.protocol import ForwardRequest, Model


@dataclass(frozen=True)
class Oracle:
    body: CudaGraphModel  # whose forwards are computed, and whose answers nobody hears
    teacher: Model  # whose answers are given

    def answer(self, request: ForwardRequest) -> Tokens:
        self.body.answer(request)
        return self._said(request)

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """The mind is asked while the body computes: a model that speaks for itself has none to wait for."""
        said: Tokens | None = None
        for _ in self.body.poll_answer(request):
            yield None
            said = self._said(request) if said is None else said
        return self._said(request) if said is None else said

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        return self.body.poll_draft(request, count, self.teacher)

    def _said(self, request: ForwardRequest) -> Tokens:
        return self.teacher.answer(request) if request.num_positions else ()
