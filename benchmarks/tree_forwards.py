"""A forward over a tree of draft tokens against one over a chain of as many, compiled and in torch. Measured.

One thread on one core, interleaved. Also the forward over one token after three of them were accepted, which moves the
keys and values of a tree's path and only cuts back those of a chain.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

import harness
from dsi.core.tree_shape import END, Tree
from dsi.engine.build import cpu_model, load_for_cpu, silence_transformers
from dsi.models.hf import Transformer
from dsi.models.llama_cpu import LlamaCpu
from dsi.models.names import model_path
from dsi.models.protocol import ForwardRequest, tree_path

SIZES = (5, 9, 17, 33)
PREFIX = 128  # tokens of the text
ACCEPTED = 3  # draft tokens
CHILDREN = (3, 2)  # of the likeliest node of a level and of the next; others have one
COMPILED, TORCH = "compiled", "torch"
CHAIN, TREE = "chain", "tree"

Forward = Callable[[int], tuple[float, float]]  # milliseconds over so many draft tokens, and after some were accepted


def chain(size: int) -> Tree:
    return tuple((number - 1, 2 + number) for number in range(size))


def bushy_tree(size: int) -> Tree:
    """Levels of up to a third of the nodes, the likeliest node with the most children, as a drafter would grow it."""
    tree: list[tuple[int, int]] = []
    level = [END]
    while len(tree) < size:
        children = [parent for rank, parent in enumerate(level) for _ in range(dict(enumerate(CHILDREN)).get(rank, 1))]
        children = children[: min(size - len(tree), max(2, size // 3))]
        level = list(range(len(tree), len(tree) + len(children)))
        tree += [(parent, 2 + number) for number, parent in zip(level, children)]
    return tuple(tree)


def timed(model: Transformer, prefix: Sequence[int], kind: str) -> Forward:
    def verify(tree: Tree) -> Any:
        if kind == TREE:
            return model.forward_packed([ForwardRequest(prefix, len(prefix) + 1, tree=tree, asked=range(len(tree)))])
        return model.forward([*prefix, *(token for _, token in tree)], len(prefix) + 1)

    def forward(size: int) -> tuple[float, float]:
        tree = bushy_tree(size) if kind == TREE else chain(size)
        path = next(path for node in reversed(range(size)) if len(path := tree_path(tree, node)) == min(ACCEPTED, size))
        text = [*prefix, *path, 1]
        model.forward(prefix, len(prefix))
        began = time.perf_counter()
        verify(tree)
        verified = time.perf_counter()
        model.forward(text, len(text))
        return 1000 * (verified - began), 1000 * (time.perf_counter() - verified)

    return forward


def implementations(path: str, dtype: str) -> dict[tuple[str, str], Forward]:
    weights = load_for_cpu(path, dtype)
    prefix = [i % 1000 + 1 for i in range(PREFIX)]
    in_torch = LlamaCpu(weights) if LlamaCpu.supports(weights) else Transformer(weights)
    models = {COMPILED: cpu_model(weights), TORCH: in_torch}
    return {(name, kind): timed(model, prefix, kind) for name, model in models.items() for kind in (CHAIN, TREE)}


Times = Mapping[tuple[str, str], Sequence[tuple[float, float]]]


def lines(times: Times) -> list[str]:
    heads = ("", "nodes", "chain, ms", "tree, ms", "of the chain's", "next, ms", "next, ms", "of the chain's")
    rows = []
    for name in (COMPILED, TORCH):
        for i, size in enumerate(SIZES):
            chains, trees = (times[name, kind][i :: len(SIZES)] for kind in (CHAIN, TREE))
            rows.append((name, size, *columns(chains, trees, 0), *columns(chains, trees, 1)))
    return list(harness.table(heads, rows))


def columns(chains: Sequence[tuple[float, float]], trees: Sequence[tuple[float, float]], which: int) -> tuple[str, ...]:
    chain_ms, tree_ms = ([run[which] for run in runs] for runs in (chains, trees))
    return f"{median(chain_ms):.2f}", f"{median(tree_ms):.2f}", f"{median(harness.ratios(tree_ms, chain_ms)):.2f}"


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "--repeats 20", repeats=20)
    parser.add_argument("--model", default="builtin", help="a model folder, or builtin")
    parser.add_argument("--role", choices=("target", "drafter"), default="target", help="of the built-in pair")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def main() -> None:
    options = parse()
    silence_transformers()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    forwards = implementations(model_path(options.model, options.role), options.dtype)
    times = harness.interleave(forwards, SIZES, options.repeats, warm_up=2)
    note = f"measured on one core, {options.dtype}, after {PREFIX} tokens; medians, ratios within a round"
    results = {"dtype": options.dtype, "ms": {" ".join(name): runs for name, runs in times.items()}, "sizes": SIZES}
    harness.report(options, "measured", results, [*lines(times), note])


if __name__ == "__main__":
    main()
