"""What commands print about a completion with given decisions and times, and where they may write."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsi.cli.output import figures, summary, working, writable
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


def test_figures_have_the_token_ids_and_their_numbers() -> None:
    said = figures(replace(done(), prompt=(7, 8)))
    assert (said["token_ids"], said["tokens"]) == ([1, 2, 3], 3)
    assert (said["prompt_token_ids"], said["prompt_tokens"]) == ([7, 8], 2)


def test_summary_is_one_line() -> None:
    assert summary("dsi", done()) == (
        "dsi: 3 tokens in 1.50 s, 2.0 tokens/s, 0 of them guessed, 0 target forwards (measured)"
    )


def test_working_prints_stages_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.5, 2.5, 3.0, 4.6, 4.7])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with working("loading", quiet=False) as status:
        for stage in ("loading a", "loading a: 1 of 9", "loading a: 2 of 9", "loading a: 3 of 9", "loading a: 4 of 9"):
            status(stage)
        status("measuring")
    lines = ["dsi: loading a: 2 of 9", "dsi: loading a: 4 of 9", "dsi: measuring"]
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_working_prints_nothing_where_loading_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    with working("loading", quiet=False) as status:
        status("loading a")
        status("measuring")
    assert capsys.readouterr() == ("", "")


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
