"""Linear layers of few rows in Triton, of which no row depends on another, to the bit.

A forward of few tokens waits for its weights, so what counts is how fast they are read; and cuBLAS picks another kernel
for another number of rows, which adds up in another order. Here each output is accumulated over its inputs in steps
of 16, in their order, in float32 on tensor cores, and nothing is split over the inputs. How many outputs a program
has, how deep it reads ahead and which instruction multiplies changes no bit, so they are chosen by speed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older triton: kernels do not overlap, and nothing is copied in bulk
    gdc_launch_dependents = gdc_wait = TensorDescriptor = None

HOPPER = 9
HALF_BYTES = 2
H200_SHARED_MEMORY, LEAST_SHARED_MEMORY = 227 * 1024, 99 * 1024  # of a block; the least of GPUs with bfloat16
OTHER_SHARED_MEMORY = 1024
FEW_SMS = 64  # a slice of a GPU
BULK_ALIGNMENT = 16  # bytes between rows of weights that can be copied in bulk are a multiple of it
GATED = "silu"  # silu(first half of the outputs) * second half


@dataclass(frozen=True)
class Tiling:
    """How the work is divided among programs, which changes its speed alone."""

    rows: int  # of a program
    outputs: int
    depth: int  # inputs of a step
    stages: int  # steps that are read ahead
    warps: int = 4
    swapped: bool = False  # weights are the left operand, of which wgmma takes 64 rows
    bulk: bool = False  # the tensor memory accelerator copies weights

    def shared_bytes(self, gated: bool) -> int:
        """The shared memory of a program: what it reads ahead."""
        return self.stages * (self.rows + self.outputs * (2 if gated else 1)) * self.depth * HALF_BYTES

    def within(self, limit: int, gated: bool) -> Tiling:
        """The same, reading ahead no more than so many bytes: other GPUs have less shared memory than an H200."""
        tiling = self
        while tiling.shared_bytes(gated) > limit:
            fewer = tiling.stages - 1
            tiling = replace(tiling, stages=fewer) if fewer > 1 else replace(tiling, depth=tiling.depth // 2)
        return tiling


# The fastest of those measured on an H200, by the rows of x. A slice of a GPU is limited by what each multiprocessor
# takes in: its programs have many outputs. A whole one needs programs for every multiprocessor.
IN_SLICES = {
    16: Tiling(16, 128, 64, 6, swapped=True, bulk=True),
    32: Tiling(32, 128, 64, 5, swapped=True, bulk=True),
    64: Tiling(64, 128, 64, 4, bulk=True),
    128: Tiling(128, 256, 64, 4, warps=8, swapped=True, bulk=True),
}
GATED_IN_SLICES = {
    16: Tiling(16, 128, 64, 3, swapped=True, bulk=True),
    32: Tiling(32, 128, 64, 3, swapped=True, bulk=True),
    64: Tiling(64, 64, 64, 3, bulk=True),
    128: Tiling(128, 128, 64, 3, warps=8, bulk=True),
}
NARROW = {  # few outputs
    16: Tiling(16, 64, 128, 8, swapped=True),
    32: Tiling(32, 64, 128, 6, swapped=True),
    64: Tiling(64, 32, 256, 4),
    128: Tiling(64, 64, 128, 4),
}
WIDE = {
    16: Tiling(16, 64, 128, 4, swapped=True),
    32: Tiling(32, 64, 128, 4, swapped=True),
    64: Tiling(64, 128, 64, 6, swapped=True),
    128: Tiling(128, 128, 64, 5, swapped=True, bulk=True),
}
GATED_WIDE = {
    16: Tiling(16, 64, 128, 3, swapped=True),
    32: Tiling(32, 64, 64, 5, swapped=True),
    64: Tiling(64, 64, 64, 4),
    128: Tiling(128, 128, 64, 4, warps=8, swapped=True, bulk=True),
}
WIDE_OUTPUTS = 64  # for each multiprocessor


def tiling_for(rows: int, outputs: int, gated: bool, sms: int) -> Tiling:
    """The tiling for so many rows of x and outputs, on so many multiprocessors."""
    if sms < FEW_SMS:
        tilings = GATED_IN_SLICES if gated else IN_SLICES
    elif gated:
        tilings = GATED_WIDE
    else:
        tilings = WIDE if outputs >= WIDE_OUTPUTS * sms else NARROW
    return next((tilings[size] for size in tilings if rows <= size), tilings[max(tilings)])


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program can have, without what a kernel needs besides."""
    if device.type != "cuda":
        return H200_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY)) - OTHER_SHARED_MEMORY


@cache
def device_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it depends on has ended."""
    recent = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER
    return recent and gdc_wait is not None


def launch_options(device: torch.device) -> dict[str, Any]:
    overlaps = overlaps_launches(device)
    return {"OVERLAPS": overlaps} | ({"launch_pdl": True} if overlaps else {})


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    sms: int = 0,
    tiling: Tiling | None = None,
) -> Tensor:
    """activation(x W^T + bias), or with a `residual`, into it: residual + x W^T + bias. On `sms` multiprocessors."""
    rows, gated = len(x), activation == GATED
    outputs, inputs = len(weight) // (2 if gated else 1), x.shape[-1]
    out = x.new_empty(rows, outputs) if residual is None else residual
    t = tiling or tiling_for(rows, outputs, gated, sms or device_sms(x.device))
    t = t.within(shared_memory(x.device), gated)
    bulk = t.bulk and TensorDescriptor is not None and inputs * x.itemsize % BULK_ALIGNMENT == 0
    _linear[(cdiv(rows, t.rows), cdiv(outputs, t.outputs))](
        x,
        _described(weight, t) if bulk else weight,
        bias,
        out,
        rows,
        outputs,
        inputs,
        ROWS=t.rows,
        OUTPUTS=t.outputs,
        DEPTH=t.depth,
        STAGES=t.stages,
        SWAPPED=t.swapped,
        BULK=bulk,
        WHOLE=outputs % t.outputs == 0 and inputs % t.depth == 0,
        ACTIVATION=activation,
        ADDS=residual is not None,
        num_warps=t.warps,
        **launch_options(x.device),
    )
    return out


def _described(weight: Tensor, tiling: Tiling) -> Any:
    return TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.depth])


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Wait for the kernels before this one, if it was launched before they ended: they write what it reads."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def launch_next(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    BULK: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A tile of rows and outputs. Programs of the same weights are neighbours: memory is read once."""
    gated: tl.constexpr = ACTIVATION == "silu"
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    step = tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    acc = tl.zeros((OUTPUTS, ROWS) if SWAPPED else (ROWS, OUTPUTS), tl.float32)
    acc_up = tl.zeros((OUTPUTS, ROWS) if SWAPPED else (ROWS, OUTPUTS), tl.float32)
    wait_for_inputs(OVERLAPS)
    tokens = x + row[:, None] * inputs + step[None, :]
    for start in tl.range(0, inputs, DEPTH, num_stages=STAGES):
        tile = tl.load(tokens + start, inside if WHOLE else inside & (start + step < inputs)[None, :], 0.0)
        w = _weights(weight, first, output, outputs, start, step, inputs, BULK, WHOLE)
        acc = _multiply(w, tile, acc, SWAPPED)
        if gated:
            w = _weights(weight, first + outputs, outputs + output, 2 * outputs, start, step, inputs, BULK, WHOLE)
            acc_up = _multiply(w, tile, acc_up, SWAPPED)
    launch_next(OVERLAPS)
    if SWAPPED:
        acc = tl.trans(acc)
    valid = output < outputs
    if bias is not None:
        acc += tl.load(bias + output, valid, 0.0).to(tl.float32)[None, :]
    if gated:
        up = tl.trans(acc_up) if SWAPPED else acc_up
        if bias is not None:
            up += tl.load(bias + outputs + output, valid, 0.0).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * up
    elif ACTIVATION == "gelu":
        acc = 0.5 * acc * (1 + tl.erf(acc * 0.7071067811865476))
    elif ACTIVATION == "gelu_pytorch_tanh":  # 1 + tanh(a) is 2 sigmoid(2a)
        acc = acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    place = out + row[:, None] * outputs + output[None, :]
    valid = inside & valid[None, :]
    if ADDS:
        acc += tl.load(place, valid, 0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), valid)


@triton.jit
def _weights(weight, first, output, end, start, step, inputs, BULK: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of weights: the rows of these outputs, from the input `start` on."""
    if BULK:
        w = weight.load([first, start])  # zeros where there are none
    else:
        place = weight + output[:, None].to(tl.int64) * inputs + (start + step)[None, :]
        inside = None if WHOLE else (output < end)[:, None] & (start + step < inputs)[None, :]
        w = tl.load(place, inside, None if WHOLE else 0.0)
    return w


@triton.jit
def _multiply(weights, rows, acc, SWAPPED: tl.constexpr):
    return tl.dot(weights, tl.trans(rows), acc) if SWAPPED else tl.dot(rows, tl.trans(weights), acc)
