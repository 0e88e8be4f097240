"""Whether a token's logits, and with them a text, are the same to the bit under every algorithm. Measured.

First the logits: a text is cut into forwards of every width up to 64 and at random, and each position's logits are
compared with those of another cut, bit by bit. Then texts: the built-in pair, greedy and sampled, under non-SI, SI,
PEARL, DSI with 1 to 7 targets, and auto. Exits with status 1 if anything differs. `--device cuda:0` does both on a
GPU, with exact forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from random import Random
from typing import Any

import torch

import harness
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.engine.build import cpu_model, load_for_cpu, silence_transformers
from dsi.engine.build_cuda import EXACT_SIZE
from dsi.engine.config import DTYPES
from dsi.engine.engine import Engine
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.hf import load_model
from dsi.models.names import BUILTIN, model_path
from dsi.models.protocol import ForwardRequest

CPU = "cpu"
LENGTH, MAX_WIDTH = 192, 64  # tokens of the text that is cut, and of its forwards
MAX_SP = 7
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

Cut = list[int]


def cuts(random: Random, count: int) -> Iterator[Cut]:
    """Every width, then random ones."""
    for width in range(1, MAX_WIDTH + 1):
        yield lengths(range(width, LENGTH, width))
    for _ in range(count):
        yield lengths(accumulate(random.choices((1, 1, 2, 5, 9, 17, 33, MAX_WIDTH), k=LENGTH)))


def lengths(ends: Any) -> Cut:
    return [b - a for a, b in pairwise([0, *(end for end in ends if end < LENGTH), LENGTH])]


class CutModel:
    """Computes the logits of all positions of a text, in forwards of given lengths."""

    def __init__(self, role: str, dtype: str, device: str) -> None:
        path = model_path(BUILTIN, role)
        self._on_cpu = device == CPU
        if self._on_cpu:
            self._model: Any = cpu_model(load_for_cpu(path, dtype))
        else:
            weights = load_model(path, dtype, device)
            self._model = CudaGraphModel(weights, LENGTH + MAX_WIDTH, exact_size=EXACT_SIZE)

    def logits(self, text: Sequence[int], cut: Cut) -> torch.Tensor:
        parts = [self._rows(text[:end], start) for start, end in pairwise([0, *accumulate(cut)])]
        return torch.cat(parts)

    def _rows(self, text: Sequence[int], start: int) -> torch.Tensor:
        if start == 0:
            self._clear()
        if self._on_cpu:
            return self._model.forward(text, start + 1)  # type: ignore[no-any-return]
        self._model.answer(ForwardRequest(text, start + 1))
        return self._model._forwards[EXACT_SIZE].logits[: len(text) - start].clone()  # type: ignore[no-any-return]

    def _clear(self) -> None:
        if self._on_cpu:
            self._model.clear_cache()
        else:
            self._model.cached_tokens.clear()


def differing_rows(role: str, dtype: str, device: str, random_cuts: int) -> dict[str, Any]:
    """How many rows of logits differ from those of one cut."""
    random, model = Random(1), CutModel(role, dtype, device)
    text = random.choices(range(1, 4000), k=LENGTH)
    expected, rows, differing = model.logits(text, [1] * LENGTH), 0, 0
    for cut in cuts(random, random_cuts):
        logits = model.logits(text, cut)
        rows += len(logits)
        differing += int((logits != expected).any(1).sum())
    return {"model": role, "dtype": dtype, "cuts": MAX_WIDTH + random_cuts, "rows": rows, "differing": differing}


def prompts() -> list[str]:
    made = [f"{opening}, {name} {act}" for opening, name, act in product(OPENINGS, NAMES, ACTS)]
    return Random(2).sample(made, len(made))


def differing_texts(
    dtype: str, device: str, texts: Sequence[str], tokens: int, temperatures: Sequence[float]
) -> list[dict[str, Any]]:
    """Generate every text under every algorithm, and count those that are not plain decoding's."""
    placed: dict[str, Any] = {} if device == CPU else {"target_devices": f"{device}/8", "exact": True}
    tasks = [(text, temperature) for text in texts for temperature in temperatures]
    differing = dict.fromkeys(SPECS, 0)
    with Engine.load(dtype=dtype, sp=MAX_SP, **placed) as engine:
        if not engine.deployment.exact:
            harness.fail(f"{dtype} on {device}: forwards are not exact here ({'; '.join(engine.deployment.warnings)})")
        for seed, (text, temperature) in enumerate(harness.tracked(tasks, len(tasks), f"texts in {dtype}")):
            written: dict[str, Tokens] = {}
            for name, spec in SPECS.items():
                options = {"max_new_tokens": tokens, "temperature": temperature, "seed": seed}
                written[name] = engine.generate(text, spec=spec, **options).tokens
                differing[name] += written[name] != written["nonsi"]
    return [{"algorithm": name, "dtype": dtype, "texts": len(tasks), "differing": differing[name]} for name in SPECS]


def main() -> None:
    parser = harness.arguments(__doc__, "--prompts 20 --tokens 32", prompts=200, tokens=48, cuts=100)
    parser.add_argument("--device", default=CPU, help="cpu, or cuda:0")
    parser.add_argument("--dtype", type=harness.names(*DTYPES), default=list(DTYPES), help="of the logits; all")
    parser.add_argument("--text-dtype", type=harness.names(*DTYPES), default=["bfloat16"], help="of the texts")
    options = parser.parse_args()
    asked = prompts()[: options.prompts]
    if options.prompts > len(asked):
        parser.error(f"{options.prompts} prompts: there are {len(asked)}")
    silence_transformers()
    dtypes = [dtype for dtype in options.dtype if options.device == CPU or dtype != "int8"]
    pairs = list(product((TARGET, DRAFTER), dtypes))
    logits = [
        differing_rows(role, dtype, options.device, options.cuts)
        for role, dtype in harness.tracked(pairs, len(pairs), "models")
    ]
    texts = [
        row
        for dtype in options.text_dtype
        for row in differing_texts(dtype, options.device, asked, options.tokens, (0.0, 0.8))
    ]
    lines = [
        *harness.table(list(logits[0]), [list(row.values()) for row in logits]),
        "",
        *harness.table(list(texts[0]), [list(row.values()) for row in texts]),
    ]
    results = {"device": options.device, "tokens": options.tokens, "logits": logits, "texts": texts}
    harness.report(options, "measured", results, lines)
    if total := sum(row["differing"] for row in (*logits, *texts)):
        harness.fail(f"{total} rows of logits and texts differ")


if __name__ == "__main__":
    main()
