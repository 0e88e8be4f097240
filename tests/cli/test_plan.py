"""`dsi plan`."""

from pathlib import Path

import pytest

from command import document, document_here, dsi_here


def test_plan_ranks_deployments_by_given_latencies(tmp_path: Path) -> None:
    command = ("plan", "--target-ms", "20", "--drafter-ms", "1", "--gpus", "7", "--target-gpus", "2")
    planned = document_here(*command)
    assert (planned["sp"], planned["lookahead"], planned["gpus_used"]) == (3, 7, 7)
    times = [offer["ms"] for offer in planned["offers"]]
    assert len(times) == 5
    assert times == sorted(times)
    picture = tmp_path / "plan.svg"
    printed = dsi_here(*command, "--plot", str(picture)).stdout
    assert "ceil(20 / (7 * 1)) = 3 <= 3" in printed
    assert "acceptance assumed" in printed
    assert "to run the first: dsi generate" in printed
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_plan_measures_this_machine() -> None:
    planned = document("plan", "--cores", "1")
    assert {offer["algorithm"] for offer in planned["offers"]} == {"nonsi", "si"}
    assert planned["evidence"]["sources"]["acceptance"] == "measured"
    assert 0.5 < planned["evidence"]["rates"]["match"] < 1
    first = planned["offers"][0]["algorithm"]  # which of them is faster depends on what else the machine does
    assert planned["command"].startswith(f"dsi generate --target builtin --drafter builtin --algorithm {first}")


def test_plan_says_of_trees_on_several_gpus_that_they_cannot_run() -> None:
    """Where more GPUs make no forward faster, and rows are free, DSI with trees comes first."""
    command = ("plan", "--target-ms", "40", "--drafter-ms", "4", "--gpus", "4", "--parallel-fraction", "0")
    printed = dsi_here(*command, "--acceptance", "0.5", "--runner-up-acceptance", "0.6").stdout
    [line] = [line for line in printed.splitlines() if line.startswith("to run the first")]
    assert "--sp " in line
    assert "--tree" in line
    assert line.endswith("# with trees on several GPUs, which dsi does not have yet")
