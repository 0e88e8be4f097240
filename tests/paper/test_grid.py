"""The heatmaps' numbers: against single settings, and against what must hold over all of them."""

import numpy as np
import pytest

from dsi.paper.figures import columns, exceptions, figure2, figure3, table
from dsi.paper.grid import ACCEPTANCES, DRAFTERS, Grid, grid
from dsi.planning import theory
from dsi.planning.equation_1 import servers_needed
from dsi.planning.latency import LatencyModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Grid:
    return grid()


@pytest.mark.parametrize(("i", "j"), [(0, 41), (4, 80), (13, 95), (49, 20), (99, 100), (6, 0)])
def test_grid_cell_is_the_best_of_200_lookaheads(found: Grid, i: int, j: int) -> None:
    latencies, rate = LatencyModel(1, DRAFTERS[i]), float(ACCEPTANCES[j])
    si = [float(theory.si(100, latencies, rate, k)) for k in range(1, 201)]
    allowed = [k for k in range(1, 201) if servers_needed(1, DRAFTERS[i], k) <= 7]
    dsi = [float(theory.dsi(100, latencies, rate, k, 7)) for k in allowed]
    assert found.si.times[i, j] == pytest.approx(min(si), rel=1e-12)
    assert found.dsi.times[i, j] == pytest.approx(min(dsi), rel=1e-12)
    assert dsi[allowed.index(int(found.dsi.lookaheads[i, j]))] == pytest.approx(min(dsi), rel=1e-9)


def test_grid_dsi_is_never_slower_with_enough_targets(found: Grid) -> None:
    assert (found.dsi_enough.times <= found.baseline * (1 + 1e-9)).all()
    assert (found.dsi.times <= found.nonsi * (1 + 1e-9)).all()


def test_grid_dsi_with_any_lookahead_is_never_slower_at_sp_7(found: Grid) -> None:
    assert (found.dsi_any.times <= found.baseline * (1 + 1e-9)).all()
    assert (found.dsi_any.times <= found.dsi.times).all()
    assert (found.dsi.times / found.dsi_any.times).max() > 1.06  # Eq. (1) forbids what is best


def test_grid_exceptions_at_sp_7_are_few_and_with_the_fastest_drafter(found: Grid) -> None:
    lost = exceptions(found)
    assert {float(drafter) for drafter, _, _ in lost} == {0.01}
    assert 0.99 < min(speedup for _, _, speedup in lost) < 1
    assert figure2(found)["min_dsi"].slower == len(lost)


def test_grid_static_lookahead_is_5(found: Grid) -> None:
    i, j = 9, 60
    latencies, rate = LatencyModel(1, DRAFTERS[i]), float(ACCEPTANCES[j])
    assert found.si_static[i, j] == pytest.approx(float(theory.si(100, latencies, rate, 5)))
    assert found.dsi_static[i, j] == pytest.approx(float(theory.dsi(100, latencies, rate, 5, 7)))
    assert (figure3(found)["si_dsi"].ratios >= 1 - 1e-9).all()


def test_figures_table_has_a_line_for_each_cell(found: Grid) -> None:
    panel = figure2(found)["si_dsi"]
    head, *lines = table(panel, columns(found, "si_dsi", static=False)).splitlines()
    assert head == "drafter_latency,acceptance_rate,si_time,si_lookahead,dsi_time,dsi_lookahead,speedup"
    assert len(lines) == panel.ratios.size
    row = dict(zip(head.split(","), map(float, lines[101 * 9 + 60].split(","))))
    assert (row["drafter_latency"], row["acceptance_rate"]) == (0.1, 0.6)
    assert row["si_time"] / row["dsi_time"] == pytest.approx(row["speedup"], rel=1e-6)
    assert row["dsi_lookahead"] in np.arange(1, 201)
