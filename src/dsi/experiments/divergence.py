"""Where texts of one prompt part that should be equal, and how close the target's choice was there.

In float32 such texts are an error. In bfloat16 a forward over several positions rounds otherwise than one over a
single position, and where two tokens are almost equally likely, either may come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dsi.core.request import Completion
from dsi.core.sequence import Tokens

if TYPE_CHECKING:
    from dsi.engine.engine import Engine


@dataclass(frozen=True)
class Divergence:
    """Texts of one prompt that are not equal to its first one."""

    prompt: str
    reference: str  # whose text is the first
    names: tuple[str, ...]  # whose texts part from it
    position: int  # the tokens before the first that differs
    margin: float | None  # between the target's two likeliest tokens there, in log-probability; None: unknown

    def __str__(self) -> str:
        names = ", ".join(self.names)
        lead = "" if self.margin is None else f", where the target's likeliest token leads by {self.margin:.4f} nats"
        return (
            f"prompt {self.prompt!r}: different texts were written by {self.reference} and {names}, "
            f"which part after {self.position} tokens{lead}"
        )

    def json(self) -> dict[str, Any]:
        return asdict(self)


def divergence(engine: Engine, prompt: str, texts: Mapping[str, Sequence[Completion]]) -> Divergence | None:
    """Compare the texts of one prompt, by the names of the configurations that generated them."""
    reference, first = next((name, completions[0]) for name, completions in texts.items())
    positions = {
        name: min(differing)
        for name, completions in texts.items()
        if (differing := [n for text in completions if (n := first_difference(first.tokens, text.tokens)) is not None])
    }
    if not positions:
        return None
    position = min(positions.values())
    margin = top_two_margin(engine, first.prompt + first.tokens[:position])
    return Divergence(prompt, reference, tuple(positions), position, margin)


def first_difference(a: Tokens, b: Tokens) -> int | None:
    """Return the first position where two texts differ, or None if they are equal."""
    if a == b:
        return None
    return next((i for i, (token, other) in enumerate(zip(a, b)) if token != other), min(len(a), len(b)))


def top_two_margin(engine: Engine, tokens: Tokens) -> float | None:
    """Return the difference of the two largest log-probabilities after a text; devices return none."""
    if engine.deployment.plans:
        return None
    [top] = engine.generate(tokens, algorithm="nonsi", max_new_tokens=1, logprobs=2).top_logprobs
    return top[0][1] - top[1][1]


def check_equal(divergences: Iterable[Divergence]) -> None:
    """Refuse texts that differ, as an error."""
    for first in divergences:
        raise ValueError(str(first))
