"""How many guesses each rule accepts, beside what theory promises of the very rows that were judged.

For each prompt and temperature the target writes one text by itself, with a seed of its own. Then every rule
is asked two things, by the functions and with the keyed coins that servers use:

- at each place of the text: guesses are drawn from the drafter's row after the target's own words, and the
  rule says whether one of them stands. `block` judges no place by itself and has no such figure.
- at every `lookahead`-th place: the drafter goes on with a block of guesses, each after those before it, and
  the rule says how many of them stand. Blocks that would be longer than the text are left out.

So all rules see the same places, and none a place that its own text led to. Nothing here is timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from math import sqrt
from statistics import fmean
from typing import Any

from dsi.core.messages import DraftToken, Sampling
from dsi.core.progress import Progress, no_progress
from dsi.core.sequence import Tokens
from dsi.engine.trial import decode
from dsi.experiments.acceptance import CERTAIN, interval
from dsi.models.protocol import NEVER, Backend, SamplingModel
from dsi.sampling.acceptance_rules import (
    match,
    match_acceptance_rate,
    prefix_acceptance,
    rejection_acceptance_rate,
    residual,
    residual_weights,
)
from dsi.sampling.logits import probabilities
from dsi.sampling.noise import UINT64_MAX, Array, splitmix64
from dsi.sampling.verify import draw_guesses, verify_block

ANY = "any"  # without chance all rules are one
Fresh = Callable[[], Backend]  # a model's rows, with nothing read yet
Guesses = tuple[DraftToken, ...]  # about one place; the drafter goes on after the first of them


@dataclass(frozen=True)
class Figure:
    """A mean and its 95% interval, for which the places of one text are alike."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def share(cls, texts: Sequence[Sequence[bool]]) -> Figure:
        rate = fmean(hit for hits in texts for hit in hits)
        return cls(rate, *interval(texts, rate), sum(map(len, texts)))

    @classmethod
    def of(cls, texts: Sequence[Sequence[float]]) -> Figure:
        count = sum(map(len, texts))
        mean = sum(map(sum, texts)) / count
        seen = sum((sum(each) - mean * len(each)) ** 2 for each in texts) * len(texts) / (len(texts) - 1)
        half = CERTAIN * sqrt(seen) / count
        return cls(mean, mean - half, mean + half, count)


@dataclass(frozen=True)
class RuleTrial:
    """One rule on one text: what became of its guesses, and how much of that was to be expected."""

    hits: tuple[bool, ...] = ()  # by place; none under `block`
    promises: tuple[float, ...] = ()
    ceilings: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    block_promises: tuple[float, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """One rule at one temperature; what theory promises is None where chance has no part."""

    rule: str
    guesses: int  # tried for each place
    temperature: float
    places: Figure | None  # accepted per place; None under `block`
    promised: float | None
    ceiling: float | None  # 1 - TV: no rule accepts more of what is guessed once
    blocks: Figure  # accepted per block
    block_promised: float | None

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WrittenText:
    """What the target wrote by itself, and both models to go on from any place of it."""

    target: Backend
    drafter: Backend
    prompt: Tokens
    truth: Tokens

    def rows(self) -> tuple[Array, Array]:
        """The target's and the drafter's at every place: one forward each."""
        known, start = self.prompt + self.truth[:-1], len(self.prompt)
        return self.target.forward(known, start, NEVER), self.drafter.forward(known, start, NEVER)

    def starts(self, lookahead: int) -> range:
        first = len(self.prompt)
        return range(first, first + len(self.truth) - lookahead + 1, lookahead)


def trials(
    target: Fresh,
    drafter: Fresh,
    prompts: Sequence[Tokens],
    tokens: int,
    rules: Sequence[str],
    temperatures: Sequence[float],
    lookahead: int,
    ends: Collection[int] = (),
    seed: int = 0,
    progress: Progress = no_progress,
) -> dict[tuple[float, str], list[RuleTrial]]:
    """By temperature and rule, one for each prompt; at temperature 0 all rules are one, and asked once."""
    samplings = settings(rules, temperatures)
    check(len(prompts), tokens, lookahead)
    found: dict[tuple[float, str], list[RuleTrial]] = defaultdict(list)
    for temperature, each in samplings.items():
        for number, prompt in enumerate(prompts):
            own = splitmix64(seed & UINT64_MAX) + number  # or places of prompts of one length would share their luck
            text = written(target(), drafter(), prompt, tokens, ends, Sampling(temperature, seed=own))
            rows = text.rows()
            for name, sampling in each.items():
                found[temperature, name].append(trial(text, rows, replace(sampling, seed=own), lookahead))
            progress()
    return found


def settings(rules: Iterable[str], temperatures: Iterable[float]) -> dict[float, dict[str, Sampling]]:
    """What is measured at each temperature, by name."""
    return {
        temperature: {rule if temperature else ANY: Sampling(temperature, rule=rule) for rule in rules}
        for temperature in temperatures
    }


def check(prompts: int, tokens: int, lookahead: int) -> None:
    if prompts < 2:
        raise ValueError(f"{prompts} prompt: an interval needs at least 2")
    if lookahead < 1:
        raise ValueError(f"lookahead {lookahead}: must be at least 1")
    if tokens < lookahead:
        raise ValueError(f"tokens {tokens}: must be at least the lookahead, {lookahead}")


def written(
    target: Backend,
    drafter: Backend,
    prompt: Tokens,
    tokens: int,
    ends: Collection[int],
    sampling: Sampling,
) -> WrittenText:
    return WrittenText(target, drafter, prompt, tuple(decode(SamplingModel(target), prompt, tokens, ends, sampling)))


def trial(text: WrittenText, rows: tuple[Array, Array], sampling: Sampling, lookahead: int) -> RuleTrial:
    """Ask one rule about one text, whose rows these are."""
    blocks = [block(text, start, sampling, lookahead) for start in text.starts(lookahead)]
    together = RuleTrial(
        blocks=tuple(stood for stood, _ in blocks),
        block_promises=tuple(promise for _, promise in blocks if promise is not None),
    )
    if sampling.needs_draft and sampling.rule == "block":
        return together
    start, pairs = len(text.prompt), list(odds(*rows, sampling))
    guesses = [guess(row, sampling, start + i) for i, row in enumerate(rows[1])]
    return replace(
        together,
        hits=tuple(
            token in ids(about) for token, about in zip(verify_block(rows[0], sampling, start, guesses), guesses)
        ),
        promises=tuple(promise(p, q, sampling) for p, q in pairs),
        ceilings=tuple(rejection_acceptance_rate(p, q) for p, q in pairs),
    )


def block(text: WrittenText, start: int, sampling: Sampling, lookahead: int) -> tuple[int, float | None]:
    """How many guesses of a block that begins here stand, and how many theory lets expect."""
    known, rows, guesses = [*text.prompt, *text.truth][:start], [], []
    for position in range(start, start + lookahead):
        [row] = text.drafter.forward(known, position, NEVER)
        about = guess(row, sampling, position, start)
        rows.append(row)
        guesses.append(about)
        known.append(ids(about)[0])
    judging = text.target.forward(known[:-1], start, NEVER)
    found = verify_block(judging, sampling, start, guesses)
    pairs = list(odds(judging, rows, sampling))
    return stood(found, guesses), expected(pairs, found, guesses, sampling) if pairs else None


def guess(row: Array, sampling: Sampling, position: int, start: int = 0) -> Guesses:
    """What a drafter's server says of a place."""
    if not sampling.needs_draft:
        return tuple((token, None) for token in match([row], sampling, position))
    tokens, odds = draw_guesses(row, sampling, position, start)
    return tuple((token, odds) for token in tokens)


def ids(about: Guesses) -> list[int]:
    return [token for token, _ in about]


def stood(found: Tokens, guesses: Sequence[Guesses]) -> int:
    """Guesses that became text; after one that is not the drafter's first, nothing goes on.

    A correction is never a token that was guessed for its place: what is left over has none of it.
    """
    firsts = followed(found, guesses)
    others = ids(guesses[firsts])[1:] if firsts < len(guesses) else []
    return firsts + (firsts < len(found) and found[firsts] in others)


def followed(found: Tokens, guesses: Sequence[Guesses]) -> int:
    """For how many places the text goes the drafter's way."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == ids(pair[1])[0], zip(found, guesses)))


def odds(target: Iterable[Array], drafter: Iterable[Array], sampling: Sampling) -> Iterator[tuple[Array, Array]]:
    """Both models' probabilities, place by place; none where chance has no part."""
    if sampling.temperature:
        for p, q in zip(target, drafter):
            yield probabilities(p, sampling), probabilities(q, sampling)


def promise(p: Array, q: Array, sampling: Sampling) -> float:
    """How likely a place is to be guessed: with several guesses, each meets what the last ones left over."""
    if sampling.rule == "match":
        return match_acceptance_rate(p, q)
    missed = 1.0
    for _ in range(sampling.num_candidates):
        missed *= 1 - rejection_acceptance_rate(p, q)
        p = residual(p, *residual_weights(p, 0, q))
    return 1 - missed


def expected(
    pairs: Sequence[tuple[Array, Array]], found: Tokens, guesses: Sequence[Guesses], sampling: Sampling
) -> float:
    """How many guesses of a block should stand, on average over what chance decides last.

    Under `block` each start of these guesses stands with its chance (Sun et al., 2025). Under the other rules
    each place that judging came to keeps its promise: the mean is the same as that of the count.
    """
    if sampling.rule == "block":
        known = [(ids(about)[0], q) for about, (_, q) in zip(guesses, pairs)]
        return sum(prefix_acceptance([p for p, _ in pairs], known)[1:])
    return sum(promise(p, q, sampling) for p, q in pairs[: followed(found, guesses) + 1])


def summary(temperature: float, rule: str, found: Sequence[RuleTrial]) -> Accepted:
    blocks = [each.blocks for each in found]
    if not any(blocks):
        raise ValueError(f"{len(found)} texts: each ended before its first block")
    hits = [each.hits for each in found]
    return Accepted(
        rule,
        Sampling(temperature, rule="match" if rule == ANY else rule).num_candidates,
        temperature,
        Figure.share(hits) if any(hits) else None,
        mean(each.promises for each in found),
        mean(each.ceilings for each in found),
        Figure.of(blocks),
        mean(each.block_promises for each in found),
    )


def mean(texts: Iterable[Iterable[float]]) -> float | None:
    every = [number for each in texts for number in each]
    return fmean(every) if every else None
