"""Forwards over draft trees beside forwards over as many rows of one text, on one whole GPU. Measured.

Models of real shapes with random weights in bfloat16, after a text that is cached: tokens that continue it, the trees
that are best for SI, and levels of a tree in the drafter, whose nodes are on different paths. A time is the GPU's
alone, of captured forwards one behind another; how long the host takes to describe a forward stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

import harness
from dsi.core.tree_shape import END, TREE_BRANCHES, Tree, expansions, rank_chances
from dsi.engine.build import silence_transformers
from dsi.models.cuda import packed_attention, packed_rows, triton_kernels
from dsi.models.cuda.graphs import on
from dsi.models.cuda.packed import NO_MOVES, PackedCudaModel
from dsi.models.protocol import ForwardRequest
from dsi.models.shapes import SHAPES, random_model
from dsi.planning.latency import LatencyModel
from dsi.planning.trees import DEPTHS, si_tree_ms

ROOM = 1024  # tokens of a text
LABEL = "measured, random weights"
DRAFTER = "vicuna-68m"
LEVELS = (1, 4, 8, 16)  # nodes that a drafter's forward expands
ABOVE = 3  # nodes on the path to them
TREES = (15, 31, 63)  # nodes: with the token before them, rows that forwards are captured for
ROWS = (1, 16, 32, 64)
# Of the attention kernel: programs for each multiprocessor, tiles of keys that one reads ahead, new tokens that it
# writes at once, and the most registers that a thread may have.
ATTENTION = {
    "programs": packed_rows.PROGRAMS_PER_SM,
    "stages": triton_kernels.STAGES,
    "new": triton_kernels.NEW,
    "registers": 255,
}
RATES, RUNNER_UP = (0.63, 0.8, 0.93), 0.5
LATENCY = LatencyModel(target_ms=4.0, drafter_ms=0.12)  # of the 7B and its drafter: which trees are best for SI

Time = tuple[float, float]  # milliseconds of a forward, and of the host to describe it
Forward = Callable[[int], Time]  # launched so often


def best_tree(acceptance: float, size: int) -> Tree:
    """The tree of this size that is fastest under SI, each token being the rank of its choice."""
    chances = rank_chances(acceptance, RUNNER_UP, TREE_BRANCHES)
    depth = min((depth for depth in DEPTHS if depth <= size), key=partial(si_tree_ms, LATENCY, chances, size))
    return tuple((node, rank) for node, count in expansions(chances, size, depth) for rank in range(count))


def timed(model: PackedCudaModel, request: ForwardRequest, above: Tree = ()) -> Forward:
    """The forward of a request, behind a text or nodes that are cached."""
    timing_event: Any = torch.cuda.Event
    cached = list(request.tokens[: request.start - 1])
    before = ForwardRequest(cached, len(cached), tree=above, asked=range(len(above)))

    def forward(launches: int) -> Time:
        model.forward_packed([before])
        [pooled] = begun = model.pool.begin([request])
        captured = model.forward_of(pooled.rows.num_rows)
        start, end = (timing_event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), on(model.stream):
            model.stream.synchronize()
            began = perf_counter()
            captured.fill([pooled.rows], NO_MOVES)
            described = perf_counter()
            captured.launch()
            start.record(model.stream)
            for _ in range(launches):
                captured.launch()
            end.record(model.stream)
        end.synchronize()
        model.pool.cancel(begun)
        return start.elapsed_time(end) / launches, 1000 * (described - began)

    return forward


def target_forwards(model: PackedCudaModel, text: Sequence[int]) -> dict[str, Forward]:
    """Chains, and trees behind one new token: of as many rows."""
    start = len(text) + 1
    forwards = {f"{rows} rows": timed(model, ForwardRequest([*text, *[1] * rows], start)) for rows in ROWS}
    for size in TREES:
        for acceptance in RATES:
            request = ForwardRequest([*text, 1], start, tree=best_tree(acceptance, size), asked=range(size))
            forwards[f"1 and {size} nodes, {acceptance:g}"] = timed(model, request)
    return forwards


def drafter_forwards(model: PackedCudaModel, text: Sequence[int]) -> dict[str, Forward]:
    """Levels of a tree: nodes below a path that is cached."""
    above: Tree = tuple((node - 1 if node else END, 1) for node in range(ABOVE))
    forwards = {}
    for width in LEVELS:
        tree = (*above, *((ABOVE - 1, token) for token in range(width)))
        level = ForwardRequest(text, len(text) + 1, tree=tree, asked=range(ABOVE, ABOVE + width))
        forwards[f"level of {width}"] = timed(model, level, above)
    return forwards


def set_attention(programs: int, stages: int, new: int, registers: int) -> None:
    """Compile and launch the attention of the models that follow in this way."""
    kernel: Any = packed_attention
    packed_rows.PROGRAMS_PER_SM, triton_kernels.STAGES, kernel.NEW = programs, stages, new
    limit = {"maxnreg": registers} if registers < ATTENTION["registers"] else {}
    launch_options = kernel.launch_options
    kernel.launch_options = lambda device: launch_options(device) | limit


def times(shape: str, text: Sequence[int], launches: int, repeats: int) -> dict[str, list[Time]]:
    weights, drafts = random_model(shape, "bfloat16", "cuda:0", ROOM), shape == DRAFTER
    model = PackedCudaModel(weights, ROOM, 2 * ROOM, sizes=LEVELS if drafts else ROWS, drafts=drafts)
    forwards = drafter_forwards(model, text) if drafts else target_forwards(model, text)
    return harness.interleave(forwards, [launches], repeats, warm_up=1)


def lines(rows: dict[str, dict[str, list[Time]]]) -> list[str]:
    cells = [
        [shape, name, harness.spread([ms for ms, _ in runs], 3), f"{1000 * median(ms for _, ms in runs):.0f}"]
        for shape, forwards in rows.items()
        for name, runs in forwards.items()
    ]
    return list(harness.table(["shape", "forward", "ms", "described in, us"], cells))


def main() -> None:
    example = "--shapes vicuna-7b --programs 3"
    parser = harness.arguments(__doc__, example, prompt=144, launches=10, repeats=20, **ATTENTION)
    default = ["vicuna-7b", "vicuna-13b", DRAFTER]
    parser.add_argument("--shapes", type=harness.names(*SHAPES), default=default, help=",".join(default))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    most = ROOM - max(ROWS)
    if options.prompt > most:
        parser.error(f"--prompt {options.prompt}: must be 1 to {most}")
    silence_transformers()
    set_attention(options.programs, options.stages, options.new, options.registers)
    rows: dict[str, Any] = {}
    attention = {name: getattr(options, name) for name in ATTENTION}
    facts = {"gpu": torch.cuda.get_device_name(0), "attention": attention, "ms": rows}
    text = [1 + i % 1000 for i in range(options.prompt)]
    for shape in harness.tracked(options.shapes, len(options.shapes), "shapes"):
        rows[shape] = times(shape, text, options.launches, options.repeats)
        harness.save(options, LABEL, facts)  # a run may be cut off
        torch.cuda.empty_cache()
    harness.report(options, LABEL, facts, lines(rows))


if __name__ == "__main__":
    main()
