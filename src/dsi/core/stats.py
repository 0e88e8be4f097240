"""What the overlap of one request really did, from what is known of it when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsi.core.generation import ACCEPTED, CORRECTED, Tally
from dsi.core.messages import TARGET, Drafted, Event, Time, Verified

SECOND = 1000  # ms
ANSWERS = frozenset({Drafted, Verified})
FIGURES = (
    "hidden_share",
    "drafter_lead",
    "wasted_drafts",
    "wasted_forwards",
    "idle_share",
    "target_ms",
    "drafter_ms",
    "rejections",
    "lost_to_rejections_ms",
    "lost_per_rejection_ms",
    "ideal_ms",
    "time_over_ideal",
)


@dataclass(slots=True)
class ServerUsage:
    """What a server has done so far."""

    role: str
    busy: Time = 0
    forwards: int = 0  # guesses and verdicts
    poll_answer: Time = 0  # what those took: `busy` but for what was given up, failed or only read
    since: Time = 0  # when the forward it is at began

    def end(self, start: Time, end: Time, event: Event | None) -> None:
        """A forward is over, with this event or with none."""
        took = end - start
        self.busy += took
        self.since = end
        if event.__class__ in ANSWERS:
            self.forwards += 1
            self.poll_answer += took

    def until(self, now: Time) -> ServerUsage:
        """With the forward that it is at."""
        return replace(self, busy=self.busy + max(0, now - self.since))


ServerUsages = Mapping[str, ServerUsage]  # by server


@dataclass(frozen=True)
class ServerTime:
    """What a server did while a request ran, for whomever."""

    server: str
    role: str
    busy: Time
    idle: Time

    @property
    def idle_share(self) -> float:
        whole = self.busy + self.idle
        return float(self.idle / whole) if whole else 0.0


@dataclass(frozen=True)
class RejectionCost:
    """A rejection: after it the text stood still for `lost` longer than a guess takes."""

    token: int  # which of the text the target put right, from 0
    at: Time
    lost: Time


@dataclass(frozen=True)
class Overlap:
    """Times are by the fleet's clock.

    The two mean times are of the forwards that were answered while the request ran, as their servers saw
    them: with the reading of the prompt, without the way there and back, and without forwards that were
    given up. Where requests share a fleet, those of all of them count, and nobody can say which server idled
    for whom.
    """

    hidden: float  # share of the useful target forwards that only confirmed guesses: nobody waited for them
    lead: float  # guesses beyond the sure text, in the mean over the moments when it grew
    wasted_drafts: int
    wasted_forwards: int  # verifications given up, begun or not, or answered for nothing
    elapsed: Time
    target_time: Time | None  # of a forward; None where there was none
    drafter_time: Time | None
    servers: tuple[ServerTime, ...] | None  # None where requests share them
    losses: tuple[RejectionCost, ...]
    ideal: Time | None  # Proposition 1 with these times: a guess for an accepted token, a forward for others

    @property
    def lost(self) -> Time:
        return sum(loss.lost for loss in self.losses)

    @property
    def gap(self) -> float | None:
        """How many times as long as the ideal."""
        return float(self.elapsed / self.ideal) if self.ideal else None

    def json(self, unit: float = SECOND) -> dict[str, Any]:
        """What people look at; `unit` is how many milliseconds the clock counts as one."""
        count = len(self.losses)
        values = (
            self.hidden,
            self.lead,
            self.wasted_drafts,
            self.wasted_forwards,
            self.servers and {each.server: each.idle_share for each in self.servers},
            _ms(self.target_time, unit),
            _ms(self.drafter_time, unit),
            count,
            _ms(self.lost, unit),
            _ms(self.lost / count, unit) if count else None,
            _ms(self.ideal, unit),
            self.gap,
        )
        return dict(zip(FIGURES, values))


def mean(found: Sequence[Overlap], unit: float = SECOND) -> dict[str, Any]:
    """The figures of several requests: each in the mean over those that have it."""
    said = [each.json(unit) for each in found]
    if len(said) == 1:
        return said[0]
    figures = {name: _mean([each[name] for each in said if each[name] is not None]) for name in FIGURES}
    if figures["rejections"]:
        figures["lost_per_rejection_ms"] = figures["lost_to_rejections_ms"] / figures["rejections"]
    return figures


def _mean(values: Sequence[Any]) -> Any:
    if values and isinstance(values[0], dict):
        return {name: _mean([each[name] for each in values if name in each]) for name in values[0]}
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
    took: Time,
    alone: bool,
) -> Overlap:
    """`before` and `after` are what the servers had done when the request began and, `took` later, ended."""
    if len(times) != len(origins):
        raise ValueError(f"{len(times)} times and {len(origins)} origins: each token has one of both")
    if took < 0 or (times and times[-1] > took):
        raise ValueError(f"a last token at {times[-1] if times else 0} of {took}: must be within")
    target, guess = _forward(before, after, target=True), _forward(before, after, target=False)
    accepted = origins.count(ACCEPTED)
    others = len(origins) - accepted
    known = times and (guess is not None or not accepted) and (target is not None or not others)
    return Overlap(
        hidden=max(0, tally.useful - tally.exposed) / tally.useful if tally.useful else 0.0,
        lead=sum(leads) / len(leads) if leads else 0.0,
        wasted_drafts=max(0, tally.wasted),
        wasted_forwards=tally.abandoned + tally.forwards - tally.useful,
        elapsed=times[-1] if times else 0,
        target_time=target,
        drafter_time=guess,
        servers=_services(before, after, took) if alone else None,
        losses=_losses(times, origins, guess or 0),
        ideal=accepted * (guess or 0) + others * (target or 0) if known else None,
    )


def _forward(before: ServerUsages, after: ServerUsages, target: bool) -> Time | None:
    """The mean time of the forwards between, of targets or of drafters."""
    names = [name for name, toll in after.items() if (toll.role == TARGET) == target]
    count = sum(after[name].forwards for name in names) - sum(_of(before, name).forwards for name in names)
    time = sum(after[name].poll_answer for name in names) - sum(_of(before, name).poll_answer for name in names)
    return time / count if count else None


def _of(tolls: ServerUsages, name: str) -> ServerUsage:
    """One that came later had done nothing."""
    return tolls.get(name) or ServerUsage("")


def _services(before: ServerUsages, after: ServerUsages, took: Time) -> tuple[ServerTime, ...]:
    found = []
    for name, toll in after.items():
        busy = min(took, toll.busy - _of(before, name).busy)
        found.append(ServerTime(name, toll.role, busy, took - busy))
    return tuple(found)


def _losses(times: Sequence[Time], origins: Sequence[str], guess: Time) -> tuple[RejectionCost, ...]:
    """What comes after a rejected guess had to begin anew: the next token says what that cost."""
    following = [*times[1:], *times[-1:]]
    return tuple(
        RejectionCost(i, time, max(0, following[i] - time - guess))
        for i, (time, origin) in enumerate(zip(times, origins))
        if origin == CORRECTED
    )
