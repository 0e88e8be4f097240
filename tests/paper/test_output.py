"""Everything at once, and nothing half-written."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command import dsi
from dsi.paper.output import check_folder, write


class CachedPrefix(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tables += tag == "table"
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.mark.slow
def test_paper_all_writes_every_file(tmp_path: Path) -> None:
    done = dsi("paper", "all", "--out", str(tmp_path / "lab"), "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [len(said[table]) for table in ("table1", "table2", "table3", "theory")] == [24, 10, 20, 6]
    wanted = {
        "published",
        "simulated",
        "simulated_paper_accounting",
        "best_lookahead_si",
        "best_lookahead_dsi",
    }
    assert all(wanted <= row.keys() for row in said["table2"])
    assert said["largest_with_enough_targets"] <= 1.0005
    assert sorted(path.name for path in (tmp_path / "lab").iterdir()) == sorted(
        Path(name).name for name in said["files"]
    )
    page = CachedPrefix()
    page.feed((tmp_path / "lab" / "report.html").read_text())
    assert page.tables == 5
    assert [source for source in page.sources if not source.startswith(("data:", "#"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["figure1", "figure2", "figure3", "trees"])
def test_paper_figure_writes_its_files(figure: str, tmp_path: Path) -> None:
    done = dsi("paper", figure, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])["files"]
    assert {Path(name).name for name in files} == {path.name for path in tmp_path.iterdir()}
    pictures = [Path(name) for name in files if not name.endswith(".csv")]
    assert all(path.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r") for path in pictures)


@pytest.mark.slow
def test_paper_theory_prints_checks() -> None:
    done = dsi("paper", "theory")
    assert done.returncode == 0
    assert done.stdout.count("holds") == 5
    assert "violated in 793" in done.stdout


def test_paper_table3_shows_measured_profiles(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    times = {"ttft_ms": {"mean": 6.0}, "tpot_ms": {"mean": 4.0}}
    parts = {"latency": {"target": times, "drafter": times}}
    profile.write_text(json.dumps({"target": "a", "drafter": "b", "dataset": "c", **parts}))
    done = dsi("paper", "table3", "--profile", str(profile), "--json")
    rows = json.loads(done.stdout)["rows"]
    assert (rows[0]["ratio"], rows[4]["ratio"]) == (1.35, None)
    assert rows[-1] == {"model": "b (drafter)", "dataset": "c", "ratio": 1.5, "label": "measured"}
    profile.write_text("{}")
    done = dsi("paper", "table3", "--profile", str(profile))
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no field target" in done.stderr


def test_check_folder_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = dsi("paper", "all", "--out", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dsi: {tmp_path / 'file'}: is not a folder\n"
    done = dsi("paper", "figure2", "--out", "/proc/nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("dsi: /proc/nowhere: cannot be written")


def test_write_leaves_no_partial_files(tmp_path: Path) -> None:
    folder = check_folder(tmp_path / "a" / "b")
    assert write({"x.csv": b"1"}, folder) == [folder / "x.csv"]
    assert [path.name for path in folder.iterdir()] == ["x.csv"]
