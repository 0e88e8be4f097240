from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsi.core.messages import Sampling
from dsi.sampling.logits import choose, noted, probabilities, ranked
from dsi.sampling.noise import double, exponential, key, namespace

LOGS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def shares(**settings: float) -> list[float]:
    sampling = Sampling(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    return [round(float(p), 4) for p in probabilities(LOGS, sampling)]


def test_temperature_sharpens_and_flattens() -> None:
    assert shares() == [0.5, 0.3, 0.15, 0.05]
    assert shares(temperature=0.5) == [0.6849, 0.2466, 0.0616, 0.0068]
    assert shares(temperature=1e6) == [0.25, 0.25, 0.25, 0.25]
    assert shares(temperature=1e-30) == shares(temperature=1e-60) == [1, 0, 0, 0]


def test_top_k_keeps_the_k_likeliest() -> None:
    assert shares(top_k=2) == [0.625, 0.375, 0, 0]
    assert shares(top_k=4) == shares(top_k=9) == shares()


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    assert shares(top_p=0.5) == [1, 0, 0, 0]
    assert shares(top_p=0.51) == shares(top_p=0.8) == [0.625, 0.375, 0, 0]
    assert shares(top_p=1e-9) == [1, 0, 0, 0]


def test_min_p_drops_what_is_far_below_the_likeliest() -> None:
    assert shares(min_p=0.29) == [0.5263, 0.3158, 0.1579, 0]
    assert shares(min_p=1) == [1, 0, 0, 0]


def test_filters_apply_in_order() -> None:
    """top-p counts shares of what top-k left: 0.625 alone does not reach 0.63, and did not reach 0.5."""
    assert shares(top_k=2, top_p=0.63) == [0.625, 0.375, 0, 0]
    assert shares(top_k=2, top_p=0.62) == [1, 0, 0, 0]


def test_ties_stay_together() -> None:
    flat = np.zeros(4, dtype=np.float32)
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.3), Sampling(1.0, min_p=1.0)):
        assert probabilities(flat, sampling).tolist() == [0.25] * 4


@pytest.mark.parametrize("k", [1, 2, 50, 299])
def test_top_k_is_the_same_to_the_bit_as_by_a_sort(k: int) -> None:
    scores = np.random.default_rng(k).normal(0, 3, 300).round(1).astype(np.float32)  # with ties
    for row in (scores, torch.from_numpy(scores)):
        weights = namespace(row).exp(double(row - row.max()))
        kept = weights / weights.sum()
        kept = kept * (kept >= sorted(kept.tolist())[-k])
        kept = kept / kept.sum()
        assert probabilities(row, Sampling(1.0, top_k=k)).tolist() == (kept / kept.sum()).tolist()


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 3),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
    seed=st.integers(-(2**63), 2**64),
)


@given(samplings, st.integers(0, 10**6), st.integers(0, 2**32))
def test_numpy_and_torch_choose_the_same_token(sampling: Sampling, position: int, seed: int) -> None:
    scores = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    assert choose(scores, sampling, position) == choose(torch.from_numpy(scores), sampling, position)


@given(samplings, st.integers(0, 2**32))
def test_probabilities_are_a_distribution_over_allowed_tokens(sampling: Sampling, seed: int) -> None:
    scores = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    probs = probabilities(scores, sampling)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    assert probs.argmax() == scores.argmax()
    assert sampling.top_k == 0 or (probs > 0).sum() <= sampling.top_k


def test_greedy_takes_the_highest_score_whatever_the_seed() -> None:
    assert {choose(LOGS, Sampling(seed=seed), 3) for seed in range(20)} == {0}


def test_an_impossible_token_is_never_chosen() -> None:
    scores = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    assert {choose(scores, Sampling(1.0, seed=s), 0) for s in range(200)} == {0, 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]


floats = st.integers(-600, 600).map(lambda sixty_fourths: sixty_fourths / 64)  # no nearer than rounding is


@given(
    st.lists(floats, min_size=2, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 2**40),
    st.integers(0, 999),
)
def test_the_runner_up_is_who_wins_without_the_winner(
    scores: list[float], temperature: float, seed: int, position: int
) -> None:
    sampling, row = Sampling(temperature, seed=seed), np.array(scores, np.float32)
    first, second = ranked(row, sampling, position, 2, 0.0)
    assert first == choose(row, sampling, position)
    assert ranked(torch.from_numpy(row), sampling, position, 2, 0.0) == (first, second)
    row[first] = -np.inf
    assert second == choose(row, sampling, position)


def test_a_runner_up_counts_only_if_it_came_close() -> None:
    greedy, warm = Sampling(), Sampling(1.0, seed=3)
    assert ranked(LOGS, greedy, 0, 9, 0.0) == (0, 1, 2, 3)
    assert ranked(LOGS, greedy, 0, 9, 0.29) == (0, 1, 2)
    assert ranked(LOGS, greedy, 0, 2, 0.29) == (0, 1)
    assert ranked(LOGS, greedy, 0, 2, 0.61) == (0,)
    marks = np.exp(LOGS) / exponential(key(3, 5), np.arange(4))
    order = np.argsort(-marks)
    share = float(marks[order[1]] / marks[order[0]])
    assert ranked(LOGS, warm, 5, 2, share * 0.99) == tuple(order[:2])
    assert ranked(LOGS, warm, 5, 2, share * 1.01) == (order[0],)


def test_an_impossible_token_is_no_runner_up() -> None:
    assert ranked(LOGS, Sampling(1.0, top_k=1), 0, 3, 0.0) == (0,)


@pytest.mark.parametrize("rows", [LOGS[None], torch.tensor(LOGS)[None]], ids=["numpy", "torch"])
def test_a_note_names_the_likeliest_tokens_and_those_that_are_asked_about(rows: Any) -> None:
    [note] = noted(rows + 7, 2, [(3, 0)])
    assert [token for token, _ in note] == [0, 1, 3]
    assert [round(float(np.exp(log)), 4) for _, log in note] == [0.5, 0.3, 0.05]
    assert noted(rows, 0, [(2,)])[0][0][0] == 2
