"""A forward of a pair's models by its number of tokens: compiled, in torch, and by llama.cpp. Measured.

One thread on one core, interleaved: each round times every implementation at every width before the next. llama.cpp
computes the logits of the last token alone; ours those of all, as a verification needs them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from statistics import median
from typing import Any

import torch

import harness
from dsi.engine.build import cpu_model, load_for_cpu, silence_transformers
from dsi.models.hf import Transformer
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import model_path
from llama_cpp import LlamaCpp, gguf

WIDTHS = (1, 5, 9, 17)
PREFIX = 128  # tokens before those that are timed
COMPILED, TORCH, LLAMA_CPP = "compiled", "torch", "llama.cpp"
ROLES = ("target", "drafter")

Forward = Callable[[int], float]  # milliseconds of a forward over so many tokens


def timed(model: Transformer, prefix: Sequence[int]) -> Forward:
    fresh = count(2)

    def forward(width: int) -> float:
        tokens = [*prefix, *(next(fresh) % 1000 for _ in range(width))]
        model.forward(prefix, len(prefix))
        began = time.perf_counter()
        model.forward(tokens, len(tokens) + 1 - width)
        return 1000 * (time.perf_counter() - began)

    return forward


def implementations(path: str, dtype: str, servers: ExitStack) -> dict[str, Forward]:
    weights = load_for_cpu(path, dtype)
    prefix = [i % 1000 + 1 for i in range(PREFIX)]
    in_torch = LlamaCpu(weights) if LlamaCpu.supports(weights) else Transformer(weights)
    server = servers.enter_context(LlamaCpp(gguf(path, dtype), weights.config.eos_token_id, threads=1))
    fresh = count(2)
    theirs = lambda width: server.forward_ms(prefix, [next(fresh) % 1000 for _ in range(width)])  # noqa: E731
    return {COMPILED: timed(cpu_model(weights), prefix), TORCH: timed(in_torch, prefix), LLAMA_CPP: theirs}


def measure(options: argparse.Namespace, role: str) -> dict[str, dict[int, list[float]]]:
    with ExitStack() as servers:
        forwards = implementations(model_path(getattr(options, role), role), options.dtype, servers)
        times = harness.interleave(forwards, options.widths, options.repeats, warm_up=2)
    widths = options.widths
    return {name: {width: ms[i :: len(widths)] for i, width in enumerate(widths)} for name, ms in times.items()}


Times = Mapping[str, Mapping[Any, Sequence[float]]]  # milliseconds by implementation and width


def lines(role: str, times: Times) -> list[str]:
    heads = (role, "compiled, ms", "torch, ms", "llama.cpp, ms", "compiled of torch's", "compiled of llama.cpp's")
    rows = [
        (
            f"{width} token{'s' * (width > 1)}",
            *(f"{median(times[name][width]):.2f}" for name in (COMPILED, TORCH, LLAMA_CPP)),
            *(f"{ratio(times, name, width):.2f}" for name in (TORCH, LLAMA_CPP)),
        )
        for width in times[COMPILED]
    ]
    return [*harness.table(heads, rows), ""]


def ratio(times: Times, name: str, width: Any) -> float:
    """The time of the compiled forward over that of another, within a round."""
    return median(harness.ratios(times[COMPILED][width], times[name][width]))


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "--repeats 20", repeats=20)
    for role in ROLES:
        parser.add_argument(f"--{role}", default="builtin", help="a model folder, or builtin")
    parser.add_argument("--roles", type=harness.names(*ROLES), default=list(ROLES), help=", ".join(ROLES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.set_defaults(widths=WIDTHS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    silence_transformers()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    results: dict[str, Any] = {role: measure(options, role) for role in options.roles}
    note = f"measured on one core, {options.dtype}, after {PREFIX} tokens; medians, ratios within a round"
    tables = [line for role in options.roles for line in lines(role, results[role])]
    harness.report(options, "measured", {"dtype": options.dtype, "ms": results}, [*tables, note])


if __name__ == "__main__":
    main()
