"""Count how many draft tokens each acceptance rule accepts, beside what theory promises for the same logits.

For each prompt and temperature the target generates one text with its own seed. Then every rule verifies,
with the functions and the keyed noise that servers use:

- at each position of the text: tokens drafted from the drafter's logits after the target's text, and counts
  whether one of them is accepted. `block` verifies no single position and has no such figure.
- at every `lookahead`-th position: a block of tokens that the drafter generates autoregressively, and counts
  how many of them are accepted. Blocks that would be longer than the text are left out.

So all rules see the same positions, and none depends on a text of its own. Nothing here is timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from statistics import fmean
from typing import Any

from dsi.core.messages import DraftToken, Sampling
from dsi.core.progress import Progress, no_progress
from dsi.core.sequence import Tokens
from dsi.engine.trial import NUM_CHOICES, count_ranks, decode, rank_of
from dsi.experiments.acceptance import Estimate
from dsi.models.protocol import NEVER, Backend, SamplingModel
from dsi.sampling.acceptance_rules import (
    match,
    match_acceptance_rate,
    prefix_acceptance,
    rejection_acceptance_rate,
    residual,
    residual_weights,
)
from dsi.sampling.logits import probabilities, top_k_tokens
from dsi.sampling.noise import UINT64_MAX, Array, splitmix64
from dsi.sampling.verify import draw_guesses, verify_block

ANY = "any"  # the rule at temperature 0, where all rules are the same
BackendFactory = Callable[[], Backend]  # returns the backend with an empty KV cache
Candidates = tuple[DraftToken, ...]  # for one position; the drafter continues after the first of them


@dataclass(frozen=True)
class RuleTrial:
    """One rule on one text: what was accepted, and what theory promises."""

    hits: tuple[bool, ...] = ()  # by position; none under `block`
    promises: tuple[float, ...] = ()
    ceilings: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    block_promises: tuple[float, ...] = ()
    ranks: tuple[int | None, ...] = ()  # of each token among the drafter's choices, under `match`; None: not among them


@dataclass(frozen=True)
class Accepted:
    """One rule at one temperature; the promised rates are None at temperature 0."""

    rule: str
    guesses: int  # candidates at each position
    temperature: float
    places: Estimate | None  # accepted per position; None under `block`
    promised: float | None
    ceiling: float | None  # 1 - TV: no rule with one candidate accepts more
    blocks: Estimate  # accepted per block
    block_promised: float | None
    rank_counts: tuple[int, ...] = ()  # as in Acceptance; under the other rules the target's token has no rank

    @property
    def chances(self) -> tuple[float, ...]:
        """Return how often the target's token is the drafter's first choice, its second, and so on."""
        return tuple(count / self.places.count for count in self.rank_counts) if self.places else ()

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"chances": self.chances}


@dataclass(frozen=True)
class TargetText:
    """What the target generated alone, and both models to continue from any position of it."""

    target: Backend
    drafter: Backend
    prompt: Tokens
    tokens: Tokens

    def logits(self) -> tuple[Array, Array]:
        """Return the target's and the drafter's at every position: one forward each."""
        text, start = self.prompt + self.tokens[:-1], len(self.prompt)
        return self.target.forward(text, start, NEVER), self.drafter.forward(text, start, NEVER)

    def starts(self, lookahead: int) -> range:
        first = len(self.prompt)
        return range(first, first + len(self.tokens) - lookahead + 1, lookahead)


def trials(
    target: BackendFactory,
    drafter: BackendFactory,
    prompts: Sequence[Tokens],
    tokens: int,
    rules: Sequence[str],
    temperatures: Sequence[float],
    lookahead: int,
    ends: Collection[int] = (),
    seed: int = 0,
    progress: Progress = no_progress,
) -> dict[tuple[float, str], list[RuleTrial]]:
    """Return a trial per prompt, by temperature and rule."""
    samplings = settings(rules, temperatures)
    check(len(prompts), tokens, lookahead)
    results: dict[tuple[float, str], list[RuleTrial]] = defaultdict(list)
    for temperature, by_rule in samplings.items():
        for number, prompt in enumerate(prompts):
            own_seed = splitmix64(seed & UINT64_MAX) + number  # or prompts of one length would share their noise
            models, sampling = (target(), drafter()), Sampling(temperature, seed=own_seed)
            generated = tuple(decode(SamplingModel(models[0]), prompt, tokens, ends, sampling))
            text = TargetText(*models, prompt, generated)
            logits = text.logits()
            for name, sampling in by_rule.items():
                results[temperature, name].append(trial(text, logits, replace(sampling, seed=own_seed), lookahead))
            progress()
    return results


def settings(rules: Iterable[str], temperatures: Iterable[float]) -> dict[float, dict[str, Sampling]]:
    """Return the samplings of each temperature by rule; at temperature 0 all rules are one."""
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


def trial(text: TargetText, logits: tuple[Array, Array], sampling: Sampling, lookahead: int) -> RuleTrial:
    """Apply one rule to one text with these logits of both models."""
    blocks = [block(text, start, sampling, lookahead) for start in text.starts(lookahead)]
    by_block = RuleTrial(
        blocks=tuple(accepted for accepted, _ in blocks),
        block_promises=tuple(promised for _, promised in blocks if promised is not None),
    )
    if sampling.needs_draft and sampling.rule == "block":
        return by_block
    start, pairs = len(text.prompt), list(distributions(*logits, sampling))
    drafts = [draft(row, sampling, position) for position, row in enumerate(logits[1], start)]
    verified = verify_block(logits[0], sampling, start, drafts)
    return replace(
        by_block,
        hits=tuple(token in ids(candidates) for token, candidates in zip(verified, drafts)),
        promises=tuple(promise(p, q, sampling) for p, q in pairs),
        ceilings=tuple(rejection_acceptance_rate(p, q) for p, q in pairs),
        ranks=() if sampling.needs_draft else ranks(logits[1], verified, sampling, start),
    )


def ranks(logits: Array, verified: Tokens, sampling: Sampling, start: int) -> tuple[int | None, ...]:
    """Return the rank of each of the target's tokens among the choices that a tree would have there."""
    return tuple(
        rank_of(token, top_k_tokens(row, sampling, position, NUM_CHOICES))
        for position, (row, token) in enumerate(zip(logits, verified), start)
    )


def block(text: TargetText, start: int, sampling: Sampling, lookahead: int) -> tuple[int, float | None]:
    """Return how many tokens of a block that starts here are accepted, and how many theory promises."""
    prefix, draft_logits, drafts = [*text.prompt, *text.tokens][:start], [], []
    for position in range(start, start + lookahead):
        [row] = text.drafter.forward(prefix, position, NEVER)
        draft_logits.append(row)
        drafts.append(draft(row, sampling, position, start))
        prefix.append(drafts[-1][0][0])
    logits = text.target.forward(prefix[:-1], start, NEVER)
    verified = verify_block(logits, sampling, start, drafts)
    pairs = list(distributions(logits, draft_logits, sampling))
    return num_accepted(verified, drafts), block_promise(pairs, verified, drafts, sampling) if pairs else None


def draft(logits: Array, sampling: Sampling, position: int, start: int = 0) -> Candidates:
    """Return the draft tokens of a position as a drafter's server does."""
    if not sampling.needs_draft:
        return tuple((token, None) for token in match(logits[None], sampling, position))
    tokens, draft_probs = draw_guesses(logits, sampling, position, start)
    return tuple((token, draft_probs) for token in tokens)


def ids(candidates: Candidates) -> list[int]:
    return [token for token, _ in candidates]


def num_accepted(verified: Tokens, drafts: Sequence[Candidates]) -> int:
    """Count accepted draft tokens; the draft ends after one that is not the drafter's first candidate.

    A correction is never a candidate of its position: the residual distribution excludes them.
    """
    firsts = num_followed(verified, drafts)
    others = ids(drafts[firsts])[1:] if firsts < len(drafts) else []
    return firsts + (firsts < len(verified) and verified[firsts] in others)


def num_followed(verified: Tokens, drafts: Sequence[Candidates]) -> int:
    """Count the leading positions at which the drafter's first candidate is accepted."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == ids(pair[1])[0], zip(verified, drafts)))


def distributions(
    target: Iterable[Array], drafter: Iterable[Array], sampling: Sampling
) -> Iterator[tuple[Array, Array]]:
    """Yield both models' probabilities position by position; nothing at temperature 0."""
    if sampling.temperature:
        for p, q in zip(target, drafter):
            yield probabilities(p, sampling), probabilities(q, sampling)


def promise(p: Array, q: Array, sampling: Sampling) -> float:
    """Return the acceptance rate of a position in theory; each candidate meets the residual of those before it."""
    if sampling.rule == "match":
        return match_acceptance_rate(p, q)
    rejected = 1.0
    for _ in range(sampling.num_candidates):
        rejected *= 1 - rejection_acceptance_rate(p, q)
        p = residual(p, *residual_weights(p, 0, q))
    return 1 - rejected


def block_promise(
    pairs: Sequence[tuple[Array, Array]], verified: Tokens, drafts: Sequence[Candidates], sampling: Sampling
) -> float:
    """Return how many tokens of a block are accepted on average, given the draft.

    Under `block` each prefix of the draft is accepted with its probability (Sun et al., 2025). Under the other
    rules the promises of the positions that verification reached are added: their mean is that of the count.
    """
    if sampling.rule == "block":
        firsts = [(ids(candidates)[0], q) for candidates, (_, q) in zip(drafts, pairs)]
        return sum(prefix_acceptance([p for p, _ in pairs], firsts)[1:])
    return sum(promise(p, q, sampling) for p, q in pairs[: num_followed(verified, drafts) + 1])


def summary(temperature: float, rule: str, results: Sequence[RuleTrial]) -> Accepted:
    hits, blocks = [result.hits for result in results], [result.blocks for result in results]
    if not any(blocks):
        raise ValueError(f"{len(results)} texts: each ended before its first block")
    return Accepted(
        rule,
        Sampling(temperature, rule="match" if rule == ANY else rule).num_candidates,
        temperature,
        Estimate.of_rate(hits) if any(hits) else None,
        mean(result.promises for result in results),
        mean(result.ceilings for result in results),
        Estimate.of_mean(blocks),
        mean(result.block_promises for result in results),
        count_ranks(result.ranks for result in results) if any(result.ranks for result in results) else (),
    )


def mean(texts: Iterable[Iterable[float]]) -> float | None:
    values = list(chain.from_iterable(texts))
    return fmean(values) if values else None
