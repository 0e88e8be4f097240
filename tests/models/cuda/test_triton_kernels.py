"""The kernels give the numbers that torch gives, and a GPU's compiler takes them: both without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from dsi.models.cuda import triton_kernels as kernels  # noqa: E402

INTERPRETED = Path(__file__).with_name("interpreted.py")
HOPPER = 90
MEMORY = 227 * 1024  # bytes that a block may share on such a GPU


def test_numbers_are_those_of_torch() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", str(INTERPRETED)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=INTERPRETED.parents[2],
    )
    assert done.returncode == 0, done.stdout


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, int]) -> Any:
    """As for tensors whose memory is well aligned, which torch's is."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in kinds if kinds[name].startswith("*")},
    )
    return triton.compile(source, target=GPUTarget("cuda", HOPPER, 32))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("new", "heads", "shared", "half", "rows"),
    [(1, 32, 4, 32, 16), (8, 32, 32, 64, 16), (128, 40, 40, 64, 64)],
)
def test_a_gpu_can_attend(new: int, heads: int, shared: int, half: int, rows: int, dtype: str) -> None:
    kinds = dict.fromkeys(("qkv", "cos", "sin", "keys", "values", "out"), dtype)
    sizes = {"NEW": new, "HEADS": heads, "SHARED": shared, "HALF": half, "ROWS": rows}
    found = compiled(
        kernels._attend,
        kinds | {"length": "*i64", "scale": "fp32", "room": "i32"},
        sizes | {"FRESH": min(64, max(16, new)), "HELD": 64},
    )
    assert found.metadata.shared <= MEMORY


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_gpu_can_open_gates() -> None:
    assert compiled(kernels._gated, {"both": "*bf16", "out": "*bf16", "inner": "i32"}, {"BLOCK": 1024}).asm["ptx"]
