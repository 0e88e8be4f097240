"""Beyond the paper: its Figure 2 for draft trees, against the best that chains give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dsi.core.progress import Progress, no_progress
from dsi.core.tree_shape import rank_chances
from dsi.paper.grid import ACCEPTANCES, DRAFTERS, TOKENS, Table, grid
from dsi.planning import tree_theory
from dsi.planning.latency import LatencyModel
from dsi.plot.heatmap import Panel

RUNNER_UP, BRANCHES = 0.5, 3  # how often a further choice is right if those before it are wrong; choices at a place
SIZES, DEPTHS = (7, 15, 31, 63, 127), (1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 40, 99)  # of SI's trees
# Target forwards by their new tokens, in those of one token: a 7B model on a whole H200, bfloat16, as measured.
MS_BY_WIDTH = {1: 4.52, 8: 4.60, 16: 4.62, 32: 4.69, 64: 4.80, 128: 5.07}
BY_WIDTH = tuple((width, ms / MS_BY_WIDTH[1]) for width, ms in MS_BY_WIDTH.items())
STEPS = 2 * len(DRAFTERS) + len(ACCEPTANCES)  # reported as progress


@dataclass(frozen=True)
class TreeGrid:
    """Expected times of 100 tokens in target forwards: a row for each drafter latency, a column for each rate.

    DSI has lookahead 1 (chains: their best) and as many targets as can be of use. Only SI's trees pay for the width
    of their forwards.
    """

    chain: Table  # the fastest of non-SI, SI and DSI with chains
    si_chain: Table
    si: Table  # the best of SIZES and DEPTHS
    dsi: Table  # paths with at most one unverified alternate go on
    dsi_unlimited: Table  # every path goes on: no tree is faster


def tree_grid(progress: Progress = no_progress) -> TreeGrid:
    chains = grid(TOKENS, progress=progress)
    forwards = np.array(list(si_forwards(progress))).transpose(2, 1, 0)  # drafts or time, by tree, by rate
    chances = list(np.array([rank_chances(rate, RUNNER_UP, BRANCHES) for rate in ACCEPTANCES]).T)
    si, dsi, unlimited = [], [], []
    for drafter in DRAFTERS:
        latency = LatencyModel(1, drafter)
        si.append((forwards[0] * float(drafter) + forwards[1]).min(axis=0))
        dsi.append(tree_theory.dsi_with_alternates(TOKENS, latency, chances, 1))
        unlimited.append(tree_theory.dsi(TOKENS, latency, chances))
        progress()
    chain = np.minimum(chains.baseline, chains.dsi_enough.times)
    return TreeGrid(chain, chains.si.times, np.array(si), np.array(dsi), np.array(unlimited))


def si_forwards(progress: Progress) -> Iterator[list[tuple[float, float]]]:
    """For each acceptance rate, the drafter forwards and the time of the target forwards with every tree."""
    latency = LatencyModel(1, 1, by_width=BY_WIDTH)  # the counts do not depend on the drafter's latency
    for rate in ACCEPTANCES:
        chances = rank_chances(float(rate), RUNNER_UP, BRANCHES)
        yield [
            tree_theory.si_forwards(TOKENS, latency, chances, size, depth)
            for size in SIZES
            for depth in DEPTHS
            if depth <= size
        ]
        progress()


def panels(cells: TreeGrid) -> dict[str, Panel]:
    return {
        "si_si": Panel("(a) SI with trees over SI with chains", cells.si_chain / cells.si),
        "si": Panel("(b) SI with trees over the best with chains", cells.chain / cells.si),
        "dsi": Panel("(c) DSI, one alternate, over the best with chains", cells.chain / cells.dsi),
        "dsi_unlimited": Panel("(d) DSI, all paths, over the best with chains", cells.chain / cells.dsi_unlimited),
    }


HEADING = (
    f"Beyond the paper: draft trees, {BRANCHES} choices, each right half the time where those before it are wrong\n"
    f"exact expected times of {TOKENS} tokens; best with chains: the fastest of non-SI, SI and DSI"
)


def columns(cells: TreeGrid, name: str) -> Mapping[str, Table]:
    """The expected times, in target forwards, that a panel compares."""
    before = {"si_chain_time": cells.si_chain} if name == "si_si" else {"chain_time": cells.chain}
    return before | {"tree_time": cells.si if name == "si_si" else getattr(cells, name)}
