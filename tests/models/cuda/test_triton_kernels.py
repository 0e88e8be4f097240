"""The kernels agree with torch and compile for a GPU: both tested without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from dsi.models.cuda import triton_kernels as kernels  # noqa: E402

INTERPRETED = Path(__file__).with_name("interpreted.py")
HEAD_NORMS = ("q_norm", "k_norm")
HOPPER = 90
SHARED_MEMORY = 227 * 1024  # bytes of a block on such a GPU


@pytest.mark.slow
def test_kernels_agree_with_torch_in_the_interpreter() -> None:
    """In its own process: the interpreter is chosen when triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", str(INTERPRETED)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=INTERPRETED.parents[2],
    )
    assert done.returncode == 0, done.stdout


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, int | None]) -> Any:
    """Compile for 16-byte aligned tensors, as torch's are."""
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("dtype", "exact"), [("*bf16", False), ("*fp32", False), ("*bf16", True)])
@pytest.mark.parametrize(
    ("new", "heads", "kv_heads", "half", "rows", "window", "absent"),
    [
        (1, 32, 4, 32, 16, 0, HEAD_NORMS),
        (8, 32, 32, 64, 16, 0, HEAD_NORMS),
        (128, 40, 40, 64, 64, 0, HEAD_NORMS),
        (8, 32, 32, 48, 16, 2047, HEAD_NORMS),  # Phi-3
        (8, 32, 8, 64, 32, 4096, ()),  # Qwen3
        (8, 48, 1, 64, 64, 0, (*HEAD_NORMS, "cos", "sin")),  # GPT-BigCode
    ],
)
def test_attend_compiles_for_a_gpu(
    new: int,
    heads: int,
    kv_heads: int,
    half: int,
    rows: int,
    window: int,
    absent: tuple[str, ...],
    dtype: str,
    exact: bool,
) -> None:
    tensors = ("qkv", "cos", "sin", "keys", "values", "out", *HEAD_NORMS)
    kinds = {name: dtype for name in tensors if name not in absent}
    sizes: dict[str, int | None] = {
        "NEW": new,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": half,
        "ROWS": rows,
        "WINDOW": window,
    }
    sizes |= {"HALF_TILE": triton.next_power_of_2(half)} | dict.fromkeys(absent)
    kernel = compiled(
        kernels._attend,
        kinds | {"length": "*i64", "epsilon": "fp32", "scale": "fp32", "capacity": "i32"},
        sizes | {"NEW_TILE": min(64, max(16, new)), "CACHED_TILE": 64, "EXACT": exact},
    )
    assert kernel.metadata.shared <= SHARED_MEMORY


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_silu_and_mul_compiles_for_a_gpu() -> None:
    assert compiled(kernels._silu_and_mul, {"gate_up": "*bf16", "out": "*bf16", "inner": "i32"}, {"BLOCK": 1024}).asm[
        "ptx"
    ]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("centred", [True, False])
def test_norm_and_add_compiles_for_a_gpu(centred: bool) -> None:
    tensors = dict.fromkeys(("x", "weight", "bias", "out", *(["shift"] if centred else [])), "*bf16")
    constants = {"WIDTH": 6144, "BLOCK": 8192, "CENTRED": centred} | ({} if centred else {"shift": None})
    assert compiled(kernels._norm_and_add, tensors | {"epsilon": "fp32"}, constants).asm["ptx"]
