"""The protocol between servers and models, and the model that samples from a backend's logits.

A request carries the whole text, and a model answers as if it were stateless; KV caches are its own concern.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from ctypes import c_int32
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from dsi.core.messages import GREEDY, DraftToken, Sampling, TopLogprobs
from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Level, Tree
from dsi.sampling.logits import (
    concatenated,
    greedy_tokens,
    greedy_top_k,
    sample_texts,
    samples_at_once,
    top_k_tokens,
    top_logprobs,
)
from dsi.sampling.noise import Array
from dsi.sampling.penalties import apply_penalties
from dsi.sampling.verify import DraftProbs, draw_guesses, verify_block

Result = TypeVar("Result")


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


class StopFlag:
    """Tells a model that generates several tokens to end after the forward in progress; kernels read it, too."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = c_int32(0)

    def set(self) -> None:
        self.number.value = 1

    def is_set(self) -> bool:
        return bool(self.number.value)


MAX_ROWS = 128  # of a forward that texts share, where the model does not say


@dataclass(slots=True)
class ForwardRequest:
    """A request for the token after tokens[:i], for each i from `start` to len(tokens).

    A `start` beyond the end only prefills the KV cache. With a tree of draft tokens after the text, it also asks
    for the token after each of the nodes `asked`, by number. With `num_children` it asks for the likeliest tokens
    after each position instead, so many of each.
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
    num_children: Sequence[int] = ()

    @property
    def num_positions(self) -> int:
        return len(self.tokens) + 1 - self.start + len(self.asked)

    @property
    def positions(self) -> list[int]:
        """Those of the tokens asked for, in the text."""
        end = len(self.tokens)
        return [*range(self.start, end + 1), *(end + len(tree_path(self.tree, node)) for node in self.asked)]

    def texts(self) -> Iterator[ForwardRequest]:
        """What is asked as requests without a tree, one for each node after the first: the same answers, slower."""
        plain = replace(self, tree=(), asked=(), num_new_nodes=0, num_children=())
        if self.start <= len(self.tokens):
            yield plain
        for node in self.asked:
            text = [*self.tokens, *tree_path(self.tree, node)]
            cached = None if self.num_cached is None else min(self.num_cached, len(text) - 1)
            yield replace(plain, tokens=text, start=len(text), num_cached=cached)


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


def generate_or_answer(model: Model, request: ForwardRequest, count: int) -> Tokens:
    """The token after a text and up to `count - 1` after it, from a model that can `generate` them in one call."""
    generate: Callable[[ForwardRequest, int], Tokens] | None = getattr(model, "generate", None)  # fast
    return model.answer(request) if generate is None or count < 2 else generate(request, count)


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


class Answer(NamedTuple):
    """What a model says about each position: a token, log-probabilities where asked for, or its likeliest tokens."""

    tokens: Tokens = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    children: tuple[Tokens, ...] = ()


@runtime_checkable
class SupportsPacking(Model, Protocol):
    """A model that can compute several texts, and trees after them, in one forward."""

    @property
    def can_pack(self) -> bool: ...

    @property
    def forwards_at_once(self) -> int:
        """How many such forwards it can compute at once, each in a thread of its own."""
        ...

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        """Answer requests about different texts in one forward, one of so many that share the cores.

        None of several is cancelled meanwhile. Only a model that `computes_trees` is asked about trees.
        """
        ...


def generate_packed(
    model: SupportsPacking, requests: Sequence[ForwardRequest], counts: Sequence[int], at_once: int, stop: StopFlag
) -> list[Answer]:
    """Generate so many tokens of each text, from one forward after the other; fewer, but one, where it is to stop."""
    generate: Callable[..., list[Tokens] | None] | None = getattr(model, "generate_packed", None)
    if generate is not None and (generated := generate(requests, counts, at_once, stop)) is not None:
        return list(map(Answer, generated))
    texts = [list(request.tokens) for request in requests]
    lengths, left = list(map(len, texts)), dict(enumerate(requests))
    while left and not (len(texts[0]) > lengths[0] and stop.is_set()):
        for i, answer in zip(list(left), model.answer_packed(list(left.values()), at_once)):
            num_cached = len(texts[i])
            texts[i] += answer.tokens
            left[i] = replace(left[i], tokens=texts[i], start=num_cached + 1, num_cached=num_cached)
        left = {i: request for i, request in left.items() if len(texts[i]) < lengths[i] + counts[i]}
    return [Answer(tuple(text[length:])) for text, length in zip(texts, lengths)]


@runtime_checkable
class PollsPacked(SupportsPacking, Protocol):
    """One that may compute asynchronously, for example on a GPU, and is polled."""

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        """As `answer_packed`, but yield while the answers are being computed."""
        ...


@runtime_checkable
class PollsGenerated(PollsPacked, Protocol):
    """One that can generate several tokens of each text ahead of the host."""

    def poll_generated(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], stop: StopFlag
    ) -> Generator[list[Answer] | None, None, bool]: ...


class LaunchedGrowth(Protocol):
    """A draft tree of which a device has been given all levels: the shape that it is going to have."""

    @property
    def tree(self) -> Tree:
        """By number; a token that is not drafted yet is a negative number, each another."""
        ...


@runtime_checkable
class FollowsDrafts(PollsPacked, Protocol):
    """One that can compute the forward over a draft tree which is still being drafted on its device."""

    def can_follow(self, request: ForwardRequest, launched: LaunchedGrowth) -> bool: ...

    def poll_following(
        self, request: ForwardRequest, launched: LaunchedGrowth, grown: Callable[[], Tree | None]
    ) -> Generator[None, None, Answer]:
        """Answer this request, and after it about every node of that tree: yield until that is there.

        `grown` returns the tree as it turned out, None before.
        """
        ...


@runtime_checkable
class GrowsTrees(PollsPacked, Protocol):
    """One that can compute several levels of a growing tree without waiting for the tokens of each."""

    def can_grow(self, request: ForwardRequest, levels: Sequence[Level]) -> bool: ...

    def poll_levels(self, request: ForwardRequest, levels: Sequence[Level]) -> Iterator[Answer | None]:
        """Answer a request for children, then the same for the nodes of each level after it.

        They are numbered behind those of the request's tree, in the order in which they are asked for. Yields None
        while an answer is being computed.
        """
        ...


def computes_trees(model: Model) -> bool:
    """Whether a model computes a tree of draft tokens in one forward."""
    return bool(getattr(model, "computes_trees", False))


def tree_answer(model: Model, request: ForwardRequest) -> Answer:
    """Without `answer_tree`, answer text by text."""
    answer_tree: Callable[[ForwardRequest], Answer] | None = getattr(model, "answer_tree", None)  # fast
    return answer_text_by_text(model, request) if answer_tree is None else answer_tree(request)


def answer_text_by_text(model: Model, request: ForwardRequest) -> Answer:
    """Answer about each node of a tree as about a text of its own."""
    if request.num_children:
        return Answer(
            children=tuple(
                top_k_or_answer(model, text, count) for text, count in zip(request.texts(), request.num_children)
            )
        )
    if request.sampling.logprobs is None:
        return Answer(tuple(token for text in request.texts() for token in model.answer(text)))
    return joined_answers([Answer(*logprobs_or_answer(model, text)) for text in request.texts()])


def joined_answers(answers: Sequence[Answer]) -> Answer:
    """The answers about the texts of one request as one."""
    return Answer(*(sum(parts, ()) for parts in zip(*answers))) if answers else Answer()


@runtime_checkable
class Pollable(Model, Protocol):
    """A model that computes asynchronously, for example on a GPU, and is polled."""

    def poll_answer(self, request: ForwardRequest) -> Generator[None, None, Tokens]:
        """As `answer`, but yield while the answer is being computed."""
        ...

    def poll_draft(self, request: ForwardRequest, count: int) -> Iterator[int | None]:
        """Generate `count` tokens autoregressively, yielding each, and None while one is being computed."""
        ...


def run_to_end(steps: Generator[None, None, Result]) -> Result:
    """What a generator that is polled returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def picked_answer(request: ForwardRequest, picked: Array) -> Answer:
    """The answer by the likeliest tokens after each position, the likeliest first."""
    if request.num_children:
        return Answer(children=tuple(tuple(row[:count]) for row, count in zip(picked.tolist(), request.num_children)))
    return Answer(tuple(picked[:, 0].tolist()))


class Backend(Protocol):
    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Array:
        """Return one row of logits after tokens[:i] for each i from `start` to len(tokens)."""
        ...


class PackingBackend(Backend, Protocol):
    def forward_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Array]:
        """As `forward` for each request, then rows after the nodes asked of its tree: one forward for all.

        It is one of so many that run at once, if the backend can.
        """
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

    def generate(self, request: ForwardRequest, count: int) -> Tokens:
        """So many tokens, if they are the likeliest and the backend can generate them in one call; or one."""
        generate = getattr(self.backend, "generate", None)
        if generate is None or not self._is_plain(request.sampling):
            return self.answer(request)
        return tuple(generate(request.tokens, count, request.cancelled))

    def answer_with_logprobs(self, request: ForwardRequest) -> tuple[Tokens, tuple[TopLogprobs, ...]]:
        return self._with_logprobs(request, self._forward(request))[:2]

    @property
    def can_pack(self) -> bool:
        return bool(getattr(self.backend, "can_pack", hasattr(self.backend, "forward_packed")))

    @property
    def forwards_at_once(self) -> int:
        return int(getattr(self.backend, "forwards_at_once", 1))

    @property
    def forwards_in_flight(self) -> int:
        """How many shared forwards over different texts may be polled at a time."""
        return int(getattr(self.backend, "forwards_in_flight", 1))

    @property
    def max_rows(self) -> int:
        """The new tokens and nodes of a shared forward at most."""
        return int(getattr(self.backend, "max_rows", MAX_ROWS))

    def num_cached(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text the backend has in its KV caches, of this text or another; 0 if it does not say."""
        find = getattr(self.backend, "num_cached", None)
        return 0 if find is None else int(find(tokens))

    def answer_packed(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> list[Answer]:
        if self._are_picked(requests):
            return run_to_end(self._poll_picked(requests, at_once))
        return self._answers(requests, self._packed_logits(requests, at_once))

    def generate_packed(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], at_once: int, stop: StopFlag
    ) -> list[Tokens] | None:
        """So many tokens of each text, if they are the likeliest and the backend can generate them in one call."""
        generate = getattr(self.backend, "generate_packed", None)
        if generate is None or not self._are_picked(requests):
            return None
        generated: list[Tokens] | None = generate(requests, counts, at_once, stop)
        return generated

    def poll_generated(
        self, requests: Sequence[ForwardRequest], counts: Sequence[int], stop: StopFlag, teacher: Model | None = None
    ) -> Generator[list[Answer] | None, None, bool]:
        """Generate so many tokens of each text, if they are the likeliest and a device can do so ahead of the host.

        Yield the next ones of each text when they are there, None while they are computed. Return whether it did.
        """
        poll = getattr(self.backend, "poll_generated", None)
        if poll is None or not self._are_picked(requests):
            return False
        steps = poll(requests, counts, stop, teacher and teacher.answer)
        while True:
            try:
                tokens = next(steps)
            except StopIteration as end:
                return bool(end.value)
            yield None if tokens is None else list(map(Answer, tokens))

    def poll_packed(self, requests: Sequence[ForwardRequest]) -> Generator[None, None, list[Answer]]:
        """As `answer_packed`, but yield while a backend that computes asynchronously does so.

        Where it picks the likeliest tokens itself, and they are the answers, no logits are read.
        """
        if self._are_picked(requests):
            return (yield from self._poll_picked(requests))
        poll = getattr(self.backend, "poll_forward_packed", None)
        logits = self._packed_logits(requests) if poll is None else (yield from poll(requests))
        return self._answers(requests, logits)

    def _poll_picked(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> Generator[None, None, list[Answer]]:
        poll, backend = getattr(self.backend, "poll_picked", None), self.backend
        picked = backend.pick_packed(requests, at_once) if poll is None else (yield from poll(requests))  # type: ignore[attr-defined]
        return list(map(picked_answer, requests, picked))

    def _are_picked(self, requests: Sequence[ForwardRequest]) -> bool:
        """Whether the backend can pick all answers."""
        most = getattr(self.backend, "max_picked", 0)
        return most > 0 and all(
            self._is_plain(request.sampling) and max(request.num_children, default=0) <= most for request in requests
        )

    def can_grow(self, request: ForwardRequest, levels: Sequence[Level]) -> bool:
        can_grow = getattr(self.backend, "can_grow", None)
        return can_grow is not None and self._is_plain(request.sampling) and can_grow(request, levels)

    @property
    def launched(self) -> LaunchedGrowth | None:
        return getattr(self.backend, "launched", None)

    def can_follow(self, request: ForwardRequest, launched: LaunchedGrowth) -> bool:
        can_follow = getattr(self.backend, "can_follow", None)
        return can_follow is not None and self._are_picked([request]) and can_follow(request, launched)

    def poll_following(
        self, request: ForwardRequest, launched: LaunchedGrowth, grown: Callable[[], Tree | None]
    ) -> Generator[None, None, Answer]:
        picked = yield from self.backend.poll_following(request, launched, grown)  # type: ignore[attr-defined]
        return picked_answer(request, picked)

    def poll_levels(self, request: ForwardRequest, levels: Sequence[Level]) -> Iterator[Answer | None]:
        for children in self.backend.poll_levels(request, levels):  # type: ignore[attr-defined]
            yield None if children is None else Answer(children=children)

    def _answers(self, requests: Sequence[ForwardRequest], logits: Sequence[Array]) -> list[Answer]:
        answers = self._greedy_answers(requests, logits) | self._sampled_answers(requests, logits)
        return [
            answers[i] if i in answers else self._answer_rows(request, rows)
            for i, (request, rows) in enumerate(zip(requests, logits))
        ]

    def answer_tree(self, request: ForwardRequest) -> Answer:
        [answer] = self.answer_packed([request])
        return answer

    @property
    def computes_trees(self) -> bool:
        """Whether a tree takes one forward."""
        return getattr(self.backend, "supports_trees", hasattr(self.backend, "forward_packed"))

    def _packed_logits(self, requests: Sequence[ForwardRequest], at_once: int = 1) -> Sequence[Array]:
        """The rows of each request: of all in one forward, where the backend can."""
        if self.can_pack or self.computes_trees:
            backend: PackingBackend = self.backend  # type: ignore[assignment]
            return backend.forward_packed(requests, at_once)
        return [concatenated([self._forward(text) for text in request.texts()]) for request in requests]

    def _greedy_answers(self, requests: Sequence[ForwardRequest], logits: Sequence[Array]) -> dict[int, Answer]:
        """By number, the answers that are the likeliest tokens: of all requests at once, which is faster."""
        plain = [i for i, request in enumerate(requests) if request.num_positions and self._is_plain(request.sampling)]
        drafts = [i for i in plain if requests[i].num_children]
        others = [i for i in plain if not requests[i].num_children]
        best = iter(greedy_tokens([logits[i] for i in others]))
        answers = {i: Answer(tuple(islice(best, requests[i].num_positions))) for i in others}
        if drafts:
            counts = [count for i in drafts for count in requests[i].num_children]
            children = iter(greedy_top_k([logits[i] for i in drafts], counts))
            answers |= {i: Answer(children=tuple(islice(children, requests[i].num_positions))) for i in drafts}
        return answers

    def _sampled_answers(self, requests: Sequence[ForwardRequest], logits: Sequence[Array]) -> dict[int, Answer]:
        """By number, the answers that are sampled together, on devices."""
        together = [
            i
            for i, request in enumerate(requests)
            if request.num_positions and not request.num_children and self._is_matched(request.sampling, logits[i])
        ]
        asked = [requests[i] for i in together]
        positions = [request.positions for request in asked]
        sample = getattr(self.backend, "sample_texts", sample_texts)
        tokens = sample([logits[i] for i in together], [request.sampling for request in asked], positions)
        return dict(zip(together, map(Answer, tokens)))

    def _is_matched(self, sampling: Sampling, logits: Array) -> bool:
        """Whether the answer is a sample under the rule `match` that can be drawn with others'."""
        special = self.process is not None or sampling.has_penalties or sampling.logprobs is not None
        return sampling.rule == "match" and not special and samples_at_once(logits, sampling)

    def _is_plain(self, sampling: Sampling) -> bool:
        """Whether the likeliest token is the answer."""
        special = self.process is not None or sampling.has_penalties or sampling.logprobs is not None
        return sampling.temperature == 0 and not special

    def _answer_rows(self, request: ForwardRequest, logits: Array) -> Answer:
        """The answer by rows of logits: those of the text, then one for each node asked about."""
        texts = list(request.texts())
        ends = accumulate(text.num_positions for text in texts)
        rows = [logits[end - text.num_positions : end] for text, end in zip(texts, ends)]
        if request.num_children:
            return Answer(children=tuple(map(self._top_k, texts, rows, request.num_children)))
        if request.sampling.logprobs is not None:
            return joined_answers(list(map(self._with_logprobs, texts, rows)))
        tokens = (self._verify(text, self._processed(text, row)) for text, row in zip(texts, rows))
        return Answer(tuple(token for each in tokens for token in each))

    def _with_logprobs(self, request: ForwardRequest, logits: Array) -> Answer:
        tokens = self._verify(request, self._processed(request, logits))
        guesses = request.guesses or ((),) * len(tokens)
        required = [(token, *(guess for guess, _ in position)) for token, position in zip(tokens, guesses)]
        return Answer(tokens, top_logprobs(logits, request.sampling.logprobs or 0, required))

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        return self._top_k(request, self._forward(request), count)

    def _top_k(self, request: ForwardRequest, logits: Array, count: int) -> Tokens:
        [row] = self._processed(request, logits)
        return top_k_tokens(row, request.sampling, request.start, count)

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
