"""Draft tokens that pay in forwards that requests share."""

from dataclasses import replace

import pytest

from dsi.core.spec import SpecConfig
from dsi.planning.latency import LatencyModel
from dsi.planning.shared_forwards import (
    DRAFT_MS,
    MAX_STEPS,
    STEPS_MS,
    TOKEN_SHARE,
    VERIFY_MS,
    Shape,
    chain,
    draft_ms,
    forward_ms,
    num_steps,
    shared_rows,
    shared_spec,
    tokens_per_ms,
)

# Nearly free up to 16 rows, then 0.2 ms for each.
CURVE = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6, 16: 2.4, 32: 5.6, 64: 12.0}
LATENCY = LatencyModel.measured(CURVE, 0.05)


CURVE_OF_A_SLOW_TARGET = {1: 20.0, 2: 20.2, 4: 20.4, 8: 21.0, 16: 22.0, 32: 30.0, 64: 60.0}


def block(requests: int, acceptance: float) -> int:
    """The draft tokens of a chain; 0: none."""
    return shared_spec(LATENCY, requests, acceptance).lookahead or 0


def test_shared_spec_speculates_less_with_the_load_down_to_plain_decoding() -> None:
    blocks = [block(requests, 0.8) for requests in (1, 2, 4, 8, 16, 64)]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] >= 4
    assert blocks[-1] == 0


def test_shared_spec_drafts_more_at_higher_acceptance_rates() -> None:
    assert block(4, 0.1) == 0
    assert block(4, 0.6) <= block(4, 0.95)


def test_shared_spec_has_smaller_trees_with_the_load_and_then_chains() -> None:
    latency = LatencyModel.measured(CURVE_OF_A_SLOW_TARGET, 1.0)
    specs = [shared_spec(latency, requests, 0.5, 0.5, tree=32) for requests in (1, 2, 4, 8, 16, 64)]
    sizes = [spec.tree for spec in specs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 12
    assert sizes[-1] == 0
    assert specs[-1] == SpecConfig("nonsi")
    assert shared_spec(latency, 1, 0.5, 0.5, tree=6).tree == 6  # as many as a request allows
    assert shared_spec(latency, 1, 0.5, 0.5).tree == 0
    assert shared_spec(latency, 1, 0.5, 0.0, tree=32).tree == 0  # runners-up that are never right


def test_tokens_per_ms_counts_nodes_of_trees_as_draft_tokens_of_chains() -> None:
    tree = Shape(SpecConfig("si", 1, tree=2), 2, 1.5, (1,))
    forwards = forward_ms(LATENCY, 4 * 3) + draft_ms(LATENCY, 4)
    assert tokens_per_ms(LATENCY, 4, tree) == pytest.approx(4 * 2.5 / (forwards + 4 * (VERIFY_MS + 2 * DRAFT_MS)))


def test_tokens_per_ms_hides_the_work_for_some_texts_behind_the_forward_of_others() -> None:
    latency = replace(LATENCY, shared_rows=16)
    plain, one = chain(0.8, 0), chain(0.8, 1)
    assert tokens_per_ms(latency, 8, one) == tokens_per_ms(LATENCY, 8, one)  # in one forward
    assert tokens_per_ms(latency, 32, plain) == pytest.approx(32 / (2 * forward_ms(LATENCY, 16)))
    slow = replace(latency, by_width=tuple((width, ms / 10) for width, ms in latency.by_width))
    assert tokens_per_ms(latency, 16, plain) == pytest.approx(16 / forward_ms(LATENCY, 16))  # on a device
    engine_ms = VERIFY_MS * (1 + (MAX_STEPS - 1) * TOKEN_SHARE)  # behind which the time of the forwards is hidden
    assert tokens_per_ms(slow, 32, plain) == pytest.approx(MAX_STEPS / engine_ms)
    assert tokens_per_ms(slow, 32, one) == pytest.approx(1.8 / (VERIFY_MS + DRAFT_MS))  # after each forward


def test_tokens_per_ms_counts_the_forwards_of_plain_decoding_that_follow_one_another() -> None:
    plain = chain(0.8, 0)
    forwards = MAX_STEPS * forward_ms(LATENCY, 4)
    handled = 4 * VERIFY_MS * (1 + (MAX_STEPS - 1) * TOKEN_SHARE)
    assert tokens_per_ms(LATENCY, 4, plain) == pytest.approx(4 * MAX_STEPS / (forwards + handled))
    slow = LatencyModel(STEPS_MS, 1.0)  # whose forwards are handled one by one
    assert tokens_per_ms(slow, 1, plain) == pytest.approx(1 / (STEPS_MS + VERIFY_MS))
    alone = replace(LATENCY, alone=LatencyModel(STEPS_MS / 2, 1.0))  # forwards that requests share use every core
    assert tokens_per_ms(alone, 1, plain) == pytest.approx(2 / (STEPS_MS + VERIFY_MS * (1 + TOKEN_SHARE)))


def test_tokens_per_ms_counts_what_the_engine_takes_for_a_forward_as_measured() -> None:
    latency, plain = LatencyModel(STEPS_MS / 2 + 1, 1.0, engine_ms=1.0), chain(0.8, 0)
    assert tokens_per_ms(latency, 1, plain) == pytest.approx(2 / (STEPS_MS + 1 + TOKEN_SHARE))
    one = tokens_per_ms(latency, 1, chain(0.8, 1))
    assert one == pytest.approx(1.8 / (forward_ms(latency, 2) + 1 + draft_ms(latency, 1) + DRAFT_MS))
    quick = replace(latency, engine_ms=VERIFY_MS / 2)  # it takes this at least
    assert tokens_per_ms(quick, 1, chain(0.8, 1)) == pytest.approx(
        1.8 / (forward_ms(quick, 2) + VERIFY_MS + draft_ms(quick, 1) + DRAFT_MS)
    )


def test_num_steps_is_bounded_by_their_time_and_their_number() -> None:
    assert num_steps(LATENCY, 1) == num_steps(LATENCY, 16) == MAX_STEPS
    assert [num_steps(LATENCY, rows) for rows in (32, 64, 1000)] == [7, 3, 1]  # of 5.6, 12 and about 186 ms
    for ms, steps in ((STEPS_MS / MAX_STEPS, MAX_STEPS), (STEPS_MS / 2, 2), (STEPS_MS, 1), (3 * STEPS_MS, 1)):
        assert num_steps(LatencyModel(ms, 1.0), 1) == steps
    assert num_steps(LatencyModel(STEPS_MS / 2 + 1, 1.0, engine_ms=1.0), 1) == 2  # the engine is not in between


def test_shared_rows_are_those_beyond_which_a_forward_takes_as_long_as_two() -> None:
    assert shared_rows(LATENCY) == 32  # at least
    assert shared_rows(LatencyModel.measured({1: 4.0, 64: 4.4, 128: 5.2, 256: 10.0}, 0.1)) == 128
    assert shared_rows(LatencyModel.measured({1: 4.0, 64: 4.4, 128: 5.2, 256: 8.0}, 0.1)) == 256


@pytest.mark.parametrize("requests", [1, 3, 8, 40])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_shared_spec_is_never_expected_to_be_slower_than_plain_decoding(requests: int, acceptance: float) -> None:
    best = chain(acceptance, block(requests, acceptance))
    assert tokens_per_ms(LATENCY, requests, best) >= tokens_per_ms(LATENCY, requests, chain(acceptance, 0))


def test_forward_ms_goes_on_along_the_last_line() -> None:
    assert forward_ms(LATENCY, 3) == 1.3
    assert forward_ms(LATENCY, 96) == pytest.approx(12 + 32 * (12 - 1.6) / 56)
    assert forward_ms(LatencyModel(2.0, 1.0, per_token_ms=0.5), 5) == pytest.approx(4.0)


def test_draft_ms_counts_rows_as_measured() -> None:
    measured = LatencyModel(2.0, 1.0, drafter_per_token_ms=0.25, drafter_shared_ms=0.5)
    assert (draft_ms(measured, 1), draft_ms(measured, 5)) == (1.5, 2.5)
    assert draft_ms(LatencyModel(2.0, 1.0), 5) == pytest.approx(1 + 4 * 0.4)
