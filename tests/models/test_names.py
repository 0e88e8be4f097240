"""Names of models, and what is refused before anything is loaded."""

import re
from pathlib import Path
from typing import Any

import pytest

from dsi.models.names import address_of, check_asked, folder, full_name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vicuna-13b", "lmsys/vicuna-13b-v1.3"),
        ("Vicuna-7B", "lmsys/vicuna-7b-v1.3"),
        ("vicuna-68m", "double7/vicuna-68m"),
        ("starcoder-15b", "bigcode/starcoder"),
        ("Starcoder-168M", "bigcode/tiny_starcoder_py"),
        ("Phi3-14B", "microsoft/Phi-3-medium-128k-instruct"),
        ("phi3-4b", "microsoft/Phi-3-mini-128k-instruct"),
        ("someone/else", "someone/else"),
    ],
)
def test_the_papers_names_are_those_of_the_hub(name: str, found: str) -> None:
    assert (full_name(name), folder(name, "target"), folder(name, "drafter")) == (found, found, found)


def test_a_folder_comes_before_a_name_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vicuna-7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert folder("vicuna-7b", "target") == "vicuna-7b"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"sp": 0}, "SP degree 0: must be at least 1"),
        ({"mp": 0}, "target mp 0: must be at least 1"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32 or bfloat16"),
        ({"threads": 0}, "threads 0: must be at least 1"),
        ({"vocab": "magic"}, "vocab 'magic': must be same, tli, slem or auto"),
        ({"target": "no/such/folder"}, "no/such/folder: there is no such model folder"),
        ({"drafters": ["ngram", "/nowhere"]}, "/nowhere: there is no such model folder"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], sentence: str) -> None:
    fine = {"target": "builtin", "drafters": ["vicuna-68m", "ngram"], "sp": 1, "mp": 1}
    fine |= {"dtype": "float32", "threads": None, "vocab": "auto"}
    check_asked(**fine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check_asked(**fine | asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("fleet", ["roy", "ray=", "", "rays=1"])
def test_a_fleet_that_is_none_is_refused(fleet: str) -> None:
    with pytest.raises(ValueError, match="must be ray, or ray=ADDRESS"):
        address_of(fleet)


def test_a_fleet_is_here_or_at_an_address() -> None:
    assert (address_of("ray"), address_of("ray=10.0.0.1:6379")) == (None, "10.0.0.1:6379")
