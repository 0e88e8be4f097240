"""Weights in huge pages: reading all of them for a few tokens, a processor spends much of its time on small ones."""

from __future__ import annotations

import mmap
from itertools import chain
from typing import Any

import torch
from torch import Tensor

PAGE = 1 << 21
ALIGNMENT = 64  # a cache line


def move_to_huge_pages(model: Any) -> Any:
    """Move a model's parameters into one memory range of huge pages, in their order, where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return model
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers()) if is_movable(tensor)}
    size = sum(aligned(tensor.nbytes, ALIGNMENT) for tensor in tensors.values())
    if size < PAGE:
        return model
    try:
        memory = mmap.mmap(-1, aligned(size, PAGE) + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or a limit on memory
        return model
    place = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the memory
    offset = -place.data_ptr() % PAGE
    for tensor in tensors.values():
        end = offset + tensor.nbytes
        moved = place[offset:end].view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor.data)
        tensor.data = moved
        offset = aligned(end, ALIGNMENT)
    return model


def is_movable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > 0


def aligned(size: int, to: int) -> int:
    return -(-size // to) * to
