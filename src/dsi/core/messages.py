"""The messages between the core and a fleet: jobs out, events in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from dsi.core.fields import option
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.tree_shape import Expansions, Tree, by_level

Time = Any  # float seconds, or a Fraction where virtual time is to be exact

TARGET = "target"
DRAFTER = "drafter"
RULES = ("match", "reject", "block", "specinfer")
PENALTIES = (  # fields of `Sampling` that process logits before all others
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
)
RULE_HELP = "How draft tokens are accepted: match, reject, block or specinfer; all are lossless."

TopLogprobs = tuple[tuple[int, float], ...]  # tokens and their log probabilities, the likeliest first
DraftToken = tuple[int, Any]  # a token and the draft probabilities that a rule needs: only servers read them


def check_rule(name: str) -> str:
    """Return the name of an acceptance rule, or raise ValueError."""
    if name not in RULES:
        raise ValueError(f"rule {name!r}: must be one of {', '.join(RULES)}")
    return name


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is sampled from logits. The core passes it on; only servers read it."""

    temperature: float = option("0 is greedy.", 0.0)
    top_k: int = option("Only the k likeliest tokens; 0: all.", 0)
    top_p: float = option("Only the likeliest tokens that together reach p.", 1.0)
    min_p: float = option("Only tokens at least this share as likely as the likeliest.", 0.0)
    seed: int = option("Same seed, same text, whatever the algorithm.", 0)
    rule: str = option(RULE_HELP, "match")
    candidates: int = 2  # specinfer: draft tokens for each position
    logprobs: int | None = None  # how many of the likeliest tokens to return for each position; None: no logprobs
    repetition_penalty: float = option("Above 1, what is in prompt or text is less likely to come again.", 1.0)
    presence_penalty: float = option("Subtracted from the logit of each token that is in the text.", 0.0)
    frequency_penalty: float = option("The same, times how often it is there.", 0.0)
    min_tokens: int = option("Tokens before which the text does not end by itself.", 0)
    end_token_ids: Tokens = ()  # which are not sampled before
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    bad_words: tuple[Tokens, ...] = ()  # that the text must not contain
    allowed_token_ids: Tokens | None = None  # None: all

    @property
    def has_penalties(self) -> bool:
        """Whether logits are processed before temperature, top-k, top-p and min-p."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids
        )

    @property
    def penalties(self) -> list[str]:
        """The names of the fields that make it so."""
        return [
            field.name
            for field in fields(self)
            if field.name in PENALTIES and getattr(self, field.name) != field.default
        ]

    @property
    def token_ids(self) -> Iterator[int]:
        """All tokens that are named."""
        yield from (token for token, _ in self.logit_bias)
        yield from (token for word in self.bad_words for token in word)
        yield from self.allowed_token_ids or ()

    @property
    def needs_draft(self) -> bool:
        """Whether a position can be verified only together with its draft token; never under greedy sampling."""
        return self.rule != "match" and self.temperature > 0

    @property
    def num_candidates(self) -> int:
        """Draft tokens for each position."""
        return self.candidates if self.rule == "specinfer" else 1

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if self.candidates < 1:
            raise ValueError(f"candidates {self.candidates}: must be at least 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs {self.logprobs}: must be at least 0")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids: there must be at least 1, or no token could be sampled")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p}: must be between 0 and 1")
        if self.has_penalties:
            self._check_penalties()

    def _check_penalties(self) -> None:
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty {self.repetition_penalty}: must be a number above 0; 1 has no effect")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} {getattr(self, name)}: must be between -2 and 2")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens {self.min_tokens}: must be at least 0")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias {bias} of token {token}: must be between -100 and 100")
        if not all(self.bad_words):
            raise ValueError("bad_words: one of them has no token")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Fill the KV cache with this text. Started again with the same id, it asks for a longer one."""

    id: int
    context: TokenSequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft up to `count` tokens after this text, streaming each one.

    Under the rule `block` the first of them lies in a block of `block_size` tokens that began at `block_start`.
    From the target, the tokens are its own text.
    """

    id: int
    context: TokenSequence
    count: int
    model: str = DRAFTER
    sampling: Sampling = GREEDY
    block_start: int = 0
    block_size: int = 1
    first_block: int = 1  # tokens after which the first are wanted; later ones are, after each block
    alone: bool = False  # nothing of its request runs beside it: it may use every core
    tree: Tree = ()  # draft tokens after this text, whose children are wanted
    expansions: Expansions = ()  # instead of a chain: level by level; new nodes are numbered as they are asked for

    @property
    def num_answers(self) -> int:
        """Events that answer it: draft tokens, or levels of a tree."""
        return len(by_level(self.expansions, len(self.tree))) if self.expansions else self.count


@dataclass(frozen=True, slots=True)
class Verify:
    """Return the target's next token after each of the last `width` prefixes of this text.

    With a tree, also after each of its nodes `asked`; others verify the rest. Or, for fleets that say that they can,
    also after each of the nodes that a tree's draft, still in flight, is going to have. A rule that needs them is given
    the draft tokens of each position; where there are none, it samples.
    """

    id: int
    context: TokenSequence
    width: int
    lead: int = 0  # how far its first position lay ahead of the verified text; 0 verifies the root
    sampling: Sampling = GREEDY
    draft_tokens: tuple[tuple[DraftToken, ...], ...] = ()
    alone: bool = False  # nothing of its request runs beside it: it may use every core
    tree: Tree = ()
    asked: Tokens = ()  # nodes of the tree, by index
    draft: int | None = None  # the job that drafts the tree to verify: numbered as there
    num_drafted: int = 0  # nodes that it is going to have, if the drafter has so many choices

    @property
    def num_positions(self) -> int:
        return self.width + len(self.asked) + self.num_drafted

    def fits(self, tokens: Tokens) -> bool:
        """Whether there is a token for each position; the rule `block` may cut the answer short."""
        is_cut = self.sampling.rule == "block" and 0 < len(tokens) < self.width
        return len(tokens) == self.num_positions or is_cut


@dataclass(frozen=True, slots=True)
class Prefilled:
    id: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft token, its draft probabilities if a rule needs them, and alternates for the same position."""

    id: int
    token: int
    draft_probs: Any = None
    alternates: Tokens = ()


@dataclass(frozen=True, slots=True)
class DraftedBlock:
    """All draft tokens of a job for which nothing of its request waits before the last."""

    id: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class DraftedLevel:
    """The children of the nodes that one forward of a tree's draft expanded, the likeliest first."""

    id: int
    children: tuple[Tokens, ...]
    level: int = 0  # forwards of the job before this one


@dataclass(frozen=True, slots=True)
class Verified:
    """Under the rule `block` there may be fewer tokens than positions: those after the last were not verified."""

    id: int
    tokens: Tokens
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of each of them, where the request asks for them


@dataclass(frozen=True, slots=True)
class Failed:
    """This job will not be answered; what became of its server is the fleet's concern."""

    id: int
    reason: str = ""


WOKEN = Failed(-1, "woken")  # what a fleet returns that was woken and has no event; no job has this id

Job = Prefill | Draft | Verify
Event = Prefilled | Drafted | DraftedBlock | DraftedLevel | Verified | Failed


def goes_on(job: Job) -> bool:
    """Whether the target continues a text by itself."""
    return isinstance(job, Draft) and job.model == TARGET


@dataclass(frozen=True, slots=True)
class Step:
    """The effects of one event: tokens now verified, and jobs to start, to cancel and to promote."""

    emit: Tokens = ()
    start: tuple[Job, ...] = ()
    cancel: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()


NO_STEP = Step()
