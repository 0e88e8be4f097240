"""Draft tokens that pay in forwards that requests share."""

import pytest

from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import forward_ms, shared_block, tokens_per_ms

# Nearly free up to 16 rows, then 0.2 ms for each.
CURVE = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6, 16: 2.4, 32: 5.6, 64: 12.0}
LATENCY = LatencyModel.measured(CURVE, 0.05)


def test_shared_block_shrinks_with_the_load_down_to_plain_decoding() -> None:
    blocks = [shared_block(LATENCY, requests, 0.8) for requests in (1, 2, 4, 8, 16, 64)]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] >= 4
    assert blocks[-1] == 0


def test_shared_block_grows_with_the_acceptance_rate() -> None:
    assert shared_block(LATENCY, 4, 0.1) == 0
    assert shared_block(LATENCY, 4, 0.6) <= shared_block(LATENCY, 4, 0.95)


@pytest.mark.parametrize("requests", [1, 3, 8, 40])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_shared_block_is_never_expected_to_be_slower_than_plain_decoding(requests: int, acceptance: float) -> None:
    block = shared_block(LATENCY, requests, acceptance)
    assert tokens_per_ms(LATENCY, requests, acceptance, block) >= tokens_per_ms(LATENCY, requests, acceptance, 0)


def test_forward_ms_goes_on_along_the_last_line() -> None:
    assert forward_ms(LATENCY, 3) == 1.3
    assert forward_ms(LATENCY, 96) == pytest.approx(12 + 32 * (12 - 1.6) / 56)
    assert forward_ms(LatencyModel(2.0, 1.0, per_token_ms=0.5), 5) == pytest.approx(4.0)
