"""`dsi compare`; with `--budget` in `test_budget.py`."""

from pathlib import Path

import pytest

from command import document, dsi

pytestmark = pytest.mark.slow  # loads models


def test_compare_checks_that_all_texts_are_equal(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Once upon a time\n\nTom and his dog\n")
    quick = (
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--repeats",
        "1",
        "--max-new-tokens",
        "12",
        "--si-lookaheads",
        "3,5",
    )
    several = "nonsi,si,pearl,dsi,auto"
    result = document("compare", *quick, "--temperature", "0.7", "--algorithm", several)
    assert [row["algorithm"] for row in result["results"]] == several.split(",")
    assert [set(row["overlap"]["idle_share"]) for row in result["results"]] == [{"target-1", "drafter"}] * 5
    assert result["results"][0]["overlap"]["time_over_ideal"] > 1
    assert result["results"][1]["lookahead"] in (3, 5)
    assert all(len(row["rates"]) == 2 and row["tokens_per_second"] > 0 for row in result["results"])
    assert "all equal" in dsi("compare", *quick).stdout
