"""Everything that crosses the border between the core and the world: jobs out, events in."""

from __future__ import annotations

from dataclasses import dataclass

from dsi.core.context import Context, Tokens

TARGET = "target"
DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from a row of scores. The core carries it; only servers read it."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p}: must be between 0 and 1")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Warm:
    """Hold this text in your cache. Started again with the same id, it asks for a longer one."""

    id: int
    context: Context


@dataclass(frozen=True, slots=True)
class Draft:
    """Guess up to `count` tokens after this text, streaming each one."""

    id: int
    context: Context
    count: int
    model: str = DRAFTER
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Verify:
    """Say which token truly follows each of the last `width` prefixes of this text."""

    id: int
    context: Context
    width: int
    lead: int = 0  # how far its first place lay beyond the sure text; 0 watches the root
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Warmed:
    id: int


@dataclass(frozen=True, slots=True)
class Drafted:
    id: int
    token: int


@dataclass(frozen=True, slots=True)
class Verified:
    id: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Failed:
    """This job will not be answered; what became of its server is the fleet's concern."""

    id: int
    reason: str = ""


Job = Warm | Draft | Verify
Event = Warmed | Drafted | Verified | Failed


@dataclass(frozen=True, slots=True)
class Step:
    """What one event changed: text now certain, jobs to start, jobs to stop, jobs now urgent."""

    emit: Tokens = ()
    start: tuple[Job, ...] = ()
    cancel: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()
