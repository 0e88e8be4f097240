"""The kernels are compiled once, in the background if wanted, and their absence has a reason."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsi.models.cpu import compiler


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is kept, and nothing is loaded yet."""
    caches = compiler.load_kernels, compiler.why_unavailable, compiler.kernel
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compiling", [])
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_kernels_are_compiled_in_the_background_and_kept(tmp_path: Path) -> None:
    compiler.start_compiling()
    compiler.start_compiling()
    assert len(compiler._compiling) == 1
    assert compiler.why_unavailable() == ""
    assert os.listdir(tmp_path / "dsi") == [compiler.library_path().name]
    compiler.start_compiling()
    assert compiler._compiling == []


def test_kernels_without_a_compiler_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    compiler.start_compiling()
    assert compiler.why_unavailable() == "there is no C compiler (cc, gcc or clang)"


def test_kernels_that_do_not_compile_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int broken(")
    monkeypatch.setattr(compiler, "SOURCE", source)
    assert "cannot compile them" in compiler.why_unavailable()
    assert os.listdir(tmp_path / "dsi") == []


def test_kernels_in_a_folder_that_cannot_be_written_are_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written" in compiler.why_unavailable()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of other processors")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4", "native"])
def test_kernels_compile_without_warnings_for_every_vector_width(processor: str) -> None:
    flags = ("-O1", f"-march={processor}", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    subprocess.run([str(compiler.compiler()), *flags, str(compiler.SOURCE)], check=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of other processors")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_kernels_of_smaller_vectors_give_the_logits_of_transformers(processor: str) -> None:
    """In a process of its own: kernels are loaded once."""
    script = f"""
import torch
from dsi.models.cpu import compiler
compiler.FLAGS = tuple(flag.replace("native", "{processor}") for flag in compiler.FLAGS)
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.cpu.linear import quantize_int8
from models.cpu.shapes import random_model
tokens = list(range(40))
for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.05)):
    model = random_model("gemma3", dtype)
    logits = model(torch.tensor([tokens])).logits[0].float().detach()
    decoder = CompiledDecoder(model)
    whole = decoder.forward(tokens, 1)
    assert (whole - logits).abs().max() <= tolerance * logits.abs().max()
    decoder.clear_cache()
    assert torch.equal(torch.cat([decoder.forward(tokens[:7], 1), decoder.forward(tokens, 8)]), whole)
"""
    tests = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": tests})
