"""What commands print about a completion with given decisions and times, and where they may write."""

import json
from pathlib import Path

import pytest

from dsi.cli.output import figures, summary, writable
from dsi.core.generation import Tally
from dsi.core.request import Completion
from dsi.core.spec import Decision, SpecConfig
from dsi.core.stats import ServerUsage, overlap

AHEAD, PLAIN = SpecConfig("dsi", 4, 1, max_targets=2), SpecConfig("nonsi")


def done(*decisions: Decision) -> Completion:
    times, origins = (0.5, 0.75, 1.5), ("plain", "corrected", "plain")
    after = {"target-1": ServerUsage("target", 1.5, 3, 1.5), "drafter": ServerUsage("drafter", 0.5, 2, 0.5)}
    before = {name: ServerUsage(toll.role) for name, toll in after.items()}
    found = overlap(times, origins, Tally(useful=3, exposed=3), (), before, after, 2.0, alone=True)
    turns = tuple(zip((0.0, 0.5, 0.75), decisions))
    return Completion((1, 2, 3), "length", times, Tally(), origins, decisions=turns, overlap=found)


def test_figures_report_each_rejection_and_each_decision() -> None:
    decisions = (
        Decision(0, AHEAD, "start", 0.7),
        Decision(1, PLAIN, "latency", 0.25),
    )
    said = json.loads(json.dumps(figures(done(*decisions))))
    assert said["overlap"]["losses"] == [{"token": 1, "at_ms": 750, "lost_ms": 500}]
    assert said["overlap"]["idle_share"] == {"target-1": 0.25, "drafter": 0.75}
    assert (said["overlap"]["ideal_ms"], said["overlap"]["time_over_ideal"]) == (1500, 1)
    assert said["decisions"] == [
        {
            "at_ms": 0,
            "tokens": 0,
            "way": "SP 2, lookahead 4, min draft 1",
            "speculates": True,
            "drafters": ["drafter"],
            "cause": "start",
            "acceptance": 0.7,
        },
        {
            "at_ms": 500,
            "tokens": 1,
            "way": "no speculation",
            "speculates": False,
            "drafters": ["drafter"],
            "cause": "latency",
            "acceptance": 0.25,
        },
    ]
    assert "decisions" not in figures(done())


def test_summary_reports_tokens_without_speculation() -> None:
    ahead, plain = Decision(0, AHEAD, "start", 0.7), Decision(1, PLAIN, "acceptance", 0.1)
    again = Decision(2, AHEAD, "acceptance", 0.5)
    assert "0 target forwards, 2 tokens without speculation (acceptance) (measured)" in summary(
        "auto", done(ahead, plain)
    )
    assert ", 1 tokens without speculation" in summary("auto", done(ahead, plain, again))
    assert "without speculation" not in summary("auto", done(ahead))
    assert "without speculation" not in summary("dsi", done())


def test_writable_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for path, sentence in (
        (tmp_path / "a.txt", "the name must end in .json"),
        (tmp_path / "folder.json", "is a folder"),
        (tmp_path / "none" / "a.json", "there is no folder"),
        (Path("/proc/a.json"), "cannot be written"),
    ):
        with pytest.raises(ValueError, match=sentence):
            writable(path, (".json",))
    assert writable(tmp_path / "a.json").name == "a.json"
    assert [file.name for file in tmp_path.iterdir()] == ["folder.json"]
