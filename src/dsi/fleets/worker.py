"""What a worker runs: one generator that turns a job into forwards and events, under every kind of fleet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from dsi.core.messages import (
    GREEDY,
    TARGET,
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
    """The tokens of one request that a server has seen, and how many of them its model has computed."""

    context: TokenSequence
    tokens: list[int]  # of the context
    num_cached: int | None = None  # tokens in the KV cache; None: the request is new to this server

    def switch_to(self, context: TokenSequence) -> None:
        """Keep the prefix shared with the last context; only the difference is left to compute."""
        shared = self.context.common_prefix(context)
        del self.tokens[shared:]
        self.tokens += context.since(shared)
        self.context = context
        self.num_cached = None if self.num_cached is None else min(self.num_cached, shared)

    def append(self, token: int) -> None:
        self.context = self.context.then(token)
        self.tokens.append(token)


@dataclass
class PrefixTable:
    """The cached prefix of each request on one server; evicts the least recently used beyond `capacity`.

    With `shared_kv` several servers fill one KV cache: a text counts as cached as soon as one of them starts on
    it, and none of them needs a prefill.
    """

    capacity: int = 128
    shared_kv: bool = False
    entries: OrderedDict[TokenSequence, CachedPrefix] = field(default_factory=OrderedDict)

    def lookup(self, context: TokenSequence) -> CachedPrefix:
        """Return the request's cached prefix, switched to this context."""
        origin = context.origin
        prefix = self.entries.pop(origin, None) or CachedPrefix(origin, list(origin))
        self.entries[origin] = prefix
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
        prefix.switch_to(context)
        return prefix


@dataclass
class Server:
    """A processor with a model on it; `role` is `target`, or the name of a drafter."""

    name: str
    role: str
    model: Model
    prefixes: PrefixTable = field(default_factory=PrefixTable)


def make_servers(targets: Iterable[Model], drafters: Mapping[str, Model], shared_kv: bool = False) -> list[Server]:
    """Create target-1, target-2, ..., then the drafters by their names."""
    servers = [
        Server(f"{TARGET}-{i}", TARGET, model, PrefixTable(shared_kv=shared_kv)) for i, model in enumerate(targets, 1)
    ]
    return servers + [Server(name, name, model) for name, model in drafters.items()]


def by_name(servers: Iterable[Server]) -> dict[str, Server]:
    """Index servers by name; two of one name are an error."""
    named: dict[str, Server] = {}
    for server in servers:
        if named.setdefault(server.name, server) is not server:
            raise ValueError(f"two servers are called {server.name!r}")
    return named


def work(job: Job, server: Server, cancelled: CancelFlag = NEVER) -> Iterator[Event]:
    """Yield the events that answer a job, computing one forward for each.

    An exception in a model fails the job, which can then run elsewhere.
    """
    return (event for event in poll_work(job, server, cancelled) if event is not None)


def poll_work(job: Job, server: Server, cancelled: CancelFlag = NEVER) -> Iterator[Event | None]:
    """Yield the same events, and None for each poll of a model that is still computing."""
    if isinstance(job, Prefill) and server.prefixes.shared_kv:
        yield Prefilled(job.id)  # the next verification prefills for all
        return
    prefix = server.prefixes.lookup(job.context)
    try:
        if isinstance(job, Draft):
            yield from _draft(job, server.model, prefix, cancelled)
        else:
            yield from _one_forward(job, server, prefix, cancelled)
    except Cancelled:
        raise
    except Exception as error:
        yield Failed(job.id, f"{type(error).__name__}: {error}")


# Tokens count as cached only once the event of their forward was taken: a cancelled forward leaves nothing.


def _one_forward(
    job: Prefill | Verify, server: Server, prefix: CachedPrefix, cancelled: CancelFlag
) -> Iterator[Event | None]:
    width = job.width if isinstance(job, Verify) else 0
    sampling, guesses = (job.sampling, job.draft_tokens) if isinstance(job, Verify) else (GREEDY, ())
    start = len(prefix.tokens) + 1 - width
    request = ForwardRequest(prefix.tokens, start, prefix.num_cached, sampling, cancelled, guesses)
    model = server.model
    if server.prefixes.shared_kv:
        prefix.num_cached = len(prefix.tokens)
    top_logprobs: tuple[TopLogprobs, ...] = ()
    if _is_polled(model):
        tokens = yield from model.poll_answer(request)
    elif sampling.logprobs is None:
        tokens = model.answer(request)
    else:
        tokens, top_logprobs = logprobs_or_answer(model, request)
    if not (job.fits(tokens) if isinstance(job, Verify) else not tokens):
        raise ValueError(f"{len(tokens)} tokens in answer to {width} positions")
    yield Verified(job.id, tokens, top_logprobs) if width else Prefilled(job.id)
    prefix.num_cached = len(prefix.tokens)


def _draft(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event | None]:
    for drafted in _draft_tokens(job, model, prefix, cancelled):
        yield drafted
        if drafted is not None:
            prefix.num_cached = len(prefix.tokens)
            prefix.append(drafted.token)


def _draft_tokens(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Drafted | None]:
    """Draft token by token; the caller appends each to the prefix before it takes the next."""
    if _is_polled(model):
        request = ForwardRequest(prefix.tokens, len(prefix.tokens), prefix.num_cached, job.sampling, cancelled)
        for token in model.poll_draft(request, job.count):
            yield None if token is None else Drafted(job.id, token)
        return
    plain = job.branches == 1 and not job.sampling.needs_draft
    for _ in range(job.count):
        request = ForwardRequest(prefix.tokens, len(prefix.tokens), prefix.num_cached, job.sampling, cancelled)
        yield Drafted(job.id, model.answer(request)[0]) if plain else _draft_token(job, model, request)


def _draft_token(job: Draft, model: Model, request: ForwardRequest) -> Drafted:
    """Draft one token with its runners-up, or with the probabilities that the acceptance rule needs."""
    if job.sampling.needs_draft:
        start = job.block_start + (request.start - job.block_start) // job.block_size * job.block_size
        (token, *others), draft_probs = draw_or_answer(model, request, start)
        return Drafted(job.id, token, draft_probs, tuple(others))
    token, *others = top_k_or_answer(model, request, job.branches, job.min_ratio)
    return Drafted(job.id, token, alternates=tuple(others))


def _is_polled(model: Model) -> TypeGuard[Pollable]:
    return hasattr(model, "poll_answer")
