"""Rows of a comparison, from runs in virtual time whose every figure is known."""

import json

import pytest

from dsi.cli.output import comparison
from dsi.core.generation import Policy
from dsi.core.policies import autoregressive, distributed
from dsi.core.request import Completion, Request
from dsi.core.spec import SpecConfig
from dsi.experiments.compare import Comparison, row, specs
from dsi.fleets.loop import EngineLoop
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig


def texts(policy: Policy) -> list[Completion]:
    """The second has two rejections, the first has none."""
    rights = frozenset[int](), frozenset({5, 9})
    settings = [SimulationConfig(LatencyModel(20, 2), 1.0, 12, 20, rejected_positions=wrong) for wrong in rights]
    return [EngineLoop(setting.simulated(0)).run(Request((1, 2, 3), 20, policy))[0] for setting in settings]


def test_row_has_the_means_of_the_overlap() -> None:
    overlap = row(SpecConfig("dsi"), texts(distributed(1))).overlap
    assert (overlap["rejections"], overlap["lost_to_rejections_ms"]) == (1, 18_000)
    assert overlap["lost_per_rejection_ms"] == 18_000  # of those that there were, not of the texts
    assert overlap["hidden_share"] == pytest.approx((19 / 20 + 17 / 20) / 2)
    assert overlap["time_over_ideal"] == 1
    assert set(overlap["idle_share"]) == {*(f"target-{i}" for i in range(1, 13)), "drafter"}
    assert all(0 < share < 1 for share in overlap["idle_share"].values())


def test_comparison_prints_the_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(SpecConfig("nonsi"), texts(autoregressive())), row(SpecConfig("dsi"), texts(distributed(1)))]
    comparison(Comparison(rows, []), json=False)
    table = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert table["target forwards hidden"] == ["0%", "90%"]
    assert table["ms lost to each"] == ["-", "18000.0"]
    assert table["time over the ideal"] == ["1.00", "1.00"]
    assert table["idle: drafters (mean of 1)"][0] == "100%"  # thirteen servers are too many to list
    comparison(Comparison(rows, []), json=True)
    plain, dsi = json.loads(capsys.readouterr().out)["results"]
    assert plain["overlap"]["idle_share"]["target-1"] == 0
    assert dsi["overlap"]["rejections"] == 1


def test_specs_allow_auto_and_refuse_unknown_algorithms() -> None:
    assert specs(["si", "auto"], [3, 5]) == [SpecConfig("si", 3), SpecConfig("si", 5), SpecConfig("auto")]
    with pytest.raises(ValueError, match="algorithm 'magic': must be one of"):
        specs(["magic"], [3])
