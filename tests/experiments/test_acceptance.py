"""Acceptance where it is known: drafters with a rate, with moods, and with texts that end."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from dsi.core.sequence import Tokens
from dsi.engine.trial import Trial, run_trial
from dsi.experiments.acceptance import (
    Acceptance,
    Share,
    acceptance,
    beyond,
    geometric,
    interval,
    steps,
    summary,
)
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyDrafter, ToyTarget

TARGET = ToyTarget(seed=5)
PROMPTS: list[Tokens] = [(1, 2, prompt) for prompt in range(40)]


class Counting:
    """Says how long the text is."""

    def answer(self, request: ForwardRequest) -> Tokens:
        return tuple(range(request.start, len(request.tokens) + 1))


@dataclass(frozen=True)
class Lucky:
    """Agrees with `Counting` at rates that take turns, each for a stretch of places; no two texts alike."""

    rates: tuple[float, ...]
    stretch: int = 16

    def answer(self, request: ForwardRequest) -> Tokens:
        return tuple(
            i if self.hits(request.tokens[2], i) else -1 for i in range(request.start, len(request.tokens) + 1)
        )

    def hits(self, prompt: int, i: int) -> bool:
        return Random(f"{prompt} {i}").random() < self.rates[i // self.stretch % len(self.rates)]


def measured(*rates: float, tokens: int = 256, prompts: list[Tokens] = PROMPTS) -> Acceptance:
    return acceptance(Counting, lambda: Lucky(rates), prompts, tokens)


@pytest.mark.parametrize("rate", [0.3, 0.63, 0.8, 0.93])
def test_a_known_rate_is_found_and_its_luck_has_no_memory(rate: float) -> None:
    found = measured(rate)
    assert found.places == 40 * 256
    assert found.low < rate < found.high
    assert found.high - found.low < 0.03
    assert found.geometric.p_value > 0.05
    assert found.geometric.verdict.startswith("the geometric law fits")
    for share in (found.after_acceptance, found.after_rejection):
        assert share.rate == pytest.approx(rate, abs=0.04)
    low, high = found.estimate_interval  # of one run of each text only
    assert low < rate < high
    assert high - low > 2 * (found.high - found.low)


def test_good_and_bad_stretches_are_seen() -> None:
    found = measured(0.95, 0.35)
    assert found.rate == pytest.approx(0.65, abs=0.02)
    assert found.geometric.p_value < 1e-6
    assert found.geometric.verdict.startswith("not geometric")
    assert found.after_acceptance.rate == pytest.approx(0.78, abs=0.05)
    assert found.after_rejection.rate == pytest.approx(0.42, abs=0.05)


def test_the_law_is_refused_as_seldom_as_chance_says() -> None:
    """Of 400 drafters without memory about one in twenty looks otherwise."""
    luck = Random(1)

    def refused() -> bool:
        texts = [[luck.random() < 0.8 for _ in range(100)] for _ in range(20)]
        return geometric(texts, sum(map(sum, texts)) / 2000).p_value < 0.05

    assert 8 <= sum(refused() for _ in range(400)) <= 34


def test_the_interval_holds_as_often_as_it_says() -> None:
    """Also where texts differ from one another, which a count of all places as independent would not see."""
    luck = Random(2)

    def held() -> bool:
        rates = [luck.choice((0.6, 0.9)) for _ in range(30)]
        texts = [[luck.random() < rate for _ in range(100)] for rate in rates]
        low, high = interval(texts, sum(map(sum, texts)) / 3000)
        return low < 0.75 < high

    assert 360 <= sum(held() for _ in range(400)) <= 396


def test_the_first_run_is_what_the_paper_counts() -> None:
    """The drafter's own text leaves the target's exactly where its first guess is rejected."""
    drafter = ToyDrafter(TARGET, 0.8)
    for prompt in PROMPTS:
        found = run_trial(lambda: TARGET, lambda: drafter, prompt, 64, ())
        assert found.matched == (*found.hits, False).index(False)


def test_texts_that_end_and_texts_that_agree_to_the_end() -> None:
    ends = {2 * i for i in range(4)}  # one token in eight
    found = acceptance(lambda: TARGET, lambda: ToyDrafter(TARGET, 1.0), PROMPTS, 16, ends)
    assert (found.whole, found.rate, found.corrected) == (40, 1.0, 1.0)
    assert 0 < found.ended < 40
    assert found.places == sum(found.matches) < 40 * 16
    assert found.estimate < 0.95  # the paper's takes every end for a rejection
    assert (found.low < 1, found.high) == (True, 1.0)
    assert found.after_rejection == Share(None, 0)
    assert found.geometric.verdict.startswith("too few rejections")


def test_a_drafter_that_is_never_right() -> None:
    found = measured(0.0, tokens=8)
    assert (found.rate, found.estimate, found.corrected, found.low) == (0, 0, 0, 0)
    assert found.json()["geometric"]["distance"] == 0


def test_runs_cut_off_by_the_end_of_a_text_are_no_rejections() -> None:
    found = steps([(True, True), (True, False, False)], 0.6)
    assert [(step.length, step.reached, step.ended) for step in found] == [(0, 3, 1), (1, 2, 1)]
    assert [step.survival for step in found] == [1, pytest.approx(2 / 3)]
    assert [step.law for step in found] == [1, 0.6]


def test_the_summary_of_two_texts() -> None:
    found = summary([Trial(1, (True, False, True), False), Trial(2, (True, True), True)])
    assert (found.matches, found.whole, found.ended, found.places, found.rate) == ((1, 2), 1, 1, 5, 0.8)
    assert (found.mean_match, found.estimate, found.corrected) == (1.5, 0.6, 0.75)
    assert (found.after_acceptance, found.after_rejection) == (Share(0.5, 2), Share(1.0, 1))


def test_chi_square_in_the_tables() -> None:
    assert [beyond(x, k) for x, k in ((3.84, 1), (11.07, 5), (31.41, 20))] == [pytest.approx(0.05, abs=0.003)] * 3


def test_one_prompt_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 prompt: an interval needs at least 2"):
        measured(0.5, prompts=PROMPTS[:1])
    with pytest.raises(ValueError, match="tokens 0: must be at least 1"):
        measured(0.5, tokens=0)
