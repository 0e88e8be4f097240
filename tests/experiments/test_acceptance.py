"""Acceptance of drafters with a given rate, with rates that change, and with texts that end."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from dsi.core.sequence import Tokens
from dsi.core.tree_shape import rank_chances
from dsi.engine.trial import Trial, run_trial
from dsi.experiments.acceptance import (
    Acceptance,
    Estimate,
    Share,
    acceptance,
    chi_square_p_value,
    geometric,
    hazard_steps,
    summary,
)
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyDrafter, ToyTarget

TARGET = ToyTarget(seed=5)
PROMPTS: list[Tokens] = [(1, 2, prompt) for prompt in range(40)]


class CountingTarget:
    """Says how long the text is."""

    def answer(self, request: ForwardRequest) -> Tokens:
        return tuple(range(request.start, len(request.tokens) + 1))


@dataclass(frozen=True)
class RandomDrafter:
    """Agrees with `CountingTarget` at rates that take turns, each for a stretch of places; no two texts alike."""

    rates: tuple[float, ...]
    stretch: int = 16

    def answer(self, request: ForwardRequest) -> Tokens:
        return tuple(
            i if self.hits(request.tokens[2], i) else -1 for i in range(request.start, len(request.tokens) + 1)
        )

    def hits(self, prompt: int, i: int) -> bool:
        return Random(f"{prompt} {i}").random() < self.rates[i // self.stretch % len(self.rates)]


def measured(*rates: float, tokens: int = 256, prompts: list[Tokens] = PROMPTS) -> Acceptance:
    return acceptance(CountingTarget, lambda: RandomDrafter(rates), prompts, tokens)


@pytest.mark.parametrize("rate", [0.3, 0.63, 0.8, 0.93])
def test_acceptance_recovers_a_given_rate_and_its_independence(rate: float) -> None:
    result = measured(rate)
    assert result.places == 40 * 256
    assert result.low < rate < result.high
    assert result.high - result.low < 0.03
    assert result.geometric.p_value > 0.05
    assert result.geometric.verdict.startswith("the geometric law fits")
    for share in (result.after_acceptance, result.after_rejection):
        assert share.rate == pytest.approx(rate, abs=0.04)
    low, high = result.estimate_interval  # of one run of each text only
    assert low < rate < high
    assert high - low > 2 * (result.high - result.low)


def test_acceptance_detects_rates_that_change() -> None:
    result = measured(0.95, 0.35)
    assert result.rate == pytest.approx(0.65, abs=0.02)
    assert result.geometric.p_value < 1e-6
    assert result.geometric.verdict.startswith("not geometric")
    assert result.after_acceptance.rate == pytest.approx(0.78, abs=0.05)
    assert result.after_rejection.rate == pytest.approx(0.42, abs=0.05)


def test_geometric_rejects_independence_at_its_level() -> None:
    """Of 400 drafters without memory about one in twenty looks otherwise."""
    rng = Random(1)

    def refused() -> bool:
        texts = [[rng.random() < 0.8 for _ in range(100)] for _ in range(20)]
        return geometric(texts, sum(map(sum, texts)) / 2000).p_value < 0.05

    assert 8 <= sum(refused() for _ in range(400)) <= 34


def test_estimate_interval_covers_at_its_level() -> None:
    """Also where texts differ from one another, which a count of all places as independent would not see."""
    rng = Random(2)

    def held() -> bool:
        rates = [rng.choice((0.6, 0.9)) for _ in range(30)]
        texts = [[rng.random() < rate for _ in range(100)] for rate in rates]
        rate = Estimate.of_rate(texts)
        return rate.low < 0.75 < rate.high

    assert 360 <= sum(held() for _ in range(400)) <= 396


def test_trial_matches_up_to_the_first_rejection() -> None:
    """The drafter's own text leaves the target's exactly where its first guess is rejected."""
    drafter = ToyDrafter(TARGET, 0.8)
    for prompt in PROMPTS:
        result = run_trial(lambda: TARGET, lambda: drafter, prompt, 64, ())
        assert result.matched == (*result.hits, False).index(False)


def test_acceptance_of_texts_that_end_or_agree_to_the_end() -> None:
    ends = {2 * i for i in range(4)}  # one token in eight
    result = acceptance(lambda: TARGET, lambda: ToyDrafter(TARGET, 1.0), PROMPTS, 16, ends)
    assert (result.whole, result.rate, result.corrected) == (40, 1.0, 1.0)
    assert 0 < result.ended < 40
    assert result.places == sum(result.matches) < 40 * 16
    assert result.estimate < 0.95  # the paper's takes every end for a rejection
    assert (result.low < 1, result.high) == (True, 1.0)
    assert result.after_rejection == Share(None, 0)
    assert result.geometric.verdict.startswith("too few rejections")


def test_acceptance_of_a_drafter_that_is_never_right() -> None:
    result = measured(0.0, tokens=8)
    assert (result.rate, result.estimate, result.corrected, result.low) == (0, 0, 0, 0)
    assert result.json()["geometric"]["distance"] == 0


def test_acceptance_counts_the_choices_by_rank() -> None:
    drafter = ToyDrafter(TARGET, 0.6, runner_up_acceptance=0.5)
    result = acceptance(lambda: TARGET, lambda: drafter, PROMPTS, 64)
    assert result.chances == pytest.approx(rank_chances(0.6, 0.5, 3), abs=0.03)
    assert result.chances[0] == result.rate
    assert [round(chance * result.places) for chance in result.json()["chances"]] == list(result.rank_counts)
    assert measured(0.6, tokens=8).rank_counts[1:] == (0, 0)  # a drafter without runners-up


def test_hazard_steps_do_not_count_censored_runs_as_rejections() -> None:
    result = hazard_steps([(True, True), (True, False, False)], 0.6)
    assert [(step.length, step.reached, step.ended) for step in result] == [(0, 3, 1), (1, 2, 1)]
    assert [step.survival for step in result] == [1, pytest.approx(2 / 3)]
    assert [step.law for step in result] == [1, 0.6]


def test_summary_of_two_texts() -> None:
    result = summary([Trial(1, (True, False, True), False), Trial(2, (True, True), True)])
    assert (result.matches, result.whole, result.ended, result.places, result.rate) == ((1, 2), 1, 1, 5, 0.8)
    assert (result.mean_match, result.estimate, result.corrected) == (1.5, 0.6, 0.75)
    assert (result.after_acceptance, result.after_rejection) == (Share(0.5, 2), Share(1.0, 1))


def test_chi_square_p_value_agrees_with_chi_square_tables() -> None:
    cases = ((3.84, 1), (11.07, 5), (31.41, 20))
    assert [chi_square_p_value(x, k) for x, k in cases] == [pytest.approx(0.05, abs=0.003)] * 3


def test_acceptance_refuses_one_prompt_or_no_tokens() -> None:
    with pytest.raises(ValueError, match="1 prompt: an interval needs at least 2"):
        measured(0.5, prompts=PROMPTS[:1])
    with pytest.raises(ValueError, match="tokens 0: must be at least 1"):
        measured(0.5, tokens=0)
