"""The protocol between servers and models, and the model that samples from a backend's logits.

A request carries the whole text, and a model answers as if it were stateless; KV caches are its own concern.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Protocol, runtime_checkable

from dsi.core.messages import GREEDY, DraftToken, Sampling, TopLogprobs
from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Tree
from dsi.sampling.logits import greedy_tokens, greedy_top_k, top_k_tokens, top_logprobs
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

    A `start` beyond the end only prefills the KV cache. With a tree of draft tokens after the text, it also asks
    for the token after each of the nodes `asked`, by number.
    """

    tokens: Sequence[int]
    start: int
    num_cached: int | None = None  # tokens that the server has processed before; None: a new prompt
    sampling: Sampling = GREEDY
    cancelled: CancelFlag = NEVER
    guesses: tuple[tuple[DraftToken, ...], ...] = ()  # draft tokens for each position, where the rule needs them
    prompt_length: int = 0  # tokens before the generated text
    tree: Tree = ()
    asked: Sequence[int] = ()
    num_new_nodes: int = 0  # of the tree that are not in the KV cache

    @property
    def num_positions(self) -> int:
        return len(self.tokens) + 1 - self.start + len(self.asked)

    def texts(self) -> Iterator[ForwardRequest]:
        """What is asked as requests without a tree, one for each node after the first: the same answers, slower."""
        if self.start <= len(self.tokens):
            yield replace(self, tree=(), asked=(), num_new_nodes=0)
        for node in self.asked:
            text = [*self.tokens, *tree_path(self.tree, node)]
            cached = None if self.num_cached is None else min(self.num_cached, len(text) - 1)
            yield replace(self, tokens=text, start=len(text), num_cached=cached, tree=(), asked=(), num_new_nodes=0)


def tree_path(tree: Tree, node: int) -> Tokens:
    """The tokens from the end of the text to a node."""
    path: list[int] = []
    while node != END:
        node, token = tree[node]
        path.append(token)
    return tuple(reversed(path))


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

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        """Return the answer for the position after this text, then up to `count - 1` runners-up."""
        ...


def top_k_or_answer(model: Model, request: ForwardRequest, count: int) -> Tokens:
    """Without `top_k`, return the answer alone."""
    return model.top_k(request, count) if isinstance(model, SupportsTopK) else model.answer(request)


@runtime_checkable
class SupportsLogprobs(Model, Protocol):
    """A model that can return log-probabilities."""

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        """Return the answer, and for each position the log-probabilities of the top tokens, answer and guesses."""
        ...


def logprobs_or_answer(model: Model, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
    """Without `answer_with_logprobs`, return no log-probabilities."""
    return model.answer_with_logprobs(request) if isinstance(model, SupportsLogprobs) else (model.answer(request), ())


Answer = tuple[Tokens, tuple[TopLogprobs, ...]]  # a token for each position, and log-probabilities where asked for


@runtime_checkable
class SupportsPacking(Model, Protocol):
    """A model that can compute several texts in one forward."""

    @property
    def can_pack(self) -> bool: ...

    def answer_packed(self, requests: Sequence[ForwardRequest]) -> list[Answer]:
        """Answer requests about different texts in one forward; none of them is cancelled meanwhile."""
        ...


@runtime_checkable
class SupportsTrees(Model, Protocol):
    """A model that answers about a tree of draft tokens in one forward."""

    def answer_tree(self, request: ForwardRequest) -> Answer:
        """The answer for the positions of the text, then for the nodes asked about."""
        ...

    def expand_tree(self, request: ForwardRequest, counts: Sequence[int]) -> list[Tokens]:
        """The likeliest tokens after the text, if its last position is asked for, and after each node asked."""
        ...


def computes_trees(model: Model) -> bool:
    """Whether a model computes a tree of draft tokens in one forward."""
    return bool(getattr(model, "computes_trees", False))


def tree_answer(model: Model, request: ForwardRequest) -> Answer:
    """Without `answer_tree`, answer text by text."""
    if isinstance(model, SupportsTrees):
        return model.answer_tree(request)
    return answer_text_by_text(model, request)


def answer_text_by_text(model: Model, request: ForwardRequest) -> Answer:
    """Answer about each node of a tree as about a text of its own."""
    if request.sampling.logprobs is None:
        return tuple(token for text in request.texts() for token in model.answer(text)), ()
    answers = [logprobs_or_answer(model, text) for text in request.texts()]
    return tuple(token for tokens, _ in answers for token in tokens), sum((logprobs for _, logprobs in answers), ())


def tree_children(model: Model, request: ForwardRequest, counts: Sequence[int]) -> list[Tokens]:
    """Without `expand_tree`, ask text by text."""
    if isinstance(model, SupportsTrees):
        return model.expand_tree(request, counts)
    if not isinstance(model, SupportsTopK):
        return [model.answer(text) for text in request.texts()]
    return [model.top_k(text, count) for text, count in zip(request.texts(), counts)]


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


class PackingBackend(Backend, Protocol):
    def forward_packed(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Array]:
        """As `forward` for each text and its start, in one forward over the new tokens of all."""
        ...


class TreeBackend(Backend, Protocol):
    def forward_tree(
        self, tokens: Sequence[int], start: int, tree: Tree, asked: Sequence[int], cancelled: CancelFlag
    ) -> Array:
        """As `forward`, with rows after these nodes of a tree behind them, all in one forward."""
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
        return self._with_logprobs(request, self._forward(request))

    @property
    def can_pack(self) -> bool:
        return bool(getattr(self.backend, "can_pack", hasattr(self.backend, "forward_packed")))

    def answer_packed(self, requests: Sequence[ForwardRequest]) -> list[Answer]:
        backend: PackingBackend = self.backend  # type: ignore[assignment]
        logits = backend.forward_packed([(request.tokens, request.start) for request in requests])
        plain = [i for i, request in enumerate(requests) if request.num_positions and self._is_plain(request.sampling)]
        best = iter(greedy_tokens([logits[i] for i in plain]))
        greedy = {i: tuple(islice(best, requests[i].num_positions)) for i in plain}
        return [
            (greedy[i], ()) if i in greedy else self._packed_answer(request, rows)
            for i, (request, rows) in enumerate(zip(requests, logits))
        ]

    def _is_plain(self, sampling: Sampling) -> bool:
        """Whether the likeliest token is the answer."""
        special = self.process is not None or sampling.has_penalties or sampling.logprobs is not None
        return sampling.temperature == 0 and not special

    def _packed_answer(self, request: ForwardRequest, logits: Array) -> Answer:
        if not request.num_positions:
            return (), ()
        if request.sampling.logprobs is not None:
            return self._with_logprobs(request, logits)
        return self._verify(request, self._processed(request, logits)), ()

    def _with_logprobs(self, request: ForwardRequest, logits: Array) -> Answer:
        tokens = self._verify(request, self._processed(request, logits))
        guesses = request.guesses or ((),) * len(tokens)
        required = [(token, *(guess for guess, _ in position)) for token, position in zip(tokens, guesses)]
        return tokens, top_logprobs(logits, request.sampling.logprobs or 0, required)

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        [row] = self._logits(request)
        return top_k_tokens(row, request.sampling, request.start, count)

    def answer_tree(self, request: ForwardRequest) -> Answer:
        if self._is_plain(request.sampling) and self.computes_trees:
            return tuple(greedy_tokens([self._tree_logits(request)])), ()
        rows = self._tree_rows(request)
        if request.sampling.logprobs is None:
            return tuple(token for text, row in rows for token in self._verify(text, self._processed(text, row))), ()
        answers = [self._with_logprobs(text, row) for text, row in rows]
        return tuple(token for tokens, _ in answers for token in tokens), sum((logprobs for _, logprobs in answers), ())

    def expand_tree(self, request: ForwardRequest, counts: Sequence[int]) -> list[Tokens]:
        if self._is_plain(request.sampling) and self.computes_trees:
            return greedy_top_k([self._tree_logits(request)], counts)
        children = []
        for (text, logits), count in zip(self._tree_rows(request), counts):
            [row] = self._processed(text, logits)
            children.append(top_k_tokens(row, text.sampling, text.start, count))
        return children

    def _tree_rows(self, request: ForwardRequest) -> list[tuple[ForwardRequest, Array]]:
        """The texts that are asked about, and their logits: computed in one forward where the backend can."""
        texts = list(request.texts())
        if not self.computes_trees:
            return [(text, self._forward(text)) for text in texts]
        logits, ends = self._tree_logits(request), accumulate(text.num_positions for text in texts)
        return [(text, logits[end - text.num_positions : end]) for text, end in zip(texts, ends)]

    @property
    def computes_trees(self) -> bool:
        """Whether a tree takes one forward."""
        return getattr(self.backend, "supports_trees", hasattr(self.backend, "forward_tree"))

    def _tree_logits(self, request: ForwardRequest) -> Array:
        backend: TreeBackend = self.backend  # type: ignore[assignment]
        return backend.forward_tree(request.tokens, request.start, request.tree, request.asked, request.cancelled)

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
