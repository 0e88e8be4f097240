"""How to speculate: one immutable configuration that policies, planner, engine and command line share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from dsi.core.fields import option
from dsi.core.messages import DRAFTER, RULE_HELP, check_rule
from dsi.core.tree_shape import Chances

ALGORITHMS = ("nonsi", "si", "pearl", "dsi")
TURN_TAKING = ("nonsi", "si")  # the drafter and the target never compute at the same time
GIVEN_UP = ("branches", "spare_targets", "min_ratio")  # fields of the last release, for a sentence: trees do better
AUTO = "auto"  # switches between configurations of the others as it learns acceptance rates and latencies


def check_algorithm(name: str, auto: bool = False) -> str:
    """Return the name of an algorithm, or raise ValueError; `auto` is one only where it is allowed."""
    names = (*ALGORITHMS, AUTO) if auto else ALGORITHMS
    if name not in names:
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(names)}")
    return name


def default_max_lead(targets: int, lookahead: int, min_draft: int = 0) -> int:
    """One block for each target and one more: further ahead, a drafter costs more time than it saves."""
    return max(min_draft + 1, (targets + 1) * lookahead)


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate; None leaves a value to the engine, the planner or the simulator."""

    algorithm: str = option("nonsi, si, pearl, dsi, or auto, which learns what pays; the text is the same.", "dsi")
    lookahead: int | None = option("Draft tokens per verification.", None)
    min_draft: int | None = option("dsi: draft tokens to have before a new root is verified.", None)
    max_lead: float | None = option("dsi: how far beyond the verified text a drafter may draft, in tokens.", None)
    max_targets: int | None = None  # dsi: verifications in flight at once
    drafters: tuple[str, ...] = (DRAFTER,)  # roles of the drafter servers
    rule: str = option(RULE_HELP, "match")
    tree: int = option("Draft tokens that a verification carries as a tree, rule match; 0: a chain.", 0)
    chances: Chances = ()  # tree: how often the drafter's first, second, ... choice is right; empty: a prior

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm, auto=True)
        check_rule(self.rule)
        for name, value, least in (
            ("lookahead", self.lookahead, 1),
            ("min draft", self.min_draft, 0),
            ("max lead", self.max_lead, 1),
            ("max targets", self.max_targets, 1),
            ("number of drafters", len(self.drafters), 1),
            ("tree", self.tree, 0),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{name} {value}: must be at least {least}")
        if not all(0 <= chance <= 1 for chance in self.chances) or sum(self.chances) > 1 + 1e-9:
            raise ValueError(f"chances {self.chances}: must be between 0 and 1, and at most 1 together")

    @property
    def speculates(self) -> bool:
        return self.algorithm != "nonsi"

    @property
    def takes_turns(self) -> bool:
        """Whether the drafter and the target never compute at the same time."""
        return self.algorithm in TURN_TAKING

    @cached_property
    def lead_limit(self) -> float:
        """Tokens that a drafter may be ahead of the verified text: as given, or by the number of targets."""
        if self.max_lead is not None:
            return self.max_lead
        if self.max_targets is None:
            return inf
        return default_max_lead(self.max_targets, self.lookahead or 1, self.min_draft or 0)

    def __str__(self) -> str:
        if not self.speculates:
            return "no speculation"
        tree = f", trees of {self.tree}" if self.tree else ""
        if self.takes_turns:
            return f"SI, lookahead {self.lookahead}{tree}"
        targets = "" if self.max_targets is None else f"SP {self.max_targets}, "
        return f"{targets}lookahead {self.lookahead}, min draft {self.min_draft or 0}{tree}"


@dataclass(frozen=True)
class Decision:
    """A configuration that `auto` chose once `tokens` tokens were verified, and why."""

    tokens: int
    spec: SpecConfig
    cause: str  # start, acceptance (of draft tokens or runner-ups), latency, or a drafter's context
    acceptance: float  # the estimate it was chosen by

    def json(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "way": str(self.spec),
            "speculates": self.spec.speculates,
            "drafters": list(self.spec.drafters),
            "cause": self.cause,
            "acceptance": self.acceptance,
        }
