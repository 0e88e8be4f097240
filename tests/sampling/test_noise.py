import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dsi.sampling.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, exponential, noise_key, race, race_of_rows, uniform

NOISE_OF_SEED_1_AT_2 = [1.2983057316825584, 4.307674396442693, 0.6255722483402807, 0.674721475443079]
UNIFORMS_OF_SEED_1_AT_2 = [0.003914287572248987, 0.23385000027080893, 0.22623008455765026]
IDS = np.arange(50_000, dtype=np.int64)


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63, 2**64 + 5])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_exponential_is_bit_identical_in_numpy_and_torch(seed: int, position: int) -> None:
    in_numpy = exponential(noise_key(seed, position), IDS)
    in_torch = exponential(noise_key(seed, position), torch.from_numpy(IDS)).numpy()
    assert in_numpy.dtype == in_torch.dtype == np.float64
    assert np.array_equal(in_numpy.view(np.int64), in_torch.view(np.int64))


def test_noise_never_changes_between_versions() -> None:
    """Texts of old seeds must come out the same in every later version."""
    assert noise_key(1, 2) == noise_key(1, 2, TOKEN, 0)
    assert exponential(noise_key(1, 2), IDS[:4]).tolist() == NOISE_OF_SEED_1_AT_2
    assert [uniform(noise_key(1, 2, ACCEPT, block)) for block in range(3)] == UNIFORMS_OF_SEED_1_AT_2


def test_exponential_of_a_token_is_independent_of_the_vocabulary() -> None:
    whole = exponential(noise_key(3, 4), IDS)
    assert exponential(noise_key(3, 4), IDS[100:110]).tolist() == whole[100:110].tolist()


def test_exponential_follows_its_distribution() -> None:
    draws = np.concatenate([exponential(noise_key(5, position), IDS) for position in range(20)])
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1, abs=5 / math.sqrt(len(draws)))
    ranks = np.sort(draws)
    distance = np.abs(-np.expm1(-ranks) - (np.arange(len(ranks)) + 0.5) / len(ranks)).max()
    assert distance < 1.95 / math.sqrt(len(ranks))  # Kolmogorov-Smirnov at 0.1%


def test_neg_log_is_accurate_to_the_last_bits() -> None:
    from dsi.sampling.noise import _neg_log

    u = np.concatenate([np.linspace(1e-9, 1 - 1e-9, 100_001), 2.0 ** -np.arange(1, 53), 1 - 2.0 ** -np.arange(1, 53)])
    exact = -np.log(u)
    assert np.abs(_neg_log(u) / exact - 1).max() < 1e-14


def test_noise_key_separates_seeds_positions_and_tokens() -> None:
    keys = {noise_key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200
    a, b = exponential(noise_key(0, 0), IDS), exponential(noise_key(0, 1), IDS)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(IDS))
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 5 / math.sqrt(len(IDS))


def test_noise_key_separates_purposes_and_blocks() -> None:
    purposes = (TOKEN, DRAFT, ACCEPT, RESIDUAL)
    keys = {
        noise_key(1, position, purpose, block)
        for position in range(100)
        for purpose in purposes
        for block in range(100)
    }
    assert len(keys) == 100 * 4 * 100
    draws = np.array(
        [
            [uniform(noise_key(1, position, purpose, block)) for position in range(5_000)]
            for purpose in purposes
            for block in (0, 1)
        ]
    )
    noise = np.array([[exponential(noise_key(1, position, ACCEPT), IDS[1:2])[0] for position in range(5_000)]])
    correlations = np.corrcoef(np.concatenate([draws, noise])) - np.eye(9)
    assert np.abs(correlations).max() < 5 / math.sqrt(5_000)


def test_uniform_is_uniform_on_the_open_interval() -> None:
    draws = np.sort([uniform(noise_key(7, position, ACCEPT)) for position in range(50_000)])
    assert np.abs(draws - (np.arange(50_000) + 0.5) / 50_000).max() < 1.95 / math.sqrt(50_000)
    # Every draw is an odd multiple of 2**-53, which a float64 holds exactly: 0 and 1 are not.
    assert {float(draw * 2**53) % 2 for draw in draws} == {1.0}


@given(st.integers(0, 2**64 - 1), st.integers(1, 300), st.integers(1, 5), st.integers(0, 2**32))
def test_race_is_won_by_the_largest_ratios_in_exact_arithmetic(key: int, size: int, count: int, seed: int) -> None:
    """Also where probabilities tie or are zero."""
    probs = np.random.default_rng(seed).choice([0.0, 0.1, 0.1, 0.25, 1.0], size)
    probs[seed % size] = 0.5
    ratios = probs / exponential(key, np.arange(size))
    count = min(count, size)
    expected = (-ratios).argsort(kind="stable")[:count].tolist()
    assert race(probs, key, count).tolist() == expected
    rows = torch.tensor(np.stack([probs, probs[::-1].copy()]))
    assert race_of_rows(rows, [key, key])[0] == expected[0]


def test_race_looks_closer_where_the_library_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its logarithm were wrong in the tenth digit."""
    probs, expected = np.full(1000, 1e-3), [int(race(np.full(1000, 1e-3), key)[0]) for key in range(50)]
    log, torch_log = np.log, torch.log
    monkeypatch.setattr(np, "log", lambda x: log(x) * (1 + 1e-10 * np.cos(np.arange(len(x)))))
    monkeypatch.setattr(torch, "log", lambda x: torch_log(x) * (1 + 1e-10 * torch.cos(torch.arange(x.shape[-1]))))
    assert [int(race(probs, key)[0]) for key in range(50)] == expected
    assert race_of_rows(torch.tensor(probs).expand(50, -1), list(range(50))) == tuple(expected)


def test_race_of_rows_takes_a_tie_of_many_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens are close than are looked at: here all seem to be."""
    monkeypatch.setattr("dsi.sampling.noise.LOG_ERROR", 1.0)
    probs = np.random.default_rng(3).random(40)
    expected = int((probs / exponential(7, np.arange(40))).argmax())
    assert race_of_rows(torch.tensor(probs)[None], [7]) == (expected,)


def test_race_refuses_what_is_no_number() -> None:
    probs = np.array([0.5, np.nan])
    for call in (lambda: race(probs, 1), lambda: race_of_rows(torch.tensor(probs)[None], [1])):
        with pytest.raises(ValueError, match="logits are not numbers"):
            call()


def test_race_of_no_rows_has_no_winners() -> None:
    assert race_of_rows(torch.empty(0, 5, dtype=torch.float64), []) == ()
