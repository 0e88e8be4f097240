"""Everything that crosses the border between the core and the world: jobs out, events in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsi.core.sequence import Tokens, TokenSequence

Time = Any  # float seconds, or a Fraction where virtual time is to be exact

TARGET = "target"
DRAFTER = "drafter"
RULES = ("match", "reject", "block", "specinfer")

TopLogprobs = tuple[tuple[int, float], ...]  # tokens and the logarithms of their probabilities, the likeliest first
Guess = tuple[int, Any]  # a token, and what a rule must know of how it was drawn: only servers read it


def check_rule(name: str) -> str:
    if name not in RULES:
        raise ValueError(f"rule {name!r}: must be one of {', '.join(RULES)}")
    return name


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from a row of scores. The core carries it; only servers read it."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    rule: str = "match"
    candidates: int = 2  # specinfer: guesses for each place
    logprobs: int | None = None  # how many of the likeliest tokens to name for each place; None: nobody asks

    @property
    def needs_guess(self) -> bool:
        """Whether a place can be judged only together with the guess about it: without chance, never."""
        return self.rule != "match" and self.temperature > 0

    @property
    def guesses(self) -> int:
        """For each place."""
        return self.candidates if self.rule == "specinfer" else 1

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if self.candidates < 1:
            raise ValueError(f"candidates {self.candidates}: must be at least 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs {self.logprobs}: must be at least 0")
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
class Prefill:
    """Hold this text in your cache. Started again with the same id, it asks for a longer one."""

    id: int
    context: TokenSequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Guess up to `count` tokens after this text, streaming each one.

    Under the rule `block` the first of them lies in a block of `block` tokens that began at `start`. With
    `branches` the runners-up for each token are wanted too, if they came to at least `doubt` of the winner.
    """

    id: int
    context: TokenSequence
    count: int
    model: str = DRAFTER
    sampling: Sampling = GREEDY
    start: int = 0
    block: int = 1
    branches: int = 1
    min_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Verify:
    """Say which token truly follows each of the last `width` prefixes of this text.

    A rule that needs them is given the guesses about each place; where there is none, it draws freely.
    """

    id: int
    context: TokenSequence
    width: int
    lead: int = 0  # how far its first place lay beyond the sure text; 0 watches the root
    sampling: Sampling = GREEDY
    guesses: tuple[tuple[Guess, ...], ...] = ()
    aside: bool = False  # about a second guess, in case the first one falls: for a server to spare

    def fits(self, tokens: Tokens) -> bool:
        """A token for each place; the rule `block` may cut the answer short."""
        cut_short = self.sampling.rule == "block" and 0 < len(tokens) < self.width
        return len(tokens) == self.width or cut_short


@dataclass(frozen=True, slots=True)
class Prefilled:
    id: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A guess, how it was drawn if a rule asks, and further guesses about the same place."""

    id: int
    token: int
    odds: Any = None
    others: Tokens = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Under the rule `block` there may be fewer tokens than places: what follows the last was not judged."""

    id: int
    tokens: Tokens
    notes: tuple[TopLogprobs, ...] = ()  # on each of them, where somebody asks


@dataclass(frozen=True, slots=True)
class Failed:
    """This job will not be answered; what became of its server is the fleet's concern."""

    id: int
    reason: str = ""


WOKEN = Failed(-1, "woken")  # a fleet that was woken and has nothing to tell; no job has this number

Job = Prefill | Draft | Verify
Event = Prefilled | Drafted | Verified | Failed


@dataclass(frozen=True, slots=True)
class Step:
    """What one event changed: text now certain, jobs to start, jobs to stop, jobs now urgent."""

    emit: Tokens = ()
    start: tuple[Job, ...] = ()
    cancel: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()


NOTHING = Step()
