from pathlib import Path

import pytest

from command import python

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def printed(path: Path) -> list[str]:
    done = python(path.read_text())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40


def test_example_quickstart_generates_a_text() -> None:
    assert printed(EXAMPLES[1])[0].startswith("Once upon a time, there was")


def test_example_streams_of_one_seed_are_equal() -> None:
    assert printed(EXAMPLES[2])[-1] == "equal: True"


def test_example_policy_generates_the_same_text() -> None:
    lines = printed(EXAMPLES[0])
    assert len({line.split("text")[1] for line in lines}) == 1
    assert len({line.split(":")[1] for line in lines}) == 2
