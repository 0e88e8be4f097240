"""What splitting a target over two processes costs or gives: one forward, in milliseconds, measured.

The built-in target, and a Llama with random weights that is large enough for its matrices to matter; whole
with one thread, whole with two, and in two parts with a thread each. Each way runs in a process of its own,
in turn, and the fastest forward of all rounds counts: what else the machine does only adds.

    python benchmarks/parallel.py --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from dsi.engine.build import backend, forward_ms, quiet
from dsi.fleets.processes import FORK
from dsi.models.hf import load_model
from dsi.models.names import model_path
from dsi.models.tensor_parallel import TensorParallel

NEW = (1, 8)  # new tokens of a forward
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 8}


def large() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, vocab_size=4096, max_position_embeddings=512)).eval()


def whole(threads: int) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        torch.set_num_threads(threads)
        return backend(model)

    return make


WAYS: dict[str, Callable[[Any], Any]] = {
    "whole, 1 thread": whole(1),
    "whole, 2 threads": whole(2),
    "2 parts, 1 thread each": lambda model: TensorParallel(model, 2),
}


def measured(model: Any, way: Callable[[Any], Any]) -> list[float]:
    """In a process that ends: threads and parts are started anew each time."""
    ours, theirs = FORK.Pipe()

    def tell() -> None:
        found = way(model)
        theirs.send([forward_ms(found, new, 30) for new in NEW])

    process = FORK.Process(target=tell)
    process.start()
    times: list[float] = ours.recv()
    process.join()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    quiet()
    torch.set_num_threads(1)  # before the first forward: a pool of threads does not survive a fork
    for name, model in (("built-in target", load_model(model_path("builtin", "target"))), ("large Llama", large())):
        print(f"{name}, {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f}M parameters")
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, make in WAYS.items():
                found[way].append(measured(model, make))
        for way, times in found.items():
            best = [min(column) for column in zip(*times)]
            print(f"  {way:24}", *(f"{new} new: {ms:7.2f} ms" for new, ms in zip(NEW, best)), sep="  ")


if __name__ == "__main__":
    main()
