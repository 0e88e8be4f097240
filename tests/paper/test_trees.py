"""The heatmaps of draft trees: against single settings, and against what must hold over all of them."""

from fractions import Fraction

import numpy as np
import pytest

from dsi.core.tree_shape import rank_chances
from dsi.paper.figures import rows
from dsi.paper.grid import ACCEPTANCES, DRAFTERS
from dsi.paper.output import to_csv
from dsi.paper.trees import BY_WIDTH, DEPTHS, SIZES, STEPS, TreeGrid, columns, panels, tree_grid
from dsi.planning import theory, tree_theory
from dsi.planning.latency import LatencyModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells() -> TreeGrid:
    steps: list[None] = []
    found = tree_grid(lambda: steps.append(None))
    assert len(steps) == STEPS
    return found


@pytest.mark.parametrize(("i", "j"), [(4, 63), (0, 93), (19, 40), (99, 80)])
def test_tree_grid_cell_is_the_best_of_all_trees(cells: TreeGrid, i: int, j: int) -> None:
    drafter, chances = DRAFTERS[i], rank_chances(float(ACCEPTANCES[j]), 0.5, 3)
    by_width, flat = LatencyModel(Fraction(1), drafter, by_width=BY_WIDTH), LatencyModel(1, drafter)
    si = [tree_theory.si(100, by_width, chances, size, depth) for size in SIZES for depth in DEPTHS if depth <= size]
    assert cells.si[i, j] == pytest.approx(min(si), rel=1e-12)
    assert cells.dsi[i, j] == pytest.approx(float(tree_theory.dsi_with_alternates(100, flat, chances, 1)), rel=1e-12)
    assert cells.dsi_unlimited[i, j] == pytest.approx(float(theory.dsi(100, flat, sum(chances), 1)), rel=1e-12)
    chains = (float(theory.si(100, flat, chances[0], k)) for k in range(1, 100))
    assert cells.chain[i, j] == pytest.approx(min(100, *chains, float(theory.dsi(100, flat, chances[0], 1))), rel=1e-9)


def test_tree_grid_dsi_is_never_slower_than_with_chains(cells: TreeGrid) -> None:
    assert (cells.dsi_unlimited <= cells.dsi * (1 + 1e-9)).all()
    assert (cells.dsi <= cells.chain * (1 + 1e-9)).all()
    assert (cells.dsi_unlimited <= cells.si * (1 + 1e-9)).all()


def test_tree_panels_show_where_trees_gain(cells: TreeGrid) -> None:
    speedups = {name: float(panel.ratios[4, 63]) for name, panel in panels(cells).items()}  # 5%, acceptance 0.63
    gains = {name: round(speedup, 2) for name, speedup in speedups.items()}
    assert gains == {"si_si": 1.68, "si": 1.38, "dsi": 1.81, "dsi_unlimited": 2.78}
    assert panels(cells)["si"].slower > 1000  # DSI with chains beats SI with trees where the acceptance rate is high


def test_tree_columns_have_the_times_of_a_panel(cells: TreeGrid) -> None:
    for name, panel in panels(cells).items():
        head, *lines = to_csv(rows(panel, columns(cells, name))).decode().splitlines()
        chain = "si_chain_time" if name == "si_si" else "chain_time"
        assert head == f"drafter_latency,acceptance_rate,{chain},tree_time,speedup"
        assert len(lines) == panel.ratios.size == len(DRAFTERS) * len(ACCEPTANCES)
        _, _, before, after, speedup = np.array(lines[1234].split(","), float)
        assert before / after == pytest.approx(speedup, rel=1e-6)
