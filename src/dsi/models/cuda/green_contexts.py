"""One GPU as several processors: groups of its multiprocessors, each with a stream of its own.

CUDA calls such a group a green context. Forwards on different groups truly overlap; they share the memory and
the way to it, and so one copy of the weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

# Without this, an H200 was seen to compute on four slices at once and no more: the fifth waited for the
# first. The driver looks at it when a process first uses a GPU, which may be soon.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

RESOURCE_BYTES = 144  # sizeof(CUdevResource)
COUNT_AT = 96  # where it says how many multiprocessors it is
SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = NON_BLOCKING = 1
STEP = 8  # multiprocessors that can only go together


class Resource(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * RESOURCE_BYTES)]

    @property
    def count(self) -> int:
        return ctypes.c_uint.from_buffer(self, COUNT_AT).value


@cache
def driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ValueError("slices of a GPU: this machine has no NVIDIA driver") from None


def _call(name: str, *arguments: Any) -> None:
    try:
        function = getattr(driver(), name)
    except AttributeError:
        raise ValueError(
            f"slices of a GPU: this driver has no {name}, which came with CUDA 12.4; use whole GPUs instead"
        ) from None
    if status := function(*arguments):
        raise ValueError(f"slices of a GPU: {name} says {status}")


def size_of_slice(processors: int, slices: int) -> int:
    """How many multiprocessors each of so many equal slices has."""
    size = processors // slices // STEP * STEP
    if slices < 1 or size < STEP:
        most = processors // STEP
        raise ValueError(f"{slices} slices of a GPU of {processors} multiprocessors: must be 1 to {most}")
    return size


def green_context_streams(device: int, slices: int, shares: Sequence[int]) -> list[Any]:
    """Streams on so many equal slices of a GPU, each with its share of them, until the process ends."""
    wanted = sum(shares)
    if wanted > slices:
        raise ValueError(f"{wanted} slices for the servers: the GPU is cut into {slices}")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    whole = Resource()
    _call("cuDeviceGetDevResource", device, ctypes.byref(whole), SM)
    size = size_of_slice(whole.count, slices)
    groups = (Resource * wanted)()
    found = ctypes.c_uint(wanted)
    rest = Resource()
    # One call for all of them: each call would begin with the same multiprocessors.
    _call(
        "cuDevSmResourceSplitByCount",
        groups,
        ctypes.byref(found),
        ctypes.byref(whole),
        ctypes.byref(rest),
        0,
        size,
    )
    if found.value < wanted:
        raise ValueError(f"{wanted} slices of {size} multiprocessors: the GPU gives only {found.value}")
    ends = list(accumulate(shares))
    return [_stream(device, groups[end - share : end]) for share, end in zip(shares, ends)]


def _stream(device: int, groups: Sequence[Resource]) -> Any:
    together = (Resource * len(groups))(*groups)
    description, context, stream = (ctypes.c_void_p() for _ in range(3))
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), together, len(groups))
    _call("cuGreenCtxCreate", ctypes.byref(context), description, device, DEFAULT_STREAM)
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
    return torch.cuda.ExternalStream(stream.value or 0, device=device)  # type: ignore[no-untyped-call]
