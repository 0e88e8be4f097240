"""Record each forward of each server in a run, and its outcome, for the plots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from dsi.core.messages import Draft, DraftedLevel
from dsi.core.request import Completion
from dsi.core.sequence import TokenSequence
from dsi.fleets.spans import Span, drafted_texts
from dsi.planning.simulation import TITLES, SimulationConfig

KINDS = ("draft", "verify", "warm")  # of spans that are forwards


@dataclass(frozen=True)
class Block:
    """One forward: its outcome is verified or stale, accepted or rejected, or prefilled."""

    server: str
    role: str
    kind: str  # one of KINDS
    outcome: str
    start_ms: float
    end_ms: float
    place: int  # generated tokens before the first position that the forward verifies or drafts
    width: int
    num_texts: int = 1  # of requests that shared it


@dataclass(frozen=True)
class Instant:
    """A decision or a rejection, at one moment of a run."""

    kind: str  # decision or rejection
    at_ms: float
    title: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One request on one fleet."""

    algorithm: str
    label: str
    servers: tuple[str, ...]
    blocks: tuple[Block, ...]
    times_ms: tuple[float, ...]  # when each token was verified
    instants: tuple[Instant, ...] = ()
    overlap: dict[str, Any] = field(default_factory=dict)  # statistics of the overlap, if there are any

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    @property
    def active_servers(self) -> list[str]:
        """The servers that computed at least one forward."""
        active = {block.server for block in self.blocks}
        return [name for name in self.servers if name in active]

    @property
    def total_ms(self) -> float:
        return self.times_ms[-1]


def record(simulation: SimulationConfig, algorithm: str, seed: int = 0, real_time: bool = False) -> Record:
    """Run one request and record what each server did."""
    run = simulation.run(algorithm, seed, real_time)
    label = "waited" if real_time else "simulated"
    return recorded(algorithm, label, tuple(run.busy), run.log, run.completion, run.unit)


def recorded(
    algorithm: str, label: str, servers: tuple[str, ...], spans: Iterable[Span], done: Completion, unit: int
) -> Record:
    """Record a finished request of any fleet, whose clock counts units of `unit` milliseconds."""
    forwards = tuple(blocks(spans, done, unit))
    times = tuple(float(time) * unit for time in done.times)
    return Record(algorithm, label, servers, forwards, times, instants(done, unit), overlap(done, forwards, unit))


def overlap(done: Completion, forwards: Iterable[Block], unit: int) -> dict[str, Any]:
    """Return the statistics of the overlap, with the share of the forwards' time that was hidden."""
    if done.overlap is None:
        return {}
    share = hidden(block for block in forwards if block.kind == "verify")
    return {**done.overlap.json(unit), "hidden_time_share": share}


def instants(done: Completion, unit: int = 1) -> tuple[Instant, ...]:
    """Return the decisions, and the rejections with what each of them cost."""
    decisions = [
        Instant("decision", float(at) * unit, str(decision.spec), decision.json()) for at, decision in done.decisions
    ]
    rejections = [
        Instant(
            "rejection",
            float(loss.at) * unit,
            f"rejection, {float(loss.lost) * unit:.1f} ms lost",
            {"token": loss.token, "lost_ms": float(loss.lost) * unit},
        )
        for loss in (done.overlap.losses if done.overlap else ())
    ]
    return tuple(sorted(decisions + rejections, key=lambda instant: instant.at_ms))


def blocks(spans: Iterable[Span], done: Completion, unit: int = 1) -> list[Block]:
    """Return the forwards in order of time, each with its outcome given the final text."""
    log = sorted((span for span in spans if span.kind in KINDS and span.end > span.start), key=attrgetter("start"))
    if not log:
        return []
    verified = {text.key for text in prefixes(log[0].context.origin, done)}
    accepted = accepted_levels(log, verified)
    return [block(span, verified, accepted, unit) for span in log]


def accepted_levels(spans: Iterable[Span], verified: set[int]) -> set[tuple[int, int]]:
    """The levels of trees, by job and number, with a token of the text; later levels are known by those before."""
    jobs: dict[int, Draft] = {}
    levels: dict[int, dict[int, DraftedLevel]] = {}
    for span in spans:
        if span.level is not None:
            jobs[span.job], event = span.level
            levels.setdefault(span.job, {})[event.level] = event
    return {
        (id, number)
        for id, job in jobs.items()
        for number, texts in drafted_texts(job, levels[id]).items()
        if any(text.key in verified for text in texts)
    }


def hidden(verifications: Iterable[Block]) -> float:
    """Return the share of the useful target forwards' time that the text did not wait for.

    The text waits for the part of a forward that comes after the end of the forward before it.
    """
    answered = exposed = computed = 0.0
    for forward in sorted(verifications, key=lambda block: block.end_ms):
        if forward.outcome == "verified":
            exposed += forward.end_ms - max(forward.start_ms, answered)
            computed += forward.end_ms - forward.start_ms
            answered = forward.end_ms
    return 1 - exposed / computed if computed else 0.0


def prefixes(origin: TokenSequence, done: Completion) -> list[TokenSequence]:
    texts = [origin]
    for token in done.tokens:
        texts.append(texts[-1].then(token))
    return texts


def block(span: Span, verified: set[int], accepted: set[tuple[int, int]], unit: int) -> Block:
    first = first_place(span)
    return Block(
        server=span.server,
        role=span.role,
        kind=span.kind,
        outcome=outcome(span, first, verified, accepted),
        start_ms=float(span.start) * unit,
        end_ms=float(span.end) * unit,
        place=len(first) - len(first.origin),
        width=span.width,
        num_texts=span.num_texts,
    )


def first_place(span: Span) -> TokenSequence:
    """Return the text up to the first position of the forward."""
    if span.texts:
        return min(span.texts, key=len)
    text = span.context
    for _ in range(span.width - 1):
        text = text if text.parent is None else text.parent
    return text


def outcome(span: Span, first: TokenSequence, verified: set[int], accepted: set[tuple[int, int]]) -> str:
    if span.kind == "warm":
        return "prefilled"
    if span.kind == "verify":
        useful = any(text.key in verified for text in span.texts or (first,))
        return "verified" if useful and not span.stale else "stale"
    if span.level is not None:
        is_accepted = (span.job, span.level[1].level) in accepted
    else:
        is_accepted = span.token is not None and first.then(span.token).key in verified
    return "accepted" if is_accepted else "rejected"
