"""One model decoding by itself, and how often a drafter agrees with a target on a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from dsi.core.messages import GREEDY, Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import NEVER, ForwardRequest, Model, SamplingModel, SupportsTopK
from dsi.sampling.logits import top_k_tokens

NUM_CHOICES = 3  # of a drafter at each position, among which the target's token is looked for
ModelFactory = Callable[[], Model]  # returns the model with an empty KV cache


@dataclass(frozen=True)
class Trial:
    """One prompt. `hits` has, for each token of the target's text, whether the drafter would have drafted it."""

    matched: int  # tokens that the drafter's own text begins with like the target's
    hits: tuple[bool, ...]
    ended: bool  # the target ended its text before it was as long as allowed
    ranks: tuple[
        int | None, ...
    ] = ()  # of each token among the drafter's choices: 0 for the first; None: not among them

    @property
    def whole(self) -> bool:
        """Whether the texts are equal to the very end: how much longer they would have been is unknown."""
        return self.matched == len(self.hits)


def run_trial(target: ModelFactory, drafter: ModelFactory, prompt: Tokens, tokens: int, ends: Collection[int]) -> Trial:
    """Compare a drafter with the target's greedy text, token by token and as a text of its own.

    The drafter's own text is decoded up to the first difference: what comes after it matches nothing.
    """
    text = tuple(decode(target(), prompt, tokens, ends))
    choices = ranked_choices(drafter(), prompt + text[:-1], len(prompt))
    ranks = tuple(rank_of(token, ranked) for token, ranked in zip(text, choices))
    own = zip(text, decode(drafter(), prompt, len(text), ends))
    return Trial(
        matched=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], own)),
        hits=tuple(rank == 0 for rank in ranks),
        ended=len(text) < tokens,
        ranks=ranks,
    )


def ranked_choices(drafter: Model, text: Tokens, start: int) -> list[Tokens]:
    """A drafter's greedy choices for each position from `start` on, the first one first: in one forward, if it can."""
    if isinstance(drafter, SamplingModel):
        logits = drafter.backend.forward(text, start, NEVER)
        return [top_k_tokens(row, GREEDY, position, NUM_CHOICES) for position, row in enumerate(logits, start)]
    if isinstance(drafter, SupportsTopK):
        ends = range(start, len(text) + 1)
        return [drafter.top_k(ForwardRequest(text[:end], end), NUM_CHOICES) for end in ends]
    return [(token,) for token in drafter.answer(ForwardRequest(text, start))]


def rank_of(token: int, choices: Sequence[int]) -> int | None:
    return choices.index(token) if token in choices else None


def count_ranks(texts: Iterable[Iterable[int | None]]) -> tuple[int, ...]:
    """How often the target's token was the drafter's first choice, its second, ..."""
    counts = Counter(chain.from_iterable(texts))
    return tuple(counts[rank] for rank in range(NUM_CHOICES))


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
