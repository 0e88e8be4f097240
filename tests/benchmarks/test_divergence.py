import pytest

from divergence import divergences
from dsi.core.messages import Sampling
from dsi.experiments.compare import PROMPTS

pytestmark = pytest.mark.slow


def test_divergences_finds_none_in_float32() -> None:
    for sampling in (Sampling(), Sampling(0.8, top_p=0.95, seed=7)):
        rows = divergences(12, "float32", sampling=sampling, prompts=PROMPTS[:3])
        assert {row["place"] for row in rows} == {None}


def test_divergences_finds_bfloat16_and_its_small_margins() -> None:
    rows = divergences(24, "bfloat16", prompts=PROMPTS[:2])
    different = [row for row in rows if row["place"] is not None]
    assert different  # sixteen bits are not thirty-two
    assert all(0 <= row["margin"] < 0.5 for row in different)
