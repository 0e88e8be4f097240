"""The toy models have exact acceptance rates, greedy or not."""

import math
from itertools import pairwise

import pytest

from dsi.core.messages import GREEDY, Sampling
from dsi.models.protocol import NEVER, ForwardRequest, SamplingModel
from dsi.models.toy import ToyDrafter, ToyTarget

WARM = Sampling(temperature=1.5, seed=4)
POSITIONS = 6000


def text(target: ToyTarget, length: int, sampling: Sampling = GREEDY) -> list[int]:
    tokens = [1]
    while len(tokens) < length:
        tokens += target.answer(ForwardRequest(tokens, len(tokens), sampling=sampling))
    return tokens


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_toy_drafter_agrees_at_its_acceptance(rate: float, sampling: Sampling) -> None:
    positions = POSITIONS if sampling is GREEDY else POSITIONS // 4
    target = ToyTarget(2)
    tokens = text(target, positions, sampling)
    guesses = ToyDrafter(target, rate, seed=3).answer(ForwardRequest(tokens, 1, sampling=sampling))
    agreed = sum(guess == token for guess, token in zip(guesses, tokens[1:])) / (positions - 1)
    assert agreed == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / positions) + 1e-9)


def test_toy_drafter_errors_are_independent_between_positions() -> None:
    target = ToyTarget(2)
    tokens = text(target, POSITIONS)
    drafter = ToyDrafter(target, 0.5, seed=3)
    errs = [drafter.errs(tokens, i) for i in range(POSITIONS)]
    in_a_row = sum(a and b for a, b in pairwise(errs)) / POSITIONS
    assert in_a_row == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / POSITIONS))


@pytest.mark.parametrize("seed", [-2, -1, 0, 3])
def test_toy_drafters_err_independently_of_each_other(seed: int) -> None:
    target = ToyTarget(2)
    tokens = text(target, POSITIONS)
    one, two = ToyDrafter(target, 0.5, seed), ToyDrafter(target, 0.5, seed + 1)
    both = sum(one.errs(tokens, i) and two.errs(tokens, i) for i in range(POSITIONS)) / POSITIONS
    assert both == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / POSITIONS))


@pytest.mark.parametrize("model", [ToyTarget(6), ToyDrafter(ToyTarget(6), 0.5, seed=1)])
def test_toy_greedy_answer_is_the_argmax_of_the_logits(model: ToyTarget | ToyDrafter) -> None:
    tokens = text(ToyTarget(6), 300)
    assert model.answer(ForwardRequest(tokens, 0)) == SamplingModel(model).answer(ForwardRequest(tokens, 0))
    logits = model.forward(tokens, 0, NEVER)
    assert len(logits) == 301


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_toy_answers_are_stateless(sampling: Sampling) -> None:
    tokens = text(ToyTarget(6), 40)
    for model in (ToyTarget(6), ToyDrafter(ToyTarget(6), 0.5)):
        whole = model.answer(ForwardRequest(tokens, 0, sampling=sampling))
        assert all(model.answer(ForwardRequest(tokens[:n], n, sampling=sampling)) == (whole[n],) for n in range(41))


def test_toy_drafter_refuses_an_impossible_rate() -> None:
    with pytest.raises(ValueError, match=r"acceptance 1\.5"):
        ToyDrafter(ToyTarget(), 1.5)


def test_toy_targets_of_different_seeds_differ() -> None:
    assert len({tuple(text(ToyTarget(seed), 30)) for seed in range(-5, 5)}) == 10


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_toy_runner_up_is_right_at_its_rate(sampling: Sampling) -> None:
    target = ToyTarget(3)
    drafter = ToyDrafter(target, 0.6, runner_up_acceptance=0.3)
    tokens = text(target, 3000, sampling)
    hits, wrong = 0, 0
    for i in range(1, len(tokens)):
        request = ForwardRequest(tokens[:i], i, sampling=sampling)
        first, second = drafter.top_k(request, 2)
        assert (first,) == drafter.answer(request)
        assert first != second
        wrong += first != tokens[i]
        hits += second == tokens[i]
    assert hits / wrong == pytest.approx(0.3, abs=0.05)
