"""Names of models."""

from pathlib import Path

import pytest

from dsi.models.names import full_name, model_path


@pytest.mark.parametrize(
    ("name", "hub_name"),
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
def test_model_path_resolves_the_papers_names(name: str, hub_name: str) -> None:
    assert (full_name(name), model_path(name, "target"), model_path(name, "drafter")) == (hub_name,) * 3


def test_model_path_prefers_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vicuna-7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_path("vicuna-7b", "target") == "vicuna-7b"
