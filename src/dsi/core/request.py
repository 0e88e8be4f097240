"""What callers submit and get back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsi.core.generation import Policy, Tally
from dsi.core.messages import GREEDY, Sampling, Time, TopLogprobs
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.spec import Decision
from dsi.core.stats import Overlap

__all__ = ["Completion", "Request", "Sampling", "ScoreRequest", "VerifyRequest"]


@dataclass(frozen=True)
class Request:
    """Generate up to `max_new_tokens` tokens after a prompt."""

    prompt: Tokens
    max_new_tokens: int
    policy: Policy
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    drafter_contexts: Mapping[str, int] = field(default_factory=dict, hash=False)  # in tokens; 0 or none: unlimited
    streams: bool = False  # whether targets can stream this text, more quickly than token by token


@dataclass(frozen=True)
class ScoreRequest:
    """Return the target's top log probabilities for each token of a prompt but the first; generate nothing."""

    prompt: Tokens
    sampling: Sampling

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("an empty text: there is no token to score")
        if self.sampling.logprobs is None:
            raise ValueError("logprobs None: a request to score a text must say how many")


@dataclass(frozen=True)
class VerifyRequest:
    """Return the target's token after each of the last `num_positions` prefixes of a text, itself included.

    Requests about one text that grows should have contexts of one origin: its KV cache is found by that.
    """

    context: TokenSequence
    num_positions: int
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if not 1 <= self.num_positions <= len(self.context):
            length = len(self.context)
            raise ValueError(f"num_positions {self.num_positions}: must be at least 1 and at most {length}, the prompt")


@dataclass(frozen=True)
class Completion:
    """A finished text. Times count from when the request was submitted, by the fleet's clock."""

    tokens: Tokens
    finish_reason: str
    times: tuple[Time, ...] = field(repr=False)  # when each token was verified
    tally: Tally
    origins: tuple[str, ...] = field(default=(), repr=False)  # accepted, corrected or plain, for each token
    top_logprobs: tuple[TopLogprobs, ...] = field(default=(), repr=False)  # of each token, if asked for
    decisions: tuple[tuple[Time, Decision], ...] = field(default=(), repr=False)  # under `auto`, and when
    overlap: Overlap | None = field(default=None, repr=False)  # what overlapping forwards gained and cost
    text: str = ""  # where the engine detokenizes
    prompt: Tokens = field(default=(), repr=False)

    @property
    def notes(self) -> tuple[TopLogprobs, ...]:
        """The old name of `top_logprobs`, kept for one release."""
        return self.top_logprobs

    def first(self, count: int) -> Completion:
        """The same text, ended after so many tokens."""
        names = ("tokens", "times", "origins", "top_logprobs")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})

    @property
    def elapsed(self) -> Time:
        return self.times[-1] if self.times else 0

    @property
    def unspeculated(self) -> int:
        """Tokens that `auto` generated without speculation."""
        decisions = [decision for _, decision in self.decisions]
        ends = [decision.tokens for decision in decisions[1:]] + [len(self.tokens)]
        return sum(end - decision.tokens for decision, end in zip(decisions, ends) if not decision.spec.speculates)

    @property
    def ttft(self) -> Time:
        """Time to first token."""
        return self.times[0] if self.times else 0

    @property
    def tpot(self) -> Time:
        """Time per output token after the first."""
        return (self.elapsed - self.ttft) / (len(self.times) - 1) if len(self.times) > 1 else 0
