"""Partition one GPU into green contexts: groups of streaming multiprocessors (SMs), each with its own stream.

Forwards on different groups run concurrently; they share memory and its bandwidth, and one copy of the weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

# Without this, an H200 ran forwards on only four green contexts at once: the fifth waited for the first.
# The driver reads it when a process first uses a GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

RESOURCE_BYTES = 144  # sizeof(CUdevResource)
SM_COUNT_OFFSET = 96  # of the number of SMs in it
SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = NON_BLOCKING = 1
SM_GRANULARITY = 8  # SMs can be partitioned in groups of so many
_stream_sms: dict[int, int] = {}  # by the stream of a green context


class Resource(ctypes.Structure):
    """CUdevResource."""

    _fields_ = [("bytes", ctypes.c_ubyte * RESOURCE_BYTES)]

    @property
    def count(self) -> int:
        return ctypes.c_uint.from_buffer(self, SM_COUNT_OFFSET).value


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


def sms_per_slice(processors: int, slices: int) -> int:
    """Return the number of SMs in each of so many equal slices."""
    size = processors // slices // SM_GRANULARITY * SM_GRANULARITY
    if slices < 1 or size < SM_GRANULARITY:
        most = processors // SM_GRANULARITY
        raise ValueError(f"{slices} slices of a GPU of {processors} multiprocessors: must be 1 to {most}")
    return size


def stream_sms(stream: Any) -> int:
    """The number of SMs that a stream is limited to; 0 if it is not."""
    return 0 if stream is None else _stream_sms.get(stream.cuda_stream, 0)


def green_context_streams(device: int, slices: int, shares: Sequence[int]) -> list[Any]:
    """Create one stream per entry of `shares`, each on that many of the GPU's equal slices, for the process's life."""
    wanted = sum(shares)
    if wanted > slices:
        raise ValueError(f"{wanted} slices for the servers: the GPU is cut into {slices}")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    whole = Resource()
    _call("cuDeviceGetDevResource", device, ctypes.byref(whole), SM)
    size = sms_per_slice(whole.count, slices)
    groups = (Resource * wanted)()
    available = ctypes.c_uint(wanted)
    rest = Resource()
    # One call for all of them: every call starts with the same SMs.
    _call(
        "cuDevSmResourceSplitByCount", groups, ctypes.byref(available), ctypes.byref(whole), ctypes.byref(rest), 0, size
    )
    if available.value < wanted:
        raise ValueError(f"{wanted} slices of {size} multiprocessors: the GPU gives only {available.value}")
    ends = list(accumulate(shares))
    return [_stream(device, groups[end - share : end]) for share, end in zip(shares, ends)]


def _stream(device: int, groups: Sequence[Resource]) -> Any:
    joined = (Resource * len(groups))(*groups)
    description, context, stream = (ctypes.c_void_p() for _ in range(3))
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), joined, len(groups))
    _call("cuGreenCtxCreate", ctypes.byref(context), description, device, DEFAULT_STREAM)
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
    _stream_sms[stream.value or 0] = sum(group.count for group in groups)
    return torch.cuda.ExternalStream(stream.value or 0, device=device)  # type: ignore[no-untyped-call]
