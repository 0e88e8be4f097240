"""What each rule accepts where it is known: models of three tokens whose rows are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from dsi.core.messages import RULES, Sampling
from dsi.core.sequence import Tokens
from dsi.experiments.acceptance import Estimate
from dsi.experiments.by_rule import Accepted, RuleTrial, num_accepted, num_followed, promise, summary, trials
from dsi.models.protocol import CancelFlag
from dsi.sampling.acceptance_rules import match_acceptance_rate, prefix_acceptance, rejection_acceptance_rate

pytestmark = pytest.mark.slow

PROMPTS: list[Tokens] = [(0, 1, prompt % 3) for prompt in range(30)]
P, Q = (
    [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]],
    [[0.4, 0.2, 0.4], [0.5, 0.3, 0.2], [0.3, 0.6, 0.1]],
)
LOOKAHEAD = 3


@dataclass(frozen=True)
class Chain:
    """The row after a text is that of its last token."""

    table: Sequence[Sequence[float]]

    def forward(self, tokens: Sequence[int], start: int, cancelled: CancelFlag) -> Any:  # noqa: ARG002
        return np.log([self.table[tokens[i - 1]] for i in range(start, len(tokens) + 1)])


def measured(
    p: Any = P, q: Any = Q, *, rules: Sequence[str] = RULES, temperature: float = 1.0, tokens: int = 60
) -> dict[str, Accepted]:
    by_rule = trials(lambda: Chain(p), lambda: Chain(q), PROMPTS, tokens, rules, [temperature], LOOKAHEAD)
    return {rule: summary(temperature, rule, results) for (_, rule), results in by_rule.items()}


def shares() -> Any:
    """How often a long text of the target has each token last."""
    return np.linalg.matrix_power(np.array(P), 100)[0]


def expected_in_block(acceptance: Any, last: int) -> float:
    """Draft tokens accepted after `last`, by enumeration: `acceptance` gives the probability of each prefix."""
    total = 0.0
    for path in product(range(3), repeat=LOOKAHEAD):
        before = (last, *path[:-1])
        drawn = prod(Q[a][b] for a, b in zip(before, path))
        ps, qs = ([np.array(table[a]) for a in before] for table in (P, Q))
        total += drawn * sum(acceptance(ps, list(zip(path, qs))))
    return total


def rejecting(ps: Any, guesses: Any) -> list[float]:
    chances = [min(1.0, p[token] / q[token]) for p, (token, q) in zip(ps, guesses)]
    return [prod(chances[: i + 1]) for i in range(len(chances))]


@pytest.fixture(scope="module")
def chain() -> dict[str, Accepted]:
    return measured()


def test_trials_accept_as_often_as_theory_says(chain: dict[str, Accepted]) -> None:
    """By the text that a long run of the target has, not by the rows that the measurement saw."""
    rows = [(np.array(p), np.array(q)) for p, q in zip(P, Q)]
    for rule in ("match", "reject", "specinfer"):
        exact = sum(share * promise(p, q, Sampling(1.0, rule=rule)) for share, (p, q) in zip(shares(), rows))
        places = chain[rule].places
        assert places is not None
        assert places.count == 30 * 60
        assert places.low < exact < places.high
        assert places.high - places.low < 0.06
        assert chain[rule].promised == pytest.approx(exact, abs=0.02)
    assert (chain["block"].places, chain["block"].promised) == (None, None)


def test_block_lengths_agree_with_enumeration(chain: dict[str, Accepted]) -> None:
    for rule, prefixes in (("reject", rejecting), ("block", lambda *pair: prefix_acceptance(*pair)[1:])):
        exact = sum(share * expected_in_block(prefixes, last) for last, share in enumerate(shares()))
        accepted = chain[rule]
        assert accepted.blocks.count == 30 * 20
        assert accepted.blocks.low < exact < accepted.blocks.high
        assert accepted.block_promised == pytest.approx(exact, abs=0.1)


def test_trials_rank_the_targets_tokens_among_the_drafters_choices(chain: dict[str, Accepted]) -> None:
    match, places = chain["match"], chain["match"].places
    assert places is not None
    assert match.chances[0] == places.mean
    assert sum(match.rank_counts) == places.count  # there are three tokens, and three choices
    assert match.rank_counts[1] > match.rank_counts[2] > 0
    assert chain["reject"].rank_counts == chain["reject"].chances == ()


def test_trials_order_the_rules(chain: dict[str, Accepted]) -> None:
    promised = {rule: chain[rule].promised for rule in ("match", "reject", "specinfer")}
    assert list(promised) == sorted(promised, key=lambda rule: promised[rule] or 0)
    assert chain["reject"].ceiling == pytest.approx(promised["reject"])
    assert (chain["reject"].block_promised or 0) < (chain["block"].block_promised or 0)
    assert chain["reject"].blocks.mean < chain["block"].blocks.mean


def test_promise_is_each_rules_acceptance() -> None:
    p, q = np.array(P[0]), np.array(Q[0])
    assert promise(p, q, Sampling(1.0, rule="match")) == match_acceptance_rate(p, q)
    assert (
        promise(p, q, Sampling(1.0, rule="reject"))
        == pytest.approx(rejection_acceptance_rate(p, q))
        == pytest.approx(0.7)
    )
    # A second guess meets (2/3, 1/3, 0), of which q gives 0.4 and 0.2: 0.7 + 0.3 * 0.6.
    assert promise(p, q, Sampling(1.0, rule="specinfer")) == pytest.approx(0.88)
    assert promise(p, q, Sampling(1.0, rule="specinfer", candidates=1)) == pytest.approx(0.7)


def test_trials_accept_a_perfect_drafter() -> None:
    for accepted in measured(q=P, tokens=12).values():
        assert accepted.blocks == Estimate(3, 3, 3, 30 * 4)
        assert accepted.block_promised == pytest.approx(3)
        assert accepted.places is None or accepted.places.mean == 1


def test_trials_at_temperature_0_have_one_rule() -> None:
    """Greedily the text is 0, 0, 0 and so on, or 1 and 2 in turns, and the drafter errs after 2 alone."""
    drafter = [P[0], P[1], [0.8, 0.1, 0.1]]
    by_rule = measured(q=drafter, temperature=0, tokens=6)
    assert by_rule == measured(q=drafter, rules=["match"], temperature=0, tokens=6)
    [(name, one)] = by_rule.items()
    assert (name, one.promised, one.ceiling, one.block_promised) == ("any", None, None, None)
    assert one.places is not None
    assert one.places.mean == pytest.approx(2 / 3)
    assert one.blocks.mean == pytest.approx((3 + 3 + 1 + 0 + 0 + 1) / 6)


def test_trials_are_reproducible() -> None:
    first, again, colder = (measured(rules=["block"], temperature=t, tokens=12) for t in (1, 1, 0.7))
    assert first == again != colder


def test_block_ends_after_a_runner_up() -> None:
    guesses = [((7, None), (8, None)), ((9, None), (5, None)), ((1, None), (2, None))]
    for verified, firsts, count in (
        ((7, 9, 1), 3, 3),
        ((7, 9, 2), 2, 3),
        ((7, 5, 1), 1, 2),
        ((8, 9, 1), 0, 1),
        ((3, 9, 1), 0, 0),
        ((7,), 1, 1),
    ):
        assert (num_followed(verified, guesses), num_accepted(verified, guesses)) == (firsts, count)


def test_estimate_interval_is_by_text() -> None:
    assert Estimate.of_mean([[1, 1], [3, 3]]) == Estimate(2, 2 - 1.96, 2 + 1.96, 4)  # two texts: standard error 1
    assert Estimate.of_mean([[2, 1], [1, 2], []]) == Estimate(1.5, 1.5, 1.5, 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rules": ["guess"]}, "rule 'guess': must be one of match, reject, block, specinfer"),
        ({"temperature": -1}, "temperature -1: must be 0"),
        ({"tokens": 2}, "tokens 2: must be at least the lookahead, 3"),
    ],
)
def test_trials_refuse_impossible_settings(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        measured(**options)


def test_summary_refuses_texts_too_short_for_a_block() -> None:
    with pytest.raises(ValueError, match="2 texts: each ended before its first block"):
        summary(1.0, "block", [RuleTrial(), RuleTrial()])
    with pytest.raises(ValueError, match="lookahead 0: must be at least 1"):
        trials(lambda: Chain(P), lambda: Chain(Q), PROMPTS, 5, ["match"], [1.0], 0)
    with pytest.raises(ValueError, match="1 prompt: an interval needs at least 2"):
        trials(lambda: Chain(P), lambda: Chain(Q), PROMPTS[:1], 5, ["match"], [1.0], 3)
