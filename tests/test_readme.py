"""What the documents say is what happens."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import dsi, python

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE = ROOT / "Makefile"


def blocks(language: str) -> Iterator[str]:
    for page in PAGES:
        yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def sessions() -> Iterator[list[tuple[str, list[str]]]]:
    """For each block, its `$ dsi ...` in order, each with the lines shown below it."""
    for block in blocks("console"):
        parts = [part.splitlines() for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
        found = [(command, shown) for command, *shown in parts if command.startswith("dsi ")]
        if found:
            yield found


@pytest.mark.slow
@pytest.mark.parametrize("session", list(sessions()), ids=lambda session: session[0][0])
def test_docs_commands_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: list[tuple[str, list[str]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, shown in session:
        done = dsi(*shlex.split(command)[1:])
        assert done.returncode == 0, done.stderr
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        for line in (line.rstrip() for line in shown if line.strip() != "..."):
            assert line in printed


def test_there_are_commands_to_check() -> None:
    assert len({command.split()[1] for session in sessions() for command, _ in session}) == 7


@pytest.mark.slow
@pytest.mark.parametrize("code", list(blocks("python")))
def test_docs_python_runs(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_docs_link_and_name_existing_files() -> None:
    for page in PAGES:
        text = page.read_text()
        linked = [name for name in re.findall(r"\]\(([^)#]+)", text) if "://" not in name]
        assert [name for name in linked if not (page.parent / name).exists()] == []
        named = re.findall(r"\b(?:src|tests|benchmarks)/[\w/.]+\w", text)
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_docs_name_existing_make_targets() -> None:
    targets = set(re.findall(r"^(\w+):", MAKE.read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"\bmake (setup|demo|test|bench|\w+)\b[`) ]", page.read_text())
    }
    assert {"setup", "demo", "test", "bench"} <= targets
    assert named <= targets


def test_docs_name_result_files_that_exist() -> None:
    results = ROOT / "benchmarks" / "results"
    names = {name for page in PAGES for name in re.findall(r"h200-[\w-]+\.json", page.read_text())}
    assert names
    assert [name for name in names if not (results / name).exists()] == []
