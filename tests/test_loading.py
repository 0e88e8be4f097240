"""Names of models, and models that stand alone."""

from pathlib import Path

import pytest
import torch

from dsi.loading import folder, full_name, load_apart
from dsi.models.backend import Ask


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


def test_a_model_alone_has_its_threads_and_remembers_nothing() -> None:
    threads = torch.get_num_threads()
    pair = load_apart("builtin", "builtin", threads=1)
    first = pair.target.fresh().answer(Ask([1, 5, 9], 3))
    assert len(pair.target.backend._slots) == 1
    assert pair.target.fresh().answer(Ask([1, 5, 9], 3)) == first
    pair.target.fresh()
    assert (pair.target.backend._slots, torch.get_num_threads(), pair.context) == ([], 1, 512)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafter": "ngram"}, "ngram: is no model"),
        ({"target": "nowhere/at/all/"}, "there is no such model folder"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32 or bfloat16"),
        ({"threads": 0}, "threads 0: must be at least 1"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_apart(**{"target": "builtin", "drafter": "builtin"} | options)  # type: ignore[arg-type]
