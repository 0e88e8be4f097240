"""What a worker runs: one generator that turns a job into forwards and events, under every kind of fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from dsi.core.messages import (
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
from dsi.fleets.job_requests import TreeGrowth, draft_request, verify_request
from dsi.fleets.servers import CachedPrefix, Server
from dsi.models.protocol import (
    NEVER,
    CancelFlag,
    Cancelled,
    ForwardRequest,
    Model,
    Pollable,
    draw_or_answer,
    generate_or_answer,
    logprobs_or_answer,
    tree_answer,
)


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
        if isinstance(job, Draft) and job.expansions:
            yield from _draft_tree(job, server.model, prefix, cancelled)
        elif isinstance(job, Draft):
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
    request, model = verify_request(job, prefix, cancelled), server.model
    if server.prefixes.shared_kv:
        prefix.num_cached = len(prefix.tokens)
    top_logprobs: tuple[TopLogprobs, ...] = ()
    if request.tree:
        tokens, top_logprobs, _ = tree_answer(model, request)
    elif _is_polled(model):
        tokens = yield from model.poll_answer(request)
    elif request.sampling.logprobs is None:
        tokens = model.answer(request)
    else:
        tokens, top_logprobs = logprobs_or_answer(model, request)
    if not (job.fits(tokens) if isinstance(job, Verify) else not tokens):
        raise ValueError(f"{len(tokens)} tokens in answer to {request.num_positions} positions")
    yield Verified(job.id, tokens, top_logprobs) if isinstance(job, Verify) else Prefilled(job.id)
    prefix.num_cached = len(prefix.tokens)
    if isinstance(job, Verify):
        prefix.add_tree(job.tree)


def _draft(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event | None]:
    for drafted in _draft_tokens(job, model, prefix, cancelled):
        yield drafted
        if drafted is not None:
            prefix.num_cached = len(prefix.tokens)
            prefix.append(drafted.token)


def _draft_tokens(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Drafted | None]:
    """Draft token by token; the caller appends each to the prefix before it takes the next."""
    if _is_polled(model):
        for token in model.poll_draft(draft_request(job, prefix, cancelled), job.count):
            yield None if token is None else Drafted(job.id, token)
        return
    missing = job.count
    in_one_call = job.alone and cancelled is NEVER  # or a server would be silent for long, and some are waited for
    while missing:
        request, at_once = draft_request(job, prefix, cancelled), missing if in_one_call else 1
        if job.sampling.needs_draft:
            drafted = [_draft_token(job, model, request)]
        else:
            drafted = [Drafted(job.id, token) for token in generate_or_answer(model, request, at_once)]
        yield from drafted
        missing -= len(drafted)


def _draft_tree(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event]:
    """Draft level by level, a forward for each."""
    growth = TreeGrowth(job)
    while not growth.done:
        request = growth.request(prefix, cancelled)
        children = tree_answer(model, request).children if request.num_positions else ()
        if request.num_positions:
            prefix.add_tree(request.tree)
            prefix.num_cached = len(prefix.tokens)
        yield growth.add(children)


def _draft_token(job: Draft, model: Model, request: ForwardRequest) -> Drafted:
    """Draft one token, with the probabilities and alternates that the acceptance rule needs."""
    start = job.block_start + (request.start - job.block_start) // job.block_size * job.block_size
    (token, *others), draft_probs = draw_or_answer(model, request, start)
    return Drafted(job.id, token, draft_probs, tuple(others))


def _is_polled(model: Model) -> TypeGuard[Pollable]:
    return hasattr(model, "poll_answer")
