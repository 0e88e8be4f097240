from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dsi.core.messages import Sampling
from dsi.sampling.logits import greedy_top_k, probabilities, sample, top_k_tokens, top_logprobs, weights_of_rows
from dsi.sampling.noise import array_namespace, exponential, float64, noise_key, race_of_rows

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def rounded_probabilities(**settings: float) -> list[float]:
    sampling = Sampling(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    return [round(float(p), 4) for p in probabilities(LOGITS, sampling)]


def test_temperature_sharpens_and_flattens() -> None:
    assert rounded_probabilities() == [0.5, 0.3, 0.15, 0.05]
    assert rounded_probabilities(temperature=0.5) == [0.6849, 0.2466, 0.0616, 0.0068]
    assert rounded_probabilities(temperature=1e6) == [0.25, 0.25, 0.25, 0.25]
    assert rounded_probabilities(temperature=1e-30) == rounded_probabilities(temperature=1e-60) == [1, 0, 0, 0]


def test_top_k_keeps_the_k_likeliest() -> None:
    assert rounded_probabilities(top_k=2) == [0.625, 0.375, 0, 0]
    assert rounded_probabilities(top_k=4) == rounded_probabilities(top_k=9) == rounded_probabilities()


def test_top_p_keeps_the_smallest_set_reaching_p() -> None:
    assert rounded_probabilities(top_p=0.5) == [1, 0, 0, 0]
    assert rounded_probabilities(top_p=0.51) == rounded_probabilities(top_p=0.8) == [0.625, 0.375, 0, 0]
    assert rounded_probabilities(top_p=1e-9) == [1, 0, 0, 0]


def test_min_p_drops_tokens_far_below_the_likeliest() -> None:
    assert rounded_probabilities(min_p=0.29) == [0.5263, 0.3158, 0.1579, 0]
    assert rounded_probabilities(min_p=1) == [1, 0, 0, 0]


def test_probabilities_apply_filters_in_order() -> None:
    """top-p counts probabilities after top-k: 0.625 alone does not reach 0.63, and did not reach 0.5."""
    assert rounded_probabilities(top_k=2, top_p=0.63) == [0.625, 0.375, 0, 0]
    assert rounded_probabilities(top_k=2, top_p=0.62) == [1, 0, 0, 0]


def test_probabilities_keep_ties() -> None:
    flat = np.zeros(4, dtype=np.float32)
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.3), Sampling(1.0, min_p=1.0)):
        assert probabilities(flat, sampling).tolist() == [0.25] * 4


@pytest.mark.parametrize("k", [1, 2, 50, 299])
def test_top_k_is_bit_identical_to_a_full_sort(k: int) -> None:
    logits = np.random.default_rng(k).normal(0, 3, 300).round(1).astype(np.float32)  # with ties
    for row in (logits, torch.from_numpy(logits)):
        weights = array_namespace(row).exp(float64(row - row.max()))
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
def test_sample_agrees_in_numpy_and_torch(sampling: Sampling, position: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    assert sample(logits, sampling, position) == sample(torch.from_numpy(logits), sampling, position)


@given(samplings, st.integers(0, 10**6), st.integers(0, 2**32))
def test_rows_at_once_give_the_samples_of_each(sampling: Sampling, position: int, seed: int) -> None:
    """As on a device, where top-p is left to each row."""
    sampling = replace(sampling, top_p=1.0)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (3, 50)).astype(np.float32))
    keys = [noise_key(sampling.seed, position + i) for i in range(3)]
    expected = tuple(sample(row, sampling, position + i) for i, row in enumerate(logits))
    assert race_of_rows(weights_of_rows(logits, sampling), keys) == expected


@given(samplings, st.integers(0, 2**32))
def test_probabilities_are_a_distribution_over_allowed_tokens(sampling: Sampling, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    probs = probabilities(logits, sampling)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    assert probs.argmax() == logits.argmax()
    assert sampling.top_k == 0 or (probs > 0).sum() <= sampling.top_k


def test_sample_greedy_ignores_the_seed() -> None:
    assert {sample(LOGITS, Sampling(seed=seed), 3) for seed in range(20)} == {0}


def test_sample_never_returns_impossible_tokens() -> None:
    logits = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    assert {sample(logits, Sampling(1.0, seed=s), 0) for s in range(200)} == {0, 2}


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
def test_sampling_refuses_invalid_settings_by_name(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]


floats = st.integers(-600, 600).map(lambda sixty_fourths: sixty_fourths / 64)  # no nearer than rounding is


@given(
    st.lists(floats, min_size=2, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 2**40),
    st.integers(0, 999),
)
def test_top_k_tokens_gives_the_sample_without_the_first(
    logits: list[float], temperature: float, seed: int, position: int
) -> None:
    sampling, row = Sampling(temperature, seed=seed), np.array(logits, np.float32)
    first, second = top_k_tokens(row, sampling, position, 2)
    assert first == sample(row, sampling, position)
    assert top_k_tokens(torch.from_numpy(row), sampling, position, 2) == (first, second)
    row[first] = -np.inf
    assert second == sample(row, sampling, position)


@given(st.lists(st.permutations([-np.inf, -3, 0, 0.5, 2]), min_size=1), st.data())
def test_greedy_top_k_gives_the_top_k_tokens_of_each_row(rows: list[list[float]], data: st.DataObject) -> None:
    logits = np.array([[9.5, *row] for row in rows], np.float32)
    counts = [data.draw(st.integers(1, 7)) for _ in rows]
    expected = [top_k_tokens(row, Sampling(), 0, count) for row, count in zip(logits, counts)]
    for array in (logits, torch.from_numpy(logits)):
        assert greedy_top_k([array[:1], array[1:]], counts) == expected
        assert greedy_top_k([array], counts) == expected


def test_top_k_tokens_are_in_order() -> None:
    assert top_k_tokens(LOGITS, Sampling(), 0, 9) == (0, 1, 2, 3)
    assert top_k_tokens(LOGITS, Sampling(), 0, 2) == (0, 1)
    weights = np.exp(LOGITS) / exponential(noise_key(3, 5), np.arange(4))
    assert top_k_tokens(LOGITS, Sampling(1.0, seed=3), 5, 3) == tuple(np.argsort(-weights)[:3])


def test_top_k_tokens_excludes_impossible_tokens() -> None:
    assert top_k_tokens(LOGITS, Sampling(1.0, top_k=1), 0, 3) == (0,)


@pytest.mark.parametrize("logits", [LOGITS[None], torch.tensor(LOGITS)[None]], ids=["numpy", "torch"])
def test_top_logprobs_include_the_likeliest_and_the_required(logits: Any) -> None:
    [logprobs] = top_logprobs(logits + 7, 2, [(3, 0)])
    assert [token for token, _ in logprobs] == [0, 1, 3]
    assert [round(float(np.exp(log)), 4) for _, log in logprobs] == [0.5, 0.3, 0.05]
    assert top_logprobs(logits, 0, [(2,)])[0][0][0] == 2
