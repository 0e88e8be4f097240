"""What callers give and get."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsi.core.generation import Policy, Tally
from dsi.core.messages import GREEDY, Sampling, Time, TopLogprobs
from dsi.core.sequence import Tokens
from dsi.core.spec import Decision
from dsi.core.stats import Overlap

__all__ = ["Completion", "Request", "Sampling"]


@dataclass(frozen=True)
class Request:
    prompt: Tokens
    max_new_tokens: int
    policy: Policy
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Completion:
    """A finished text. Times count from when the request was submitted, by the fleet's clock."""

    tokens: Tokens
    finish_reason: str
    times: tuple[Time, ...] = field(repr=False)  # when each token became certain
    tally: Tally
    origins: tuple[str, ...] = field(default=(), repr=False)  # accepted, corrected or plain, for each token
    notes: tuple[TopLogprobs, ...] = field(default=(), repr=False)  # what the target thought of each, if asked
    decisions: tuple[tuple[Time, Decision], ...] = field(default=(), repr=False)  # under `auto`, and when
    overlap: Overlap | None = field(default=None, repr=False)  # what overlapping forwards gave and cost
    text: str = ""  # where the engine speaks text
    prompt: Tokens = field(default=(), repr=False)

    @property
    def elapsed(self) -> Time:
        return self.times[-1] if self.times else 0

    @property
    def unspeculated(self) -> int:
        """Tokens that `auto` wrote without speculation."""
        turns = [decision for _, decision in self.decisions]
        ends = [each.tokens for each in turns[1:]] + [len(self.tokens)]
        return sum(end - each.tokens for each, end in zip(turns, ends) if not each.spec.speculates)

    @property
    def ttft(self) -> Time:
        """From the request to its first token."""
        return self.times[0] if self.times else 0

    @property
    def tpot(self) -> Time:
        """The time per token after the first."""
        return (self.elapsed - self.ttft) / (len(self.times) - 1) if len(self.times) > 1 else 0
