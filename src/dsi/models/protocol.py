"""The protocol between servers and models, and the model that samples from a backend's logits.

A request carries the whole text, and a model answers as if it were stateless; KV caches are its own concern.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dsi.core.messages import GREEDY, DraftToken, Sampling, TopLogprobs
from dsi.core.sequence import Tokens
from dsi.sampling.logits import top_k_tokens, top_logprobs
from dsi.sampling.noise import Array
from dsi.sampling.penalties import apply_penalties
from dsi.sampling.verify import DraftProbs, draw_guesses, verify_block


class Cancelled(Exception):
    """The request was cancelled, and the model stopped computing it."""


class CancelFlag(Protocol):
    """Whether a request was cancelled. `threading.Event` is one."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...


class Never:
    """The flag of a request that is never cancelled."""

    value = False

    def is_set(self) -> bool:
        return self.value

    def wait(self, timeout: float) -> bool:  # noqa: ARG002
        return self.value


NEVER = Never()


@dataclass(slots=True)
class ForwardRequest:
    """A request for the token after tokens[:i], for each i from `start` to len(tokens).

    A `start` beyond the end only prefills the KV cache.
    """

    tokens: Sequence[int]
    start: int
    num_cached: int | None = None  # tokens that the server has processed before; None: a new prompt
    sampling: Sampling = GREEDY
    cancelled: CancelFlag = NEVER
    guesses: tuple[tuple[DraftToken, ...], ...] = ()  # draft tokens for each position, where the rule needs them
    prompt_length: int = 0  # tokens before the generated text

    @property
    def num_positions(self) -> int:
        return len(self.tokens) + 1 - self.start


class Model(Protocol):
    def answer(self, request: ForwardRequest) -> Tokens:
        """Return one token for each position requested, or raise `Cancelled`."""
        ...


@runtime_checkable
class SupportsDraw(Model, Protocol):
    """A model that can return the distribution its draft tokens are drawn from."""

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        """Draw the draft tokens after this text, in a block of draft tokens that began at `start`."""
        ...


def draw_or_answer(model: Model, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
    """Without `draw`, treat the model's answer as deterministic."""
    return model.draw(request, start) if isinstance(model, SupportsDraw) else (model.answer(request), None)


@runtime_checkable
class SupportsTopK(Model, Protocol):
    """A model that can return runners-up."""

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
        """Return the answer for the position after this text, then up to `count - 1` runners-up."""
        ...


def top_k_or_answer(model: Model, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
    """Without `top_k`, return the answer alone."""
    return model.top_k(request, count, min_ratio) if isinstance(model, SupportsTopK) else model.answer(request)


@runtime_checkable
class SupportsLogprobs(Model, Protocol):
    """A model that can return log-probabilities."""

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        """Return the answer, and for each position the log-probabilities of the top tokens, answer and guesses."""
        ...


def logprobs_or_answer(model: Model, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
    """Without `answer_with_logprobs`, return no log-probabilities."""
    return model.answer_with_logprobs(request) if isinstance(model, SupportsLogprobs) else (model.answer(request), ())


@runtime_checkable
class Pollable(Model, Protocol):
    """A model that computes asynchronously, for example on a GPU, and is polled."""

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """As `answer`, but yield while the answer is being computed."""
        ...

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        """Generate `count` tokens autoregressively, yielding each, and None while one is being computed."""
        ...


class Backend(Protocol):
    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        """Return one row of logits after tokens[:i] for each i from `start` to len(tokens)."""
        ...


class ProcessLogits(Protocol):
    def __call__(self, logits: Array, tokens: Sequence[int], start: int) -> Array:
        """Return the logits to sample from, given those after tokens[:i] for each i from `start` to len(tokens)."""
        ...


@dataclass(frozen=True)
class SamplingModel:
    """A model that computes logits with a backend and applies the request's sampling and acceptance rule."""

    backend: Backend
    process: ProcessLogits | None = None  # before sampling; log-probabilities are the backend's own

    def answer(self, request: ForwardRequest) -> Tokens:
        return self._verify(request, self._logits(request))

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        logits = self._forward(request)
        tokens = self._verify(request, self._processed(request, logits))
        guesses = request.guesses or ((),) * len(tokens)
        required = [(token, *(guess for guess, _ in position)) for token, position in zip(tokens, guesses)]
        return tokens, top_logprobs(logits, request.sampling.logprobs or 0, required)

    def top_k(self, request: ForwardRequest, count: int, min_ratio: float) -> Tokens:
        [row] = self._logits(request)
        return top_k_tokens(row, request.sampling, request.start, count, min_ratio)

    def draw(self, request: ForwardRequest, start: int) -> tuple[Sequence[int], DraftProbs | None]:
        [row] = self._logits(request)
        return draw_guesses(row, request.sampling, request.start, start)

    def _logits(self, request: ForwardRequest) -> Array:
        return self._processed(request, self._forward(request))

    def _forward(self, request: ForwardRequest) -> Array:
        return self.backend.forward(request.tokens, request.start, request.cancelled)

    def _processed(self, request: ForwardRequest, logits: Array) -> Array:
        if not request.num_positions:
            return logits
        if self.process is not None:
            logits = self.process(logits, request.tokens, request.start)
        if request.sampling.has_penalties:
            logits = apply_penalties(logits, request.sampling, request.tokens, request.start, request.prompt_length)
        return logits

    def _verify(self, request: ForwardRequest, logits: Array) -> Tokens:
        return verify_block(logits, request.sampling, request.start, request.guesses)
