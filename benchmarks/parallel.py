"""What splitting a target over two processes costs or gives: one forward, in milliseconds, measured.

The built-in target, and a Llama with random weights that is large enough for its matrices to matter; whole
with one thread, whole with two, and on two ranks with a thread each. Each layout runs in a process of its own,
in turn, and the fastest forward of all rounds counts: what else the machine does only adds.

    python benchmarks/parallel.py --rounds 5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf

import harness
from dsi.engine.build import cpu_model, silence_transformers
from dsi.engine.profile_cpu import forward_ms
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
        return cpu_model(model)

    return make


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "whole, 1 thread": whole(1),
    "whole, 2 threads": whole(2),
    "2 ranks, 1 thread each": lambda model: TensorParallel(model, 2),
}


def timed(model: Any, layout: Callable[[Any], Any], _: int) -> list[float]:
    """Time forwards in a process that ends: threads and ranks are started anew each time."""
    receiver, sender = FORK.Pipe()

    def send() -> None:
        split = layout(model)
        sender.send([forward_ms(split, new, 30) for new in NEW])

    process = FORK.Process(target=send)
    process.start()
    times: list[float] = receiver.recv()
    process.join()
    return times


def main() -> None:
    options = harness.arguments(__doc__, "--rounds 2", rounds=5).parse_args()
    silence_transformers()
    torch.set_num_threads(1)  # before the first forward: a pool of threads does not survive a fork
    results, lines = {}, []
    for name, model in (("built-in target", load_model(model_path("builtin", "target"))), ("large Llama", large())):
        contenders = {layout: partial(timed, model, make) for layout, make in LAYOUTS.items()}
        runs = harness.interleave(contenders, range(options.rounds))
        results[name] = {layout: [min(column) for column in zip(*times)] for layout, times in runs.items()}
        lines.append(f"{name}, {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f}M parameters (measured)")
        heads = ("", *(f"{new} new, ms" for new in NEW))
        lines += harness.table(heads, [(layout, *(f"{ms:.2f}" for ms in row)) for layout, row in results[name].items()])
    harness.report(options, "measured", {"new_tokens": NEW, "ms": results}, lines)


if __name__ == "__main__":
    main()
