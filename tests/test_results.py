"""The tables of the documentation are those of the newest result files."""

import json
from pathlib import Path

import pytest

import make_results
from make_results import PAGES, ROOT, newest, newest_runs, rewritten


def test_make_results_finds_every_page_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["make_results.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        make_results.main()
    assert (ended.value.code, capsys.readouterr().out) == (0, "out of date: none\n")


def test_make_results_notices_a_changed_figure() -> None:
    runs = newest_runs()
    runs["h200"]["targets"][0]["cells"][0]["dsi_over_si"] = 9.87
    changed = [name for name in PAGES if rewritten((ROOT / name).read_text(), runs) != (ROOT / name).read_text()]
    assert changed == list(PAGES)


def test_make_results_shows_every_section_on_some_page() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)
    assert [name for name in make_results.SECTIONS if f"<!-- begin {name} -->" not in text] == []


def test_newest_is_a_complete_run() -> None:
    path: Path = newest()
    assert make_results.is_complete(json.loads(path.read_text()))
