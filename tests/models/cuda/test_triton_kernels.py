"""The kernels agree with torch and compile for a GPU: both tested without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from dsi.models.cuda import (  # noqa: E402
    linear,
    packed_attention,
    packed_rows,
    packed_tokens,
    token_sampling,
    triton_kernels as kernels,
)

INTERPRETED = Path(__file__).with_name("interpreted.py")
PACKED = Path(__file__).with_name("interpreted_packed.py")
HEAD_NORMS = ("q_norm", "k_norm")
HOPPER, ADA = 90, 89
SIZES = ("inputs", "outputs", "capacity")
SHARED_MEMORY = 227 * 1024  # bytes of a block on such a GPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "tests"),
    [
        (INTERPRETED, "every_cut and half"),
        (INTERPRETED, "every_cut and not half"),
        (INTERPRETED, "not every_cut"),
        (PACKED, "test"),
    ],
)
def test_kernels_agree_with_torch_in_the_interpreter(file: Path, tests: str) -> None:
    """In its own process: the interpreter is chosen when triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", tests, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=file.parents[2],
    )
    assert done.returncode == 0, done.stdout


def compiled(
    kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int = 4, capability: int = HOPPER
) -> Any:
    """Compile for tensors aligned to 16 bytes, as torch's are, and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in kinds if kinds[name][0] == "*" or name in SIZES},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


ATTENTIONS = [
    (32, 4, 32, 64, 0, HEAD_NORMS),
    (40, 40, 64, 1, 0, HEAD_NORMS),
    (32, 32, 48, 8, 2047, HEAD_NORMS),  # Phi-3
    (32, 8, 64, 8, 4096, ()),  # Qwen3
    (48, 1, 64, 64, 0, (*HEAD_NORMS, "cos", "sin")),  # GPT-BigCode
]


def attention_arguments(
    heads: int, kv_heads: int, half: int, splits: int, window: int, absent: tuple[str, ...], dtype: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the tensors and the constants that both kernels take."""
    tensors = ("qkv", "cos", "sin", "keys", "values", "out", *HEAD_NORMS)
    kinds = {name: dtype for name in tensors if name not in absent}
    kinds |= {"partial": "*fp32", "arrivals": "*i32", "epsilon": "fp32", "scale": "fp32", "capacity": "i32"}
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": half,
        "HALF_TILE": triton.next_power_of_2(half),
        "ROWS": packed_rows.ROWS,
        "NEW": kernels.NEW,
        "KEYS": packed_rows.KEYS,
        "STAGES": kernels.STAGES,
        "SPLITS": splits,
        "WINDOW": window,
        "OVERLAPS": True,
    }
    return kinds, constants | dict.fromkeys(absent)


def check_compiled(kernel: Any) -> None:
    """It fits into a multiprocessor, reads keys ahead asynchronously and begins while the kernel before ends."""
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "cp.async" in kernel.asm["ptx"]
    assert "griddepcontrol.wait" in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize(("heads", "kv_heads", "half", "splits", "window", "absent"), ATTENTIONS)
def test_attend_compiles_for_a_gpu(
    heads: int, kv_heads: int, half: int, splits: int, window: int, absent: tuple[str, ...], dtype: str
) -> None:
    kinds, constants = attention_arguments(heads, kv_heads, half, splits, window, absent, dtype)
    check_compiled(compiled(kernels._attend, kinds | {"length": "*i64", "new": "i32"}, constants))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("heads", "kv_heads", "half", "splits", "window", "absent"), ATTENTIONS)
def test_attend_packed_compiles_for_a_gpu(
    heads: int, kv_heads: int, half: int, splits: int, window: int, absent: tuple[str, ...]
) -> None:
    kinds, constants = attention_arguments(heads, kv_heads, half, splits, window, absent, "*bf16")
    plan = ("parts", "positions", "slots", "order", "leaves", "tail_tables", "shared_by", "tables")
    kinds |= dict.fromkeys(plan, "*i32")
    kinds |= dict.fromkeys(("table_length", "tails", "split_parts", "max_items"), "i32")
    shared = constants.pop("SPLITS") > 1
    constants |= {"TAIL": packed_rows.TAIL, "FIELDS": len(packed_rows.Part._fields), "SHARED": shared}
    check_compiled(compiled(packed_attention._attend_packed, kinds, constants))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [HOPPER, ADA])
def test_tokens_are_taken_and_picked_by_kernels_that_compile_for_a_gpu(capability: int) -> None:
    taken = dict.fromkeys(("buffer", "sources", "places", "slots", "moves", "ids"), "*i32")
    rows = {"ROWS": 256, "MOVES": packed_rows.MOVES}
    assert compiled(packed_tokens._take_tokens, taken, rows, capability=capability).asm["ptx"]
    picked = {"logits": "*bf16", "outputs": "*i32", "buffer": "*i32", "vocab": "i32", "unread": "i32"}
    sizes = {"BRANCHES": packed_rows.BRANCHES, "BLOCK": packed_tokens.MAX_BLOCK}
    assert compiled(packed_tokens._pick_tokens, picked, sizes, packed_tokens.WARPS, capability).asm["ptx"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [HOPPER, ADA])
def test_tokens_are_sampled_by_kernels_that_compile_for_a_gpu(capability: int) -> None:
    overlaps = {"OVERLAPS": capability == HOPPER, "STEP": 3}
    kinds = {"logits": "*bf16", "settings": "*i64", "best": "*fp64", "vocab": "i32", "chunk": "i32"}
    sizes = {"BLOCK": token_sampling.BLOCK, **overlaps}
    assert compiled(token_sampling._best_of_chunks, kinds, sizes, token_sampling.WARPS, capability).asm["ptx"]
    kinds = {"best": "*fp64", "settings": "*i64", "tokens": "*i64", "marked": "*i64"}
    sizes = {"SPLITS": token_sampling.SPLITS, **overlaps}
    assert compiled(token_sampling._best_of_rows, kinds, sizes, 1, capability).asm["ptx"]


TABLES = ("IN_SLICES", "GATED_IN_SLICES", "NARROW", "WIDE", "GATED_WIDE")


def compiled_linear(tiling: linear.Tiling, gated: bool, capability: int) -> Any:
    described = f"tensordesc<bf16[{tiling.outputs},{tiling.depth}]>"
    kinds = {"x": "*bf16", "weight": described if tiling.bulk else "*bf16", "out": "*bf16"}
    constants = {
        "bias": None,
        "ROWS": tiling.rows,
        "OUTPUTS": tiling.outputs,
        "DEPTH": tiling.depth,
        "STAGES": tiling.stages,
        "SWAPPED": tiling.swapped,
        "BULK": tiling.bulk,
        "WHOLE": True,
        "ACTIVATION": linear.GATED if gated else "",
        "ADDS": not gated,
        "OVERLAPS": capability == HOPPER,
    }
    sizes = {"rows": "i32", "outputs": "i32", "inputs": "i32"}
    return compiled(linear._linear, kinds | sizes, constants, tiling.warps, capability)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("table", TABLES)
def test_linear_compiles_for_a_gpu(table: str, rows: int) -> None:
    """Every tiling that is chosen fits into the memory of a multiprocessor, and reads ahead asynchronously."""
    gated, tiling = table.startswith("GATED"), getattr(linear, table)[rows]
    assert tiling.within(SHARED_MEMORY, gated) == tiling
    kernel = compiled_linear(tiling, gated, HOPPER)
    assert tiling.shared_bytes(gated) <= kernel.metadata.shared <= SHARED_MEMORY
    assert "cp.async" in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("table", TABLES)
def test_linear_compiles_for_a_gpu_with_less_shared_memory(table: str, rows: int) -> None:
    gated, limit = table.startswith("GATED"), linear.LEAST_SHARED_MEMORY
    tiling = getattr(linear, table)[rows].within(limit - linear.OTHER_SHARED_MEMORY, gated)
    assert compiled_linear(tiling, gated, ADA).metadata.shared <= limit


def test_stages_for_fit_into_shared_memory() -> None:
    assert kernels.stages_for(128, 2, SHARED_MEMORY) == 3
    assert kernels.stages_for(256, 2, linear.LEAST_SHARED_MEMORY) == 1
    assert kernels.stages_for(128, 4, SHARED_MEMORY) == 3


def test_tiling_for_depends_on_rows_outputs_and_multiprocessors() -> None:
    assert linear.tiling_for(1, 4096, False, 132) == linear.NARROW[16]
    assert linear.tiling_for(17, 12288, False, 132) == linear.WIDE[32]
    assert linear.tiling_for(200, 11008, True, 132) == linear.GATED_WIDE[128]
    assert linear.tiling_for(9, 12288, False, 8) == linear.IN_SLICES[16]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("centred", [True, False])
def test_norm_compiles_for_a_gpu(centred: bool) -> None:
    tensors = dict.fromkeys(("x", "weight", "out", *(["shift"] if centred else [])), "*bf16")
    constants: dict[str, Any] = {"WIDTH": 6144, "BLOCK": 8192, "CENTRED": centred, "OVERLAPS": True}
    constants |= {} if centred else {"shift": None}
    assert compiled(kernels._norm, tensors | {"epsilon": "fp32"}, constants).asm["ptx"]
