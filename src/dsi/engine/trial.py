"""One model decoding by itself, and how often a drafter agrees with a target on a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile

from dsi.core.messages import GREEDY, Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import ForwardRequest, Model

ModelFactory = Callable[[], Model]  # returns the model with an empty KV cache


@dataclass(frozen=True)
class Trial:
    """One prompt. `hits` has, for each token of the target's text, whether the drafter would have drafted it."""

    matched: int  # tokens that the drafter's own text begins with like the target's
    hits: tuple[bool, ...]
    ended: bool  # the target ended its text before it was as long as allowed

    @property
    def whole(self) -> bool:
        """Whether the texts are equal to the very end: how much longer they would have been is unknown."""
        return self.matched == len(self.hits)


def run_trial(target: ModelFactory, drafter: ModelFactory, prompt: Tokens, tokens: int, ends: Collection[int]) -> Trial:
    """Compare a drafter with the target's greedy text, token by token and as a text of its own.

    The drafter's own text is decoded up to the first difference: what comes after it matches nothing.
    """
    text = tuple(decode(target(), prompt, tokens, ends))
    drafted = drafter().answer(ForwardRequest(prompt + text[:-1], len(prompt)))  # one forward for all positions
    own = zip(text, decode(drafter(), prompt, len(text), ends))
    return Trial(
        matched=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], own)),
        hits=tuple(draft_token == token for draft_token, token in zip(drafted, text)),
        ended=len(text) < tokens,
    )


def decode(
    model: Model, prompt: Tokens, tokens: int, ends: Collection[int] = (), sampling: Sampling = GREEDY
) -> Iterator[int]:
    """Decode autoregressively, up to so many tokens or to an end token, which is the last."""
    text = list(prompt)
    for _ in range(tokens):
        [token] = model.answer(ForwardRequest(text, len(text), sampling=sampling))
        yield token
        if token in ends:
            return
        text.append(token)
