from dsi.core.messages import Sampling
from dsi.experiments.compare import PROMPTS
from dsi.experiments.divergence import divergences


def test_float32_parts_nowhere() -> None:
    for sampling in (Sampling(), Sampling(0.8, top_p=0.95, seed=7)):
        found = divergences(12, "float32", sampling=sampling, prompts=PROMPTS[:3])
        assert {each["place"] for each in found} == {None}


def test_where_bfloat16_parts_the_margin_is_small() -> None:
    found = divergences(24, "bfloat16", prompts=PROMPTS[:2])
    parted = [each for each in found if each["place"] is not None]
    assert parted  # sixteen bits are not thirty-two
    assert all(0 <= each["margin"] < 0.5 for each in parted)
