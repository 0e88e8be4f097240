"""Spans: which server computed which forward when, for timelines and sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsi.core.messages import Draft, Drafted, DraftedBlock, DraftedLevel, Event, Job, Prefill, Time, Verify, goes_on
from dsi.core.sequence import TokenSequence
from dsi.core.tree_shape import END, Tree, by_level


@dataclass(frozen=True, slots=True)
class Span:
    """One forward on one server."""

    server: str
    role: str
    kind: str  # draft, verify or warm
    job: int
    context: TokenSequence  # its input
    width: int  # positions that it predicts
    start: Time
    end: Time
    token: int | None = None  # of a draft, the first
    stale: bool = False  # cancelled before it ended
    texts: tuple[TokenSequence, ...] = ()  # of a tree's verification: those after which it predicts
    num_texts: int = 1  # that it computed new tokens of, of as many requests
    level: tuple[Draft, DraftedLevel] | None = None  # of a tree's draft: the job, and the level that it drafted


KINDS = {Draft: "draft", Verify: "verify", Prefill: "warm"}  # the names in traces, which the page reads


def span(
    server: str,
    role: str,
    job: Job,
    context: TokenSequence,
    start: Time,
    end: Time,
    event: Event | None,
    num_texts: int = 1,
) -> Span:
    """Make the span of a forward that ended in `event`, or was cancelled."""
    width = job.num_positions if isinstance(job, Verify) else int(isinstance(job, Draft))
    token = event.token if isinstance(event, Drafted) else None
    if isinstance(event, DraftedBlock):  # of forwards that follow one another
        width, token = len(event.tokens), event.tokens[0]
        for drafted in event.tokens[:-1]:
            context = context.then(drafted)
    kind, texts = KINDS[type(job)], _tree_texts(job)
    if goes_on(job):
        kind = KINDS[Verify]
    level = (job, event) if isinstance(job, Draft) and isinstance(event, DraftedLevel) else None
    return Span(server, role, kind, job.id, context, width, start, end, token, event is None, texts, num_texts, level)


def _tree_texts(job: Job) -> tuple[TokenSequence, ...]:
    if not isinstance(job, Verify) or not job.tree:
        return ()
    texts = _node_texts(job.context, job.tree)
    return (*([job.context] if job.width else []), *(texts[node] for node in job.asked))


def _node_texts(context: TokenSequence, tree: Tree) -> list[TokenSequence]:
    """The text up to each node of a tree."""
    texts: list[TokenSequence] = []
    for parent, token in tree:
        texts.append((context if parent == END else texts[parent]).then(token))
    return texts


def drafted_texts(job: Draft, levels: Mapping[int, DraftedLevel]) -> dict[int, list[TokenSequence]]:
    """The texts that end in a new node of a tree's draft, by level, up to the first level that is missing."""
    texts: list[TokenSequence | None] = [*_node_texts(job.context, job.tree)]  # None: the drafter had no such choice
    drafted: dict[int, list[TokenSequence]] = {}
    for number, expansions in enumerate(by_level(job.expansions, len(job.tree))):
        if number not in levels:
            break
        drafted[number] = []
        for (node, count), tokens in zip(expansions, levels[number].children):
            parent = job.context if node == END else texts[node]
            children = [] if parent is None else [parent.then(token) for token in tokens[:count]]
            texts += [*children, *[None] * (count - len(children))]
            drafted[number] += children
    return drafted
