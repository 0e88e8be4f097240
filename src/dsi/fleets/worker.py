"""What a worker runs: one generator that turns a job into forwards and events, under every kind of fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

from dsi.core.messages import (
    GREEDY,
    Draft,
    Drafted,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    TopLogprobs,
    Verified,
    Verify,
)
from dsi.core.sequence import Tokens
from dsi.core.tree_shape import END, Tree, by_level, with_ancestors
from dsi.fleets.servers import CachedPrefix, Server
from dsi.models.protocol import (
    NEVER,
    CancelFlag,
    Cancelled,
    ForwardRequest,
    Model,
    Pollable,
    draw_or_answer,
    logprobs_or_answer,
    tree_answer,
    tree_children,
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
    width = job.width if isinstance(job, Verify) else 0
    sampling, guesses = (job.sampling, job.draft_tokens) if isinstance(job, Verify) else (GREEDY, ())
    start = len(prefix.tokens) + 1 - width
    prompt_length = len(job.context.origin)
    request = ForwardRequest(prefix.tokens, start, prefix.num_cached, sampling, cancelled, guesses, prompt_length)
    model = server.model
    if isinstance(job, Verify) and job.tree:
        request = replace(request, tree=job.tree, asked=job.asked, num_new_nodes=prefix.num_new_nodes(job.tree))
    if server.prefixes.shared_kv:
        prefix.num_cached = len(prefix.tokens)
    top_logprobs: tuple[TopLogprobs, ...] = ()
    if request.tree:
        tokens, top_logprobs = tree_answer(model, request)
    elif _is_polled(model):
        tokens = yield from model.poll_answer(request)
    elif sampling.logprobs is None:
        tokens = model.answer(request)
    else:
        tokens, top_logprobs = logprobs_or_answer(model, request)
    if not (job.fits(tokens) if isinstance(job, Verify) else not tokens):
        raise ValueError(f"{len(tokens)} tokens in answer to {width} positions")
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
        request = ForwardRequest(prefix.tokens, len(prefix.tokens), prefix.num_cached, job.sampling, cancelled)
        for token in model.poll_draft(request, job.count):
            yield None if token is None else Drafted(job.id, token)
        return
    prompt_length = len(job.context.origin)
    for _ in range(job.count):
        at, num_cached = len(prefix.tokens), prefix.num_cached
        request = ForwardRequest(prefix.tokens, at, num_cached, job.sampling, cancelled, prompt_length=prompt_length)
        yield _draft_token(job, model, request)


def _draft_tree(job: Draft, model: Model, prefix: CachedPrefix, cancelled: CancelFlag) -> Iterator[Event]:
    """Draft level by level, a forward for each."""
    tree: list[tuple[int, int]] = list(job.tree)
    indices: list[int | None] = list(range(len(tree)))  # in `tree`, by number in the job; None: no such choice
    for forward, level in enumerate(by_level(job.expansions, len(tree))):
        parents = [END if number == END else indices[number] for number, _ in level]
        wanted = [(parent, count) for parent, (_, count) in zip(parents, level) if parent is not None]
        answers = iter(_children(job, model, prefix, cancelled, tree, wanted) if wanted else ())
        children = [() if parent is None else next(answers) for parent in parents]
        yield DraftedLevel(job.id, tuple(children), forward)
        for parent, tokens, (_, count) in zip(parents, children, level):
            indices += [*range(len(tree), len(tree) + len(tokens)), *[None] * (count - len(tokens))]
            tree += [(END if parent is None else parent, token) for token in tokens]


def _children(
    job: Draft,
    model: Model,
    prefix: CachedPrefix,
    cancelled: CancelFlag,
    tree: Sequence[tuple[int, int]],
    wanted: Sequence[tuple[int, int]],
) -> list[Tokens]:
    """The likeliest tokens after these nodes, so many after each, in one forward."""
    needed, asked = subtree(tree, [node for node, _ in wanted if node != END])
    start = len(prefix.tokens) + (wanted[0][0] != END)
    request = ForwardRequest(
        prefix.tokens,
        start,
        prefix.num_cached,
        job.sampling,
        cancelled,
        prompt_length=len(job.context.origin),
        tree=needed,
        asked=asked,
        num_new_nodes=prefix.num_new_nodes(needed),
    )
    answers = tree_children(model, request, [count for _, count in wanted])
    prefix.add_tree(needed)
    prefix.num_cached = len(prefix.tokens)
    return [tokens[:count] for tokens, (_, count) in zip(answers, wanted)]


def subtree(tree: Sequence[tuple[int, int]], nodes: Sequence[int]) -> tuple[Tree, list[int]]:
    """The part of a tree that ends in these nodes, and their indices in it."""
    needed = with_ancestors(tree, nodes)
    index = {node: i for i, node in enumerate(needed)} | {END: END}
    return tuple((index[tree[node][0]], tree[node][1]) for node in needed), [index[node] for node in nodes]


def _draft_token(job: Draft, model: Model, request: ForwardRequest) -> Drafted:
    """Draft one token, with the probabilities and alternates that the acceptance rule needs."""
    if not job.sampling.needs_draft:
        return Drafted(job.id, model.answer(request)[0])
    start = job.block_start + (request.start - job.block_start) // job.block_size * job.block_size
    (token, *others), draft_probs = draw_or_answer(model, request, start)
    return Drafted(job.id, token, draft_probs, tuple(others))


def _is_polled(model: Model) -> TypeGuard[Pollable]:
    return hasattr(model, "poll_answer")
