"""What overlapping forwards gained and cost in one request, measured when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsi.core.generation import ACCEPTED, CORRECTED, Tally
from dsi.core.messages import TARGET, Drafted, DraftedBlock, DraftedLevel, Event, Time, Verified

SECOND = 1000  # ms
ANSWERS = frozenset({Drafted, DraftedBlock, DraftedLevel, Verified})


def num_forwards(event: Event | None) -> int:
    """How many forwards have ended in this event."""
    return len(event.tokens) if isinstance(event, DraftedBlock) else int(event.__class__ in ANSWERS)


@dataclass(slots=True)
class ServerUsage:
    """The time a server has spent on forwards so far."""

    role: str
    busy: Time = 0
    forwards: int = 0  # that were answered: draft tokens and verifications
    answer_time: Time = 0  # of those: `busy` without what was cancelled, failed or a prefill
    since: Time = 0  # when its current forward began

    def end(self, start: Time, end: Time, event: Event | None) -> None:
        """Record that a forward has ended, with this event or with none."""
        elapsed = end - start
        self.busy += elapsed
        self.since = end
        if event.__class__ in ANSWERS:
            self.forwards += num_forwards(event)
            self.answer_time += elapsed

    def until(self, now: Time) -> ServerUsage:
        """Include the time of the current forward up to now."""
        return replace(self, busy=self.busy + max(0, now - self.since))


ServerUsages = Mapping[str, ServerUsage]  # by server


@dataclass(frozen=True)
class ServerTime:
    """How long a server was busy, for any request, while one ran."""

    server: str
    role: str
    busy: Time
    idle: Time

    @property
    def idle_share(self) -> float:
        total = self.busy + self.idle
        return float(self.idle / total) if total else 0.0


@dataclass(frozen=True)
class RejectionCost:
    """A rejection: the next token came `lost` later than a draft token takes."""

    token: int  # the index of the token that the target corrected
    at: Time
    lost: Time


@dataclass(frozen=True)
class Overlap:
    """Times are by the fleet's clock.

    The two mean latencies are of the forwards answered while the request ran, as their servers measured them:
    with prefill, without network delays, and without cancelled forwards. Where requests share a fleet, those of
    all of them count, and idle time cannot be attributed to one.
    """

    hidden: float  # share of the useful target forwards that only accepted draft tokens: no token waited for them
    lead: float  # draft tokens ahead of the verified text, in the mean over the moments when it grew
    wasted_drafts: int
    wasted_forwards: int  # verifications cancelled, started or not, or answered for nothing
    elapsed: Time
    target_time: Time | None  # of a forward; None where there was none
    drafter_time: Time | None
    servers: tuple[ServerTime, ...] | None  # None where requests share them
    losses: tuple[RejectionCost, ...]
    ideal: Time | None  # Proposition 1 with these latencies: a draft per accepted token, a target forward per other

    @property
    def lost(self) -> Time:
        return sum(loss.lost for loss in self.losses)

    @property
    def gap(self) -> float | None:
        """The ratio of the elapsed to the ideal time."""
        return float(self.elapsed / self.ideal) if self.ideal else None

    def json(self, unit: float = SECOND) -> dict[str, Any]:
        """The reported figures; `unit` is how many milliseconds the clock counts as one."""
        count = len(self.losses)
        return {
            "hidden_share": self.hidden,
            "drafter_lead": self.lead,
            "wasted_drafts": self.wasted_drafts,
            "wasted_forwards": self.wasted_forwards,
            "idle_share": self.servers and {server.server: server.idle_share for server in self.servers},
            "target_ms": _ms(self.target_time, unit),
            "drafter_ms": _ms(self.drafter_time, unit),
            "rejections": count,
            "lost_to_rejections_ms": _ms(self.lost, unit),
            "lost_per_rejection_ms": _ms(self.lost / count, unit) if count else None,
            "ideal_ms": _ms(self.ideal, unit),
            "time_over_ideal": self.gap,
        }


def mean(overlaps: Sequence[Overlap], unit: float = SECOND) -> dict[str, Any]:
    """Average the figures of several requests, each over those that have it."""
    rows = [overlap.json(unit) for overlap in overlaps]
    if len(rows) == 1:
        return rows[0]
    names = Overlap(0.0, 0.0, 0, 0, 0, None, None, None, (), None).json()  # also where no request has an overlap
    figures = {name: _mean([row[name] for row in rows if row[name] is not None]) for name in names}
    if figures["rejections"]:
        figures["lost_per_rejection_ms"] = figures["lost_to_rejections_ms"] / figures["rejections"]
    return figures


def _mean(values: Sequence[Any]) -> Any:
    if values and isinstance(values[0], dict):
        return {name: _mean([value[name] for value in values if name in value]) for name in values[0]}
    return sum(values) / len(values) if values else None


def _ms(time: Time | None, unit: float) -> float | None:
    return None if time is None else float(time) * unit


def overlap(
    times: Sequence[Time],
    origins: Sequence[str],
    tally: Tally,
    leads: Sequence[int],
    before: ServerUsages,
    after: ServerUsages,
    elapsed: Time,
    alone: bool,
) -> Overlap:
    """Evaluate a request from the server usage before it started and when it ended, `elapsed` later."""
    if len(times) != len(origins):
        raise ValueError(f"{len(times)} times and {len(origins)} origins: each token has one of both")
    if elapsed < 0 or (times and times[-1] > elapsed):
        raise ValueError(f"a last token at {times[-1] if times else 0} of {elapsed}: must be within")
    target, draft = _mean_forward(before, after, target=True), _mean_forward(before, after, target=False)
    accepted = origins.count(ACCEPTED)
    others = len(origins) - accepted
    measured = times and (draft is not None or not accepted) and (target is not None or not others)
    return Overlap(
        hidden=max(0, tally.useful - tally.exposed) / tally.useful if tally.useful else 0.0,
        lead=sum(leads) / len(leads) if leads else 0.0,
        wasted_drafts=max(0, tally.wasted),
        wasted_forwards=tally.abandoned + tally.forwards - tally.useful,
        elapsed=times[-1] if times else 0,
        target_time=target,
        drafter_time=draft,
        servers=_server_times(before, after, elapsed) if alone else None,
        losses=_rejection_costs(times, origins, draft or 0),
        ideal=accepted * (draft or 0) + others * (target or 0) if measured else None,
    )


def _mean_forward(before: ServerUsages, after: ServerUsages, target: bool) -> Time | None:
    """The mean latency of the answered forwards in between, of targets or of drafters."""
    names = [name for name, usage in after.items() if (usage.role == TARGET) == target]
    count = sum(after[name].forwards for name in names) - sum(_of(before, name).forwards for name in names)
    time = sum(after[name].answer_time for name in names) - sum(_of(before, name).answer_time for name in names)
    return time / count if count else None


def _of(usages: ServerUsages, name: str) -> ServerUsage:
    """The usage of a server; one that was added later had none."""
    return usages.get(name) or ServerUsage("")


def _server_times(before: ServerUsages, after: ServerUsages, elapsed: Time) -> tuple[ServerTime, ...]:
    times = []
    for name, usage in after.items():
        busy = min(elapsed, usage.busy - _of(before, name).busy)
        times.append(ServerTime(name, usage.role, busy, elapsed - busy))
    return tuple(times)


def _rejection_costs(times: Sequence[Time], origins: Sequence[str], draft: Time) -> tuple[RejectionCost, ...]:
    """Drafting starts anew after a rejection: the time of the next token tells what that cost."""
    following = [*times[1:], *times[-1:]]
    return tuple(
        RejectionCost(i, time, max(0, following[i] - time - draft))
        for i, (time, origin) in enumerate(zip(times, origins))
        if origin == CORRECTED
    )
