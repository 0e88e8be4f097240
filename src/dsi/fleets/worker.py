"""What a server does with a job: the same generator in virtual time, a thread, a process or an actor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from dsi.core.messages import (
    GREEDY,
    Draft,
    Drafted,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    TopLogprobs,
    Verified,
    Verify,
)
from dsi.core.sequence import TokenSequence
from dsi.models.protocol import (
    NEVER,
    CancelFlag,
    Cancelled,
    ForwardRequest,
    Model,
    Pollable,
    draw_or_answer,
    logprobs_or_answer,
    top_k_or_answer,
)


@dataclass
class CachedPrefix:
    """One request as a server knows it."""

    context: TokenSequence
    tokens: list[int]  # the context, spelled out
    kept: int | None = None  # how many of them have gone through the model; None: it is new here

    def turn_to(self, context: TokenSequence) -> None:
        """Keep what this text shares with the last one; read only the difference."""
        shared = self.context.shared(context)
        del self.tokens[shared:]
        self.tokens += context.since(shared)
        self.context = context
        self.kept = None if self.kept is None else min(self.kept, shared)

    def append(self, token: int) -> None:
        self.context = self.context.then(token)
        self.tokens.append(token)


@dataclass
class PrefixTable:
    """What a server has read of each request, the last one at the end; beyond `capacity` it forgets.

    Where servers fill one cache (`common`), a text counts as read as soon as one of them begins, and none has
    to be reminded of it.
    """

    capacity: int = 128
    shared_kv: bool = False
    pages: OrderedDict[TokenSequence, CachedPrefix] = field(default_factory=OrderedDict)

    def page(self, context: TokenSequence) -> CachedPrefix:
        origin = context.origin
        page = self.pages.pop(origin, None) or CachedPrefix(origin, list(origin))
        self.pages[origin] = page
        if len(self.pages) > self.capacity:
            self.pages.popitem(last=False)
        page.turn_to(context)
        return page


@dataclass
class Server:
    """A processor with a model on it; `role` is `target`, or the name of a drafter."""

    name: str
    role: str
    model: Model
    prefixes: PrefixTable = field(default_factory=PrefixTable)


def by_name(servers: Iterable[Server]) -> dict[str, Server]:
    found: dict[str, Server] = {}
    for server in servers:
        if found.setdefault(server.name, server) is not server:
            raise ValueError(f"two servers are called {server.name!r}")
    return found


def work(job: Job, server: Server, cancelled: CancelFlag = NEVER) -> Iterator[Event]:
    """The events that answer a job: between one and the next, one forward has been computed.

    Whatever goes wrong in a model fails the job, which can then go on elsewhere.
    """
    return (event for event in steps(job, server, cancelled) if event is not None)


def steps(job: Job, server: Server, cancelled: CancelFlag = NEVER) -> Iterator[Event | None]:
    """The same, with None for each look at a model that is still computing."""
    if isinstance(job, Prefill) and server.prefixes.shared_kv:
        yield Prefilled(job.id)  # whoever is next to verify reads for all
        return
    page = server.prefixes.page(job.context)
    try:
        if isinstance(job, Draft):
            yield from _stream(job, server, page, cancelled)
        else:
            yield from _once(job, server, page, cancelled)
    except Cancelled:
        raise
    except Exception as error:
        yield Failed(job.id, f"{type(error).__name__}: {error}")


# What a forward has read counts as kept only when its event has been taken: a cancelled one leaves nothing.


def _once(job: Prefill | Verify, server: Server, page: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event | None]:
    width = job.width if isinstance(job, Verify) else 0
    sampling, guesses = (job.sampling, job.guesses) if isinstance(job, Verify) else (GREEDY, ())
    request = ForwardRequest(page.tokens, len(page.tokens) + 1 - width, page.kept, sampling, cancelled, guesses)
    model = server.model
    if server.prefixes.shared_kv:
        page.kept = len(page.tokens)
    notes: tuple[TopLogprobs, ...] = ()
    if _is_polled(model):
        answer = yield from model.poll_answer(request)
    elif sampling.logprobs is None:
        answer = model.answer(request)
    else:
        answer, notes = logprobs_or_answer(model, request)
    if not (job.fits(answer) if isinstance(job, Verify) else not answer):
        raise ValueError(f"{len(answer)} tokens in answer to {width} places")
    yield Verified(job.id, answer, notes) if width else Prefilled(job.id)
    page.kept = len(page.tokens)


def _stream(job: Draft, server: Server, page: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event | None]:
    for guess in _guesses(job, server.model, page, cancelled):
        yield guess
        if guess is not None:
            page.kept = len(page.tokens)
            page.append(guess.token)


def _guesses(job: Draft, model: Model, page: CachedPrefix, cancelled: CancelFlag) -> Iterator[Drafted | None]:
    """One after the other: the page grows with each that has been taken."""
    if _is_polled(model):
        request = ForwardRequest(page.tokens, len(page.tokens), page.kept, job.sampling, cancelled)
        for token in model.poll_draft(request, job.count):
            yield None if token is None else Drafted(job.id, token)
        return
    plain = job.branches == 1 and not job.sampling.needs_guess
    for _ in range(job.count):
        request = ForwardRequest(page.tokens, len(page.tokens), page.kept, job.sampling, cancelled)
        yield Drafted(job.id, model.answer(request)[0]) if plain else _guess(job, model, request)


def _guess(job: Draft, model: Model, request: ForwardRequest) -> Drafted:
    if job.sampling.needs_guess:
        return _drawn(job, model, request)
    token, *others = top_k_or_answer(model, request, job.branches, job.min_ratio)
    return Drafted(job.id, token, others=tuple(others))


def _drawn(job: Draft, model: Model, request: ForwardRequest) -> Drafted:
    start = job.start + (request.start - job.start) // job.block * job.block
    (token, *others), odds = draw_or_answer(model, request, start)
    return Drafted(job.id, token, odds, tuple(others))


def _is_polled(model: Model) -> TypeGuard[Pollable]:
    return hasattr(model, "answering")
