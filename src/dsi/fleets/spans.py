"""Spans: which server computed which forward when, for timelines and sums."""

from __future__ import annotations

from dataclasses import dataclass

from dsi.core.messages import Draft, Drafted, Event, Job, Prefill, Time, Verify
from dsi.core.sequence import TokenSequence
from dsi.core.tree_shape import END


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
    token: int | None = None  # of a draft
    stale: bool = False  # cancelled before it ended
    texts: tuple[TokenSequence, ...] = ()  # of a tree's verification: those after which it predicts
    num_texts: int = 1  # that it computed new tokens of, of as many requests


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
    kind, texts = KINDS[type(job)], _tree_texts(job)
    return Span(server, role, kind, job.id, context, width, start, end, token, event is None, texts, num_texts)


def _tree_texts(job: Job) -> tuple[TokenSequence, ...]:
    if not isinstance(job, Verify) or not job.tree:
        return ()
    texts: list[TokenSequence] = []
    for parent, token in job.tree:
        texts.append((job.context if parent == END else texts[parent]).then(token))
    return (*([job.context] if job.width else []), *(texts[node] for node in job.asked))
