"""What a server asks of a model, and the models that answer with rows of scores.

A model is asked about a whole text and answers as if it had no memory; what it remembers to be fast is
its own affair.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dsi.core.messages import GREEDY, DraftToken, Sampling, TopLogprobs
from dsi.core.sequence import Tokens
from dsi.sampling.logits import top_k_tokens, top_logprobs
from dsi.sampling.noise import Array
from dsi.sampling.verify import DraftProbs, draw_guesses, verify_block


class Cancelled(Exception):
    """The answer is no longer wanted, and the model stopped working on it."""


class CancelFlag(Protocol):
    """Says whether an answer is still wanted. `threading.Event` is one."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...


class Never:
    """The flag of an answer that is always wanted."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:  # noqa: ARG002
        return False


NEVER = Never()


@dataclass(slots=True)
class ForwardRequest:
    """Which token follows tokens[:i], for each i from `start` to the end of them?

    A `start` beyond the end asks nothing but to have read the text.
    """

    tokens: Sequence[int]
    start: int
    num_cached: int | None = None  # how many of these the server has read before; None: the request is new to it
    sampling: Sampling = GREEDY
    cancelled: CancelFlag = NEVER
    guesses: tuple[tuple[DraftToken, ...], ...] = ()  # about each place, where the rule needs them

    @property
    def num_positions(self) -> int:
        return len(self.tokens) + 1 - self.start


class Model(Protocol):
    def answer(self, request: ForwardRequest) -> Tokens:
        """One token for each place asked about, or `Cancelled`."""
        ...


@runtime_checkable
class SupportsDraw(Model, Protocol):
    """A model that can say how it drew its guesses."""

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        """Guesses about the place after this text, which lies in a block of guesses that began at `start`."""
        ...


def draw_or_answer(model: Model, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
    """Of a model that knows no odds, the guess counts as the only one it could have made."""
    return model.draw(request, start) if isinstance(model, SupportsDraw) else (model.answer(request), None)


@runtime_checkable
class SupportsTopK(Model, Protocol):
    """A model that can name runners-up."""

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
        """What `answer` says about the place after this text, then up to `count - 1` that came close."""
        ...


def top_k_or_answer(model: Model, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
    """A model that knows no runners-up has its guess alone."""
    return model.top_k(request, count, min_ratio) if isinstance(model, SupportsTopK) else model.answer(request)


@runtime_checkable
class SupportsLogprobs(Model, Protocol):
    """A model that can say what it thinks of each place."""

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        """What `answer` says, and a note on each: the likeliest tokens, the answer and the guesses."""
        ...


def logprobs_or_answer(model: Model, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
    """A model that has no scores leaves no notes."""
    return model.answer_with_logprobs(request) if isinstance(model, SupportsLogprobs) else (model.answer(request), ())


@runtime_checkable
class Pollable(Model, Protocol):
    """A model that computes elsewhere, on a GPU say, and is looked at now and then."""

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """As `answer`, but it yields while the answer is being computed."""
        ...

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        """The token after this text, the one after that, and so on, and None while one is being computed."""
        ...


class Backend(Protocol):
    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        """A row of scores after tokens[:i] for each i from `start` to the end of them."""
        ...


@dataclass(frozen=True)
class SamplingModel:
    """A backend that has learnt to choose: its rows, judged by the rule that is asked for."""

    backend: Backend

    def answer(self, request: ForwardRequest) -> Tokens:
        rows = self.backend.forward(request.tokens, request.start, request.cancelled)
        return verify_block(rows, request.sampling, request.start, request.guesses)

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        rows = self.backend.forward(request.tokens, request.start, request.cancelled)
        found = verify_block(rows, request.sampling, request.start, request.guesses)
        about = request.guesses or ((),) * len(found)
        named = [(token, *(guess for guess, _ in each)) for token, each in zip(found, about)]
        return found, top_logprobs(rows, request.sampling.logprobs or 0, named)

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
        [row] = self.backend.forward(request.tokens, request.start, request.cancelled)
        return top_k_tokens(row, request.sampling, request.start, count, min_ratio)

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        [row] = self.backend.forward(request.tokens, request.start, request.cancelled)
        return draw_guesses(row, request.sampling, request.start, start)
