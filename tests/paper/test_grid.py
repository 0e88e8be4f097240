"""The heatmaps' numbers: against single settings, and against what must hold over all of them."""

import numpy as np
import pytest

from dsi.paper.figures import columns, exceptions, figure2, figure3, rows
from dsi.paper.grid import ACCEPTANCES, DRAFTERS, Grid, grid
from dsi.paper.output import to_csv
from dsi.planning import theory
from dsi.planning.equation_1 import servers_needed
from dsi.planning.latency import LatencyModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full_grid() -> Grid:
    return grid()


@pytest.mark.parametrize(("i", "j"), [(0, 41), (4, 80), (13, 95), (49, 20), (99, 100), (6, 0)])
def test_grid_cell_is_the_best_of_200_lookaheads(full_grid: Grid, i: int, j: int) -> None:
    latencies, rate = LatencyModel(1, DRAFTERS[i]), float(ACCEPTANCES[j])
    si = [float(theory.si(100, latencies, rate, k)) for k in range(1, 201)]
    allowed = [k for k in range(1, 201) if servers_needed(1, DRAFTERS[i], k) <= 7]
    dsi = [float(theory.dsi(100, latencies, rate, k, 7)) for k in allowed]
    assert full_grid.si.times[i, j] == pytest.approx(min(si), rel=1e-12)
    assert full_grid.dsi.times[i, j] == pytest.approx(min(dsi), rel=1e-12)
    assert dsi[allowed.index(int(full_grid.dsi.lookaheads[i, j]))] == pytest.approx(min(dsi), rel=1e-9)


def test_grid_dsi_is_never_slower_with_enough_targets(full_grid: Grid) -> None:
    assert (full_grid.dsi_enough.times <= full_grid.baseline * (1 + 1e-9)).all()
    assert (full_grid.dsi.times <= full_grid.nonsi * (1 + 1e-9)).all()


def test_grid_dsi_with_any_lookahead_is_never_slower_at_sp_7(full_grid: Grid) -> None:
    assert (full_grid.dsi_any.times <= full_grid.baseline * (1 + 1e-9)).all()
    assert (full_grid.dsi_any.times <= full_grid.dsi.times).all()
    assert (full_grid.dsi.times / full_grid.dsi_any.times).max() > 1.06  # Eq. (1) forbids what is best


def test_grid_exceptions_at_sp_7_are_few_and_with_the_fastest_drafter(full_grid: Grid) -> None:
    lost = exceptions(full_grid)
    assert {float(drafter) for drafter, _, _ in lost} == {0.01}
    assert 0.99 < min(speedup for _, _, speedup in lost) < 1
    assert figure2(full_grid)["min_dsi"].slower == len(lost)


def test_grid_static_lookahead_is_5(full_grid: Grid) -> None:
    i, j = 9, 60
    latencies, rate = LatencyModel(1, DRAFTERS[i]), float(ACCEPTANCES[j])
    assert full_grid.si_static[i, j] == pytest.approx(float(theory.si(100, latencies, rate, 5)))
    assert full_grid.dsi_static[i, j] == pytest.approx(float(theory.dsi(100, latencies, rate, 5, 7)))
    assert (figure3(full_grid)["si_dsi"].ratios >= 1 - 1e-9).all()


def test_figures_table_has_a_line_for_each_cell(full_grid: Grid) -> None:
    panel = figure2(full_grid)["si_dsi"]
    head, *lines = to_csv(rows(panel, columns(full_grid, "si_dsi", static=False))).decode().splitlines()
    assert head == "drafter_latency,acceptance_rate,si_time,si_lookahead,dsi_time,dsi_lookahead,speedup"
    assert len(lines) == panel.ratios.size
    row = dict(zip(head.split(","), map(float, lines[101 * 9 + 60].split(","))))
    assert (row["drafter_latency"], row["acceptance_rate"]) == (0.1, 0.6)
    assert row["si_time"] / row["dsi_time"] == pytest.approx(row["speedup"], rel=1e-6)
    assert row["dsi_lookahead"] in np.arange(1, 201)
