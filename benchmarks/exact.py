"""Whether a token's logits, and with them a text, are the same to the bit under every algorithm. Measured.

First the logits: a text is cut into forwards of every width up to 64 and at random, and each position's logits are
compared with those of another cut, bit by bit. On a GPU, then packed forwards: new tokens of several texts, and of
draft trees behind them, beside those of each text alone. Then texts: the built-in pair, greedy and sampled, under
non-SI, SI, PEARL, DSI with 1 to 7 targets, and auto; and with one target under draft trees, alone and many at once.
Exits with status 1 if anything differs. `--device cuda:0` does all on a GPU: the logits of models of real shapes with
random weights, on the whole GPU, in one slice of it and in seven at once, the texts in slices, those of trees on the
whole GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from random import Random
from typing import Any

import torch

import harness
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import END, Tree
from dsi.engine.build import cpu_model, load_for_cpu, silence_transformers
from dsi.engine.config import DTYPES
from dsi.engine.engine import Engine, TextStream
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.cuda.green_contexts import green_context_streams
from dsi.models.cuda.packed import PackedCudaModel
from dsi.models.hf import load_model
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import ForwardRequest, tree_path
from dsi.models.shapes import SHAPES, random_model

CPU = "cpu"
LENGTH, MAX_WIDTH = 192, 64  # tokens of the text that is cut, and of its forwards
MAX_SP, SLICES = 7, 16
GPU_DTYPE = "bfloat16"
ON_GPU = (TARGET, DRAFTER, *SHAPES)
PARTS = ("logits", "packed", "texts", "trees")
AT_ONCE = 16  # texts
TEXTS, TREE_NODES = 8, 24  # of packed forwards
DONE = object()
OPENINGS = ("Once upon a time", "One day", "In a small town", "Long ago", "On a rainy night")
NAMES = ("Lily", "Tom", "a brave dog", "the old king", "Mia and her friend", "a tiny robot", "Sam", "the red fox")
ACTS = ("went to", "was looking for", "did not want to leave", "had a dream about", "found a map of")
SPECS = {
    "nonsi": SpecConfig("nonsi"),
    **{f"si {block}": SpecConfig("si", block) for block in (1, 2, 4, 8, 16)},
    "pearl": SpecConfig("pearl", 5),
    **{f"dsi sp {sp}": SpecConfig("dsi", 3, max_targets=sp) for sp in range(1, MAX_SP + 1)},
    "auto": SpecConfig("auto"),
}
TREES = {
    "nonsi": SpecConfig("nonsi"),
    **{f"si tree {tree}": SpecConfig("si", tree=tree) for tree in (4, 16, 32)},
    "pearl tree 16": SpecConfig("pearl", tree=16),
    "dsi tree 16": SpecConfig("dsi", tree=16),
    "auto": SpecConfig("auto"),
}

TEMPERATURES = (0.0, 0.8)

Cut = list[int]
Row = dict[str, Any]
Task = tuple[int, str, float]  # seed, prompt and temperature


def cuts(random: Random, count: int) -> Iterator[Cut]:
    """Every width, then random ones."""
    for width in range(1, MAX_WIDTH + 1):
        yield lengths(range(width, LENGTH, width))
    for _ in range(count):
        yield lengths(accumulate(random.choices((1, 1, 2, 5, 9, 17, 33, MAX_WIDTH), k=LENGTH)))


def lengths(ends: Any) -> Cut:
    return [b - a for a, b in pairwise([0, *(end for end in ends if end < LENGTH), LENGTH])]


def cpu_rows(path: str, dtype: str) -> Callable[[Sequence[int], Cut], torch.Tensor]:
    """Compute the logits of all positions of a text on the CPU, in forwards of given lengths."""
    model: Any = cpu_model(load_for_cpu(path, dtype))

    def logits(text: Sequence[int], cut: Cut) -> torch.Tensor:
        model.clear_cache()
        return torch.cat([model.forward(text[:end], start + 1) for start, end in pairwise([0, *accumulate(cut)])])

    return logits


def differing_on_cpu(role: str, dtype: str, random_cuts: int) -> Row:
    """How many rows of logits differ from those of one cut."""
    random, logits = Random(1), cpu_rows(model_path(BUILTIN, role), dtype)
    text = random.choices(range(1, 4000), k=LENGTH)
    expected, rows, differing = logits(text, [1] * LENGTH), 0, 0
    for cut in cuts(random, random_cuts):
        actual = logits(text, cut)
        rows += len(actual)
        differing += int((actual != expected).any(1).sum())
    return {"model": role, "dtype": dtype, "cuts": MAX_WIDTH + random_cuts, "rows": rows, "differing": differing}


@dataclass
class GpuComparison:
    """Counts rows of logits that a whole GPU or slices of it compute differently from what is expected."""

    text: list[int]
    expected: torch.Tensor | None = None
    rows: int = 0
    differing: int = 0

    def steps(self, model: CudaGraphModel, own_cuts: Iterable[Cut]) -> Iterator[None]:
        """Yield while the GPU computes, so that several slices do at once."""
        for cut in own_cuts:
            model.cached_tokens.clear()
            rows = []
            for start, end in pairwise([0, *accumulate(cut)]):
                yield from model.poll_answer(ForwardRequest(self.text[:end], start + 1))
                rows.append(model.last_logits()[: end - start])
            self.compare(torch.cat(rows))

    def compare(self, logits: torch.Tensor) -> None:
        torch.cuda.synchronize()
        if self.expected is None:
            self.expected = logits
            return
        self.rows += len(logits)
        self.differing += int((logits != self.expected).any(1).sum())


def weights_of(name: str, device: str) -> Any:
    """A model of the built-in pair, or of a shape with random weights."""
    if name in (TARGET, DRAFTER):
        return load_model(model_path(BUILTIN, name), GPU_DTYPE, device)
    model = random_model(name, GPU_DTYPE, device, LENGTH + MAX_WIDTH)
    for part, weight in model.named_parameters():
        if part.endswith("bias"):  # which transformers begins with zeros
            torch.nn.init.normal_(weight, std=0.02)
    return model


def differing_on_gpu(name: str, device: str, random_cuts: int, slices: int = SLICES) -> list[Row]:
    """Of a shape with random weights, or of the built-in pair: on the whole GPU, alone in a slice, and in all at once.

    All of them compare with what the whole GPU computes token by token.
    """
    room, weights, random = LENGTH + MAX_WIDTH, weights_of(name, device), Random(1)
    comparison = GpuComparison(random.choices(range(1, 4000), k=LENGTH))
    every, few = list(cuts(random, random_cuts)), list(cuts(random, 0))[8::8]
    servers = [CudaGraphModel(weights, room, segments=1)]
    if not servers[0].exact:
        harness.fail(
            f"{name} on {device}: forwards are not exact here ({servers[0].eager_reason or servers[0].slower_reason})"
        )
    rows = [run_together(comparison, servers, [[1] * LENGTH, *every], name, "whole GPU")]
    sliced = [
        CudaGraphModel(weights, room, stream)
        for stream in green_context_streams(torch.device(device).index or 0, slices, [1] * MAX_SP)
    ]
    rows.append(run_together(comparison, sliced[:1], few, name, "one slice"))
    rows.append(run_together(comparison, sliced, every, name, f"{len(sliced)} slices at once"))
    return rows


def differing_packed(name: str, device: str, forwards: int) -> Row:
    """Rows of forwards that texts and trees share, beside those of each text alone, token by token."""
    weights, random = weights_of(name, device), Random(4)
    alone = CudaGraphModel(weights, LENGTH + MAX_WIDTH, segments=1)
    packed = PackedCudaModel(weights, LENGTH + MAX_WIDTH, 4 * TEXTS * LENGTH, 2 * TEXTS)
    texts = [random.choices(range(1, 4000), k=LENGTH) for _ in range(TEXTS)]
    expected = [rows_alone(alone, text, 1) for text in texts]
    lengths, rows, differing = [1] * TEXTS, 0, 0
    for _ in range(forwards):
        requests, wanted = [], []
        for i, text in enumerate(texts):
            new = min(random.choice((0, 1, 1, 2, 5, 9)), LENGTH - lengths[i])
            lengths[i] = lengths[i] + new if lengths[i] < LENGTH else random.randrange(1, LENGTH)
            request = ForwardRequest(text[: lengths[i]], max(1, lengths[i] + 1 - max(1, new)))
            wanted.append(expected[i][request.start - 1 : lengths[i]])
            if i == 0 and lengths[i] < LENGTH - TREE_NODES:
                request.tree = random_tree(random, text[lengths[i] :])
                request.asked = range(len(request.tree))
                paths = [[*request.tokens, *tree_path(request.tree, node)] for node in request.asked]
                ends = (rows_alone(alone, path, len(request.tokens))[-1:] for path in paths)
                wanted[-1] = torch.cat([wanted[-1], *ends])
            requests.append(request)
        for logits, own in zip(packed.forward_packed(requests), wanted):
            rows += len(own)
            differing += int((logits != own.float()).any(1).sum())
    return {
        "model": name,
        "dtype": GPU_DTYPE,
        "where": "packed",
        "cuts": forwards,
        "rows": rows,
        "differing": differing,
    }


def rows_alone(model: CudaGraphModel, text: list[int], start: int) -> torch.Tensor:
    """The logits after text[:i] from `start` on, a forward for each token: those before are cached, or `start` is 1."""
    rows = []
    for end in range(start, len(text) + 1):
        model.answer(ForwardRequest(text[:end], end))
        rows.append(model.last_logits()[:1])
    return torch.cat(rows)


def random_tree(random: Random, continuation: Sequence[int]) -> Tree:
    """Some nodes of the text that follows, and others beside them."""
    tree: list[tuple[int, int]] = []
    depths: list[int] = []
    for _ in range(TREE_NODES):
        parent = random.randrange(-1, len(tree))
        depths.append(depths[parent] + 1 if parent != END else 0)
        tree.append((parent, random.choice((continuation[depths[-1]], random.randrange(1, 4000)))))
    return tuple(tree)


def run_together(
    comparison: GpuComparison, models: Sequence[CudaGraphModel], every: Sequence[Cut], name: str, where: str
) -> Row:
    """Each model computes its share of the cuts, all at the same time."""
    comparison.rows = comparison.differing = 0
    running = [comparison.steps(model, every[i :: len(models)]) for i, model in enumerate(models)]
    with torch.inference_mode():
        while running:
            running = [steps for steps in running if next(steps, DONE) is not DONE]
    row = {"model": name, "dtype": GPU_DTYPE, "where": where, "cuts": comparison.rows // LENGTH}
    return row | {"rows": comparison.rows, "differing": comparison.differing}


def prompts() -> list[str]:
    made = [f"{opening}, {name} {act}" for opening, name, act in product(OPENINGS, NAMES, ACTS)]
    return Random(2).sample(made, len(made))


@dataclass(frozen=True)
class Writing:
    """What texts of the built-in pair are compared, and where."""

    dtype: str
    device: str
    tokens: int

    @contextmanager
    def engine(self, on_gpu: Mapping[str, Any], **anywhere: Any) -> Iterator[Engine]:
        placed = {} if self.device == CPU else on_gpu
        with Engine.load(dtype=self.dtype, **anywhere, **placed) as engine:
            if not engine.deployment.exact:
                reasons = "; ".join(engine.deployment.warnings)
                harness.fail(f"{self.dtype} on {self.device}: forwards are not exact here ({reasons})")
            yield engine

    def start(self, engine: Engine, task: Task, spec: SpecConfig) -> TextStream:
        seed, text, temperature = task
        return engine.stream(text, spec=spec, max_new_tokens=self.tokens, temperature=temperature, seed=seed)

    def written(self, engine: Engine, tasks: Sequence[Task], spec: SpecConfig) -> list[Tokens]:
        """The texts of these tasks, all at once."""
        streams = [self.start(engine, task, spec) for task in tasks]
        for stream in streams:
            for _ in stream:
                pass
        return [stream.completion.tokens for stream in streams]

    def rows(self, differing: Mapping[str, int], texts: int) -> list[Row]:
        counted = {"dtype": self.dtype, "texts": texts}
        return [{"algorithm": name, **counted, "differing": number} for name, number in differing.items()]

    def differing_texts(self, tasks: Sequence[Task]) -> Iterator[list[Row]]:
        """Generate every text under every algorithm, and count those that are not plain decoding's: so far."""
        differing = dict.fromkeys(SPECS, 0)
        with self.engine({"target_devices": f"{self.device}/8"}, sp=MAX_SP) as engine:
            for number, task in enumerate(harness.tracked(tasks, len(tasks), f"texts in {self.dtype}"), 1):
                [plain] = self.written(engine, [task], SPECS["nonsi"])
                for name, spec in SPECS.items():
                    differing[name] += self.written(engine, [task], spec) != [plain]
                yield self.rows(differing, number)

    def differing_trees(self, tasks: Sequence[Task]) -> Iterator[list[Row]]:
        """The same with draft trees and one target: each text alone, and many at once."""
        differing = {f"{name}, {how}": 0 for how in ("alone", "at once") for name in TREES}
        groups = [tasks[i : i + AT_ONCE] for i in range(0, len(tasks), AT_ONCE)]
        with self.engine({"target_devices": self.device, "drafter_device": self.device}) as engine:
            for number, group in enumerate(harness.tracked(groups, len(groups), f"groups in {self.dtype}"), 1):
                plain = [self.written(engine, [task], TREES["nonsi"])[0] for task in group]
                for name, spec in TREES.items():
                    alone = [self.written(engine, [task], spec)[0] for task in group]
                    for how, texts in (("alone", alone), ("at once", self.written(engine, group, spec))):
                        differing[f"{name}, {how}"] += sum(a != b for a, b in zip(texts, plain))
                yield self.rows(differing, min(number * AT_ONCE, len(tasks)))


def main() -> None:
    parser = harness.arguments(__doc__, "--prompts 20 --tokens 32", prompts=200, tokens=48, cuts=100)
    parser.add_argument("--device", default=CPU, help="cpu, or cuda:0")
    parser.add_argument("--only", type=harness.names(*PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--dtype", type=harness.names(*DTYPES), default=list(DTYPES), help="of logits on the CPU; all")
    parser.add_argument("--shapes", type=harness.names(*ON_GPU), default=list(ON_GPU), help="on a GPU; all")
    parser.add_argument("--text-dtype", type=harness.names(*DTYPES), default=["bfloat16"], help="of the texts")
    options = parser.parse_args()
    asked = prompts()[: options.prompts]
    if options.prompts > len(asked):
        parser.error(f"{options.prompts} prompts: there are {len(asked)}")
    silence_transformers()
    results: dict[str, Any] = {
        "device": options.device,
        "tokens": options.tokens,
        "logits": [],
        "packed": [],
        "texts": [],
        "trees": [],
    }
    for name, rows in parts(options, asked):
        results[name] = rows
        harness.save(options, "measured", results)  # a run may be cut off
    tables = [results[name] for name in PARTS if results[name]]
    lines = [line for part in tables for line in harness.table(list(part[0]), [list(row.values()) for row in part])]
    harness.report(options, "measured", results, lines)
    if total := sum(row["differing"] for part in tables for row in part):
        harness.fail(f"{total} rows of logits and texts differ")


def parts(options: argparse.Namespace, asked: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of the parts that are asked for: those that there are so far, again and again."""
    if "logits" in options.only:
        logits: list[Row] = []
        for row in differing_logits(options):
            harness.log(f"  {row}")
            logits.append(row)
            yield "logits", logits
    if "packed" in options.only and options.device != CPU:
        packed: list[Row] = []
        for name in harness.tracked(options.shapes, len(options.shapes), "shapes"):
            packed.append(differing_packed(name, options.device, options.cuts))
            harness.log(f"  {packed[-1]}")
            yield "packed", packed
    tasks = [(seed, *pair) for seed, pair in enumerate(product(asked, TEMPERATURES))]
    for part in ("texts", "trees"):
        before: list[Row] = []
        for dtype in options.text_dtype if part in options.only else ():
            writing = Writing(dtype, options.device, options.tokens)
            rows: list[Row] = []
            for rows in writing.differing_texts(tasks) if part == "texts" else writing.differing_trees(tasks):
                yield part, before + rows
            before += rows


def differing_logits(options: argparse.Namespace) -> Iterator[Row]:
    if options.device == CPU:
        pairs = list(product((TARGET, DRAFTER), options.dtype))
        for role, dtype in harness.tracked(pairs, len(pairs), "models"):
            yield differing_on_cpu(role, dtype, options.cuts)
    else:
        for name in harness.tracked(options.shapes, len(options.shapes), "shapes"):
            yield from differing_on_gpu(name, options.device, options.cuts)


if __name__ == "__main__":
    main()
