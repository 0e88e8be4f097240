"""The rule `match`: the text is the target's own, and acceptance is what theory says."""

import math

import numpy as np
import pytest

from dsi.core.messages import Sampling
from dsi.sampling.rules import match

DRAWS = 20_000


def drawn(row: np.ndarray, seed: int = 1) -> np.ndarray:
    """The tokens that one row of probabilities gives at many positions."""
    return np.array(match([np.log(row)] * DRAWS, Sampling(temperature=1.0, seed=seed), position=0))


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_follow_the_targets_distribution(seed: int) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.bincount(drawn(p, seed), minlength=4)
    chi_square = ((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom at 0.1%


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_two_models_agree_as_often_as_the_coupling_promises(seed: int) -> None:
    """Daliri, Musco and Suresh (2024): the sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i)."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    promised = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(6))
    agreed = (drawn(p) == drawn(q)).mean()
    assert agreed == pytest.approx(promised, abs=4 * math.sqrt(promised * (1 - promised) / DRAWS))
    distance = np.abs(p - q).sum() / 2
    assert promised >= (1 - distance) / (1 + distance)


def test_a_place_has_one_answer_whichever_block_it_is_judged_in() -> None:
    rows = np.random.default_rng(0).normal(size=(8, 20)).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=11)
    whole = match(rows, sampling, position=40)
    for start in range(8):
        assert match(rows[start:], sampling, position=40 + start) == whole[start:]
