"""Table 2, and the paper's own accounting beside it."""

from random import Random
from statistics import fmean

import pytest

from dsi.paper import forward_counts
from dsi.paper.table2 import PAIRS, line, paper_accounting, table2
from dsi.planning.latency import LatencyModel

# DSI over SI with the reference code's accounting in virtual time, its extra forward left out.
REFERENCE = (1.52, 1.50, 1.43, 1.41, 1.46, 1.41, 1.06, 1.04, 1.08, 1.04)


def played(latencies: LatencyModel, acceptance: float, lookahead: int, dice: Random) -> float:
    """SI by the paper's accounting, played out: 50 tokens, the target's own uncounted."""
    time = float(latencies.prefill_ms[0] - latencies.target_ms + latencies.prefill_ms[1] - latencies.drafter_ms)
    tokens = 0
    while True:
        run = 0
        while run < forward_counts.LONGEST_RUN and dice.random() < acceptance:
            run += 1
        while True:
            time += float(lookahead * latencies.drafter_ms + latencies.target_ms)
            tokens += min(run, lookahead)
            if tokens >= 50:
                return time
            if run < lookahead:
                break
            run -= lookahead
        time += float(latencies.target_ms)


@pytest.mark.parametrize(("acceptance", "lookahead"), [(0.6, 5), (0.93, 1), (0.9, 10)])
def test_forward_counts_agree_with_a_simulation(acceptance: float, lookahead: int) -> None:
    latencies = LatencyModel(30, 3, 90, 4)
    dice = Random(1)
    times = [played(latencies, acceptance, lookahead, dice) for _ in range(4000)]
    exact = forward_counts.si(50, latencies, acceptance, lookahead)
    assert fmean(times) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("pair", "reference"), list(zip(PAIRS, REFERENCE)), ids=lambda x: str(x)[:40])
def test_forward_counts_are_near_the_reference_code(pair: object, reference: float) -> None:
    [row] = [each for each in PAIRS if each is pair]
    assert paper_accounting(row, extra=False) == pytest.approx(reference, abs=0.11)
    assert paper_accounting(row, extra=True) > paper_accounting(row, extra=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 6])
def test_table2_line_is_consistent(number: int) -> None:
    row = line(PAIRS[number], repeats=60)
    assert row.simulated == pytest.approx(row.exact, rel=0.06)
    assert 1 < row.exact < row.published
    assert row.best_lookahead_dsi in PAIRS[number].allowed
    assert row.exact_minimal_lookahead >= row.exact * (1 - 1e-9)
    assert row.simulated_drafters[2] > row.exact


def test_table2_line_on_threads_has_little_overhead() -> None:
    row = line(PAIRS[0], repeats=2, real_time_repeats=1)
    assert row.waited is not None
    assert row.waited.speedup > 0
    assert min(row.waited.overhead_si, row.waited.overhead_dsi) > -0.02  # nothing is faster than virtual time


def test_table2_refuses_impossible_repeats() -> None:
    with pytest.raises(ValueError, match="repeats 0, on threads 1"):
        table2(0, 1)
