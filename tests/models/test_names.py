"""Names of models."""

from pathlib import Path

import pytest

from dsi.models import names
from dsi.models.names import check_exists, full_name, model_path, pretrained, weights_gb


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


def test_pretrained_finds_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF" + bytes(96))
    source = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "small.gguf"}
    assert pretrained(file) == pretrained(tmp_path) == source
    assert weights_gb(str(file)) == weights_gb(str(tmp_path)) == 1e-7
    (tmp_path / "config.json").touch()  # a folder of transformers' that has such a file, too
    assert pretrained(tmp_path) == {"pretrained_model_name_or_path": str(tmp_path)}


def test_check_exists_refuses_gguf_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    with pytest.raises(ValueError, match=r"a\.gguf: there is no such file"):
        check_exists(file)
    file.write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"a\.gguf: is no GGUF file"):
        check_exists(file)
    file.write_bytes(b"GGUF")
    check_exists(file)
    monkeypatch.setattr(names, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ValueError, match=r"a\.gguf: is read by gguf, not installed here: pip install 'dsi\[gguf\]'"):
        check_exists(file)
    (part := tmp_path / "parts" / "big-00001-of-00003.gguf").parent.mkdir()
    part.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"is one of 3 parts; merge them into one GGUF file"):
        check_exists(part)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"has 2 GGUF files; name one of a\.gguf, b\.gguf"):
        check_exists(tmp_path)
