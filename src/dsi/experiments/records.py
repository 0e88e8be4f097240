"""What a run looked like: each forward of each server, and what became of it. Pictures read this."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from dsi.core.messages import Time
from dsi.core.request import Completion
from dsi.core.sequence import TokenSequence
from dsi.fleets.spans import Span
from dsi.planning.simulation import TITLES, SimulationConfig


@dataclass(frozen=True)
class Block:
    """One forward. `outcome`: a target judged the text or went stale; a draft was accepted or rejected."""

    server: str
    role: str
    kind: str  # draft, verify or warm
    outcome: str
    start_ms: float
    end_ms: float
    place: int  # how many tokens had been generated where the forward begins to judge or guess
    width: int


@dataclass(frozen=True)
class Remark:
    """Something that happened at one moment of a run."""

    kind: str  # decision or rejection
    at_ms: float
    title: str
    what: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One request on one fleet."""

    algorithm: str
    label: str
    servers: tuple[str, ...]
    blocks: tuple[Block, ...]
    times_ms: tuple[float, ...]  # when each token became certain
    remarks: tuple[Remark, ...] = ()
    overlap: dict[str, Any] = field(default_factory=dict)  # what it did, if that is known

    @property
    def title(self) -> str:
        return TITLES[self.algorithm]

    @property
    def total_ms(self) -> float:
        return self.times_ms[-1]


def record(setting: SimulationConfig, algorithm: str, seed: int = 0, waited: bool = False) -> Record:
    """Run one request and keep what each server did."""
    run = setting.run(algorithm, seed, waited)
    label = "waited" if waited else "simulated"
    return recorded(algorithm, label, tuple(run.busy), run.log, run.completion, run.unit)


def recorded(
    algorithm: str, label: str, servers: tuple[str, ...], spans: Iterable[Span], done: Completion, unit: int
) -> Record:
    """A finished request, whatever it ran on; `unit` is how many milliseconds its clock counts as one."""
    work = tuple(blocks(spans, done, unit))
    times = tuple(float(time) * unit for time in done.times)
    return Record(algorithm, label, servers, work, times, remarks(done, unit), figures(done, work, unit))


def figures(done: Completion, work: Iterable[Block], unit: int) -> dict[str, Any]:
    """What the overlap did: where the forwards are known, also by their time."""
    if done.overlap is None:
        return {}
    share = hidden(block for block in work if block.kind == "verify")
    return {**done.overlap.json(unit), "hidden_time_share": share}


def remarks(done: Completion, unit: int = 1) -> tuple[Remark, ...]:
    """What was decided, and what each rejection cost."""
    turns = [
        Remark("decision", float(at) * unit, str(decision.spec), decision.json()) for at, decision in done.decisions
    ]
    losses = done.overlap.losses if done.overlap else ()
    costs = [
        Remark(
            "rejection",
            float(each.at) * unit,
            f"rejection, {float(each.lost) * unit:.1f} ms lost",
            {"token": each.token, "lost_ms": float(each.lost) * unit},
        )
        for each in losses
    ]
    return tuple(sorted(turns + costs, key=lambda remark: remark.at_ms))


def blocks(
    spans: Iterable[Span],
    done: Completion,
    unit: int = 1,
    kinds: Collection[str] = ("draft", "verify", "warm"),
) -> list[Block]:
    """The forwards in order of time, each with its outcome in the light of the final text.

    `unit` is how many milliseconds the fleet's clock counts as one.
    """
    log = sorted((span for span in spans if span.kind in kinds and span.end > span.start), key=_start)
    if not log:
        return []
    true = {text.key for text in prefixes(log[0].context.origin, done)}
    return [block(span, true, unit) for span in log]


def _start(span: Span) -> Time:
    return span.start


def hidden(verifications: Iterable[Block]) -> float:
    """The share of the useful target forwards' time that nobody waited for.

    What is waited for is the part of a forward after the one before it had answered.
    """
    answered = waited = computed = 0.0
    for forward in sorted(verifications, key=lambda block: block.end_ms):
        if forward.outcome == "judged":
            waited += forward.end_ms - max(forward.start_ms, answered)
            computed += forward.end_ms - forward.start_ms
            answered = forward.end_ms
    return 1 - waited / computed if computed else 0.0


def prefixes(origin: TokenSequence, done: Completion) -> list[TokenSequence]:
    texts = [origin]
    for token in done.tokens:
        texts.append(texts[-1].then(token))
    return texts


def block(span: Span, true: set[int], unit: int) -> Block:
    first = first_place(span)
    return Block(
        server=span.server,
        role=span.role,
        kind=span.kind,
        outcome=outcome(span, first, true),
        start_ms=float(span.start) * unit,
        end_ms=float(span.end) * unit,
        place=len(first) - len(first.origin),
        width=span.width,
    )


def first_place(span: Span) -> TokenSequence:
    """The shortest text that the forward was asked about."""
    text = span.context
    for _ in range(span.width - 1):
        text = text if text.parent is None else text.parent
    return text


def outcome(span: Span, first: TokenSequence, true: set[int]) -> str:
    if span.kind == "warm":
        return "warmed"
    if span.kind == "verify":
        return "stale" if span.stale or first.key not in true else "judged"
    accepted = span.token is not None and span.context.then(span.token).key in true
    return "accepted" if accepted else "rejected"
