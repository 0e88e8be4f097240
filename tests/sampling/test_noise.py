import math

import numpy as np
import pytest
import torch

from dsi.sampling.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, coin, exponential, key

NOISE_OF_SEED_1_AT_2 = [1.2983057316825584, 4.307674396442693, 0.6255722483402807, 0.674721475443079]
COINS_OF_SEED_1_AT_2 = [0.003914287572248987, 0.23385000027080893, 0.22623008455765026]
IDS = np.arange(50_000, dtype=np.int64)


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63, 2**64 + 5])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_numpy_and_torch_agree_to_the_bit(seed: int, position: int) -> None:
    ours = exponential(key(seed, position), IDS)
    theirs = exponential(key(seed, position), torch.from_numpy(IDS)).numpy()
    assert ours.dtype == theirs.dtype == np.float64
    assert np.array_equal(ours.view(np.int64), theirs.view(np.int64))


def test_the_noise_never_changes() -> None:
    """Texts of old seeds must come out the same in every later version."""
    assert key(1, 2) == key(1, 2, TOKEN, 0)
    assert exponential(key(1, 2), IDS[:4]).tolist() == NOISE_OF_SEED_1_AT_2
    assert [coin(key(1, 2, ACCEPT, block)) for block in range(3)] == COINS_OF_SEED_1_AT_2


def test_a_token_has_its_own_noise_whatever_the_vocabulary() -> None:
    whole = exponential(key(3, 4), IDS)
    assert exponential(key(3, 4), IDS[100:110]).tolist() == whole[100:110].tolist()


def test_the_noise_is_exponential() -> None:
    draws = np.concatenate([exponential(key(5, position), IDS) for position in range(20)])
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1, abs=5 / math.sqrt(len(draws)))
    ranks = np.sort(draws)
    distance = np.abs(-np.expm1(-ranks) - (np.arange(len(ranks)) + 0.5) / len(ranks)).max()
    assert distance < 1.95 / math.sqrt(len(ranks))  # Kolmogorov-Smirnov at 0.1%


def test_its_logarithm_is_right_to_the_last_bits() -> None:
    from dsi.sampling.noise import _minus_log

    u = np.concatenate([np.linspace(1e-9, 1 - 1e-9, 100_001), 2.0 ** -np.arange(1, 53), 1 - 2.0 ** -np.arange(1, 53)])
    exact = -np.log(u)
    assert np.abs(_minus_log(u) / exact - 1).max() < 1e-14


def test_seeds_positions_and_tokens_are_independent() -> None:
    keys = {key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200
    a, b = exponential(key(0, 0), IDS), exponential(key(0, 1), IDS)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(IDS))
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 5 / math.sqrt(len(IDS))


def test_purposes_and_blocks_are_independent() -> None:
    purposes = (TOKEN, DRAFT, ACCEPT, RESIDUAL)
    keys = {key(1, at, why, block) for at in range(100) for why in purposes for block in range(100)}
    assert len(keys) == 100 * 4 * 100
    draws = np.array([[coin(key(1, at, why, block)) for at in range(5_000)] for why in purposes for block in (0, 1)])
    noise = np.array([[exponential(key(1, at, ACCEPT), IDS[1:2])[0] for at in range(5_000)]])
    correlations = np.corrcoef(np.concatenate([draws, noise])) - np.eye(9)
    assert np.abs(correlations).max() < 5 / math.sqrt(5_000)


def test_a_coin_is_even_and_strictly_between_0_and_1() -> None:
    draws = np.sort([coin(key(7, position, ACCEPT)) for position in range(50_000)])
    assert np.abs(draws - (np.arange(50_000) + 0.5) / 50_000).max() < 1.95 / math.sqrt(50_000)
    # Every coin is an odd number of 2**-53, which a float64 holds exactly: 0 and 1 are none.
    assert {float(draw * 2**53) % 2 for draw in draws} == {1.0}
