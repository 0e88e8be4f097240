import math

import numpy as np
import pytest
import torch

from dsi.sampling.noise import exponential, key

NOISE_OF_SEED_1_AT_2 = [1.2983057316825584, 4.307674396442693, 0.6255722483402807, 0.674721475443079]
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
    assert exponential(key(1, 2), IDS[:4]).tolist() == NOISE_OF_SEED_1_AT_2


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

    u = np.concatenate(
        [np.linspace(1e-9, 1 - 1e-9, 100_001), 2.0 ** -np.arange(1, 53), 1 - 2.0 ** -np.arange(1, 53)]
    )
    exact = -np.log(u)
    assert np.abs(_minus_log(u) / exact - 1).max() < 1e-14


def test_seeds_positions_and_tokens_are_independent() -> None:
    keys = {key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200
    a, b = exponential(key(0, 0), IDS), exponential(key(0, 1), IDS)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(IDS))
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 5 / math.sqrt(len(IDS))
