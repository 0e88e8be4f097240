import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def printed(path: Path) -> list[str]:
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40


def test_the_quickstart_tells_a_story() -> None:
    assert printed(EXAMPLES[1])[0].startswith("Once upon a time, there was")


def test_streams_of_one_seed_are_equal() -> None:
    assert printed(EXAMPLES[2])[-1] == "equal: True"


def test_a_policy_of_ones_own_writes_the_same_text() -> None:
    lines = printed(EXAMPLES[0])
    assert len({line.split("text")[1] for line in lines}) == 1
    assert len({line.split(":")[1] for line in lines}) == 2
