"""A token on one whole GPU: our captured forwards, and transformers, plain and compiled. Measured.

Models of real shapes with random weights in bfloat16, 128 tokens in the KV cache, greedy; a token's time is the slope
between a short and a long text. transformers is compiled as it advises for one text: a static cache and
`torch.compile` in mode `reduce-overhead`. Also how fast weights are read, as a share of what the GPU's memory can do,
and how long a forward takes by its number of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import CompileConfig

import harness
from dsi.engine.build import silence_transformers
from dsi.engine.profile_cuda import forwards_ms
from dsi.models.cuda.graphs import CudaGraphModel
from dsi.models.protocol import ForwardRequest
from dsi.models.shapes import SHAPES, random_model

PROMPT, ROOM = 128, 384
LABEL = "measured, random weights"
MEMORY_TB_S = {"NVIDIA H200": 4.8}  # by its data sheet
Generate = Callable[[int], Any]  # this many tokens


def ours(model: Any) -> tuple[Generate, dict[int, float], bool]:
    captured = CudaGraphModel(model, ROOM, segments=1)

    def generate(tokens: int) -> None:
        text = [1] * PROMPT
        for _ in range(tokens):
            text.extend(captured.answer(ForwardRequest(text, len(text))))

    return generate, forwards_ms(captured, PROMPT, ROOM), captured.exact


def by_transformers(model: Any, **options: Any) -> Generate:
    prompt = torch.ones(1, PROMPT, dtype=torch.long, device=model.device)

    def generate(tokens: int) -> None:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            **options,
        )

    return generate


def ms_per_token(generate: Generate, short: int, long: int) -> float:
    """The time of a token after the first ones, without that of the prompt."""
    times = []
    for tokens in (long, short):  # in this order a static cache has one length, and is compiled for once
        torch.cuda.synchronize()
        began = perf_counter()
        generate(tokens)
        torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return 1000 * (times[0] - times[1]) / (long - short)


def row(shape: str, tokens: int, repeats: int) -> dict[str, Any]:
    model = random_model(shape, "bfloat16", "cuda:0", ROOM)
    read = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    dsi, by_width, exact = ours(model)
    static = {"cache_implementation": "static", "compile_config": CompileConfig(mode="reduce-overhead")}
    contenders: dict[str, Generate] = {
        "dsi": dsi,
        "transformers, compiled": by_transformers(model, **static),
        "transformers": by_transformers(model),
    }
    times = harness.interleave(
        {
            name: lambda long, generate=generate: ms_per_token(generate, long // 4, long)  # type: ignore[misc]
            for name, generate in contenders.items()
        },
        [tokens],
        repeats,
        warm_up=1,
    )
    return {"shape": shape, "ms": times, "by_width": by_width, "exact": exact, "weights_gb": read / 1e9}


def lines(rows: list[dict[str, Any]], gpu: str) -> list[str]:
    peak = MEMORY_TB_S.get(gpu)
    cells = []
    for result in rows:
        ms = {name: median(times) for name, times in result["ms"].items()}
        share = f"{result['weights_gb'] / ms['dsi'] / peak:.0%}" if peak else "?"
        ratios = [harness.spread(harness.ratios(times, result["ms"]["dsi"]), 2) for times in result["ms"].values()][1:]
        cells.append([result["shape"], *(f"{time:.3f}" for time in ms.values()), *ratios, share])
    heads = ["shape", "dsi, ms", "compiled, ms", "plain, ms", "over compiled", "over plain", "of the memory's speed"]
    widths = [
        f"{result['shape']}: " + ", ".join(f"{width}: {ms:.3f}" for width, ms in result["by_width"].items())
        for result in rows
    ]
    return [*harness.table(heads, cells), "", "ms of a forward, by its new tokens", *widths]


def main() -> None:
    parser = harness.arguments(__doc__, "--shapes llama-1.1b --repeats 2", tokens=96, repeats=3)
    default = ["llama-1.1b", "vicuna-7b", "vicuna-13b"]
    parser.add_argument("--shapes", type=harness.names(*SHAPES), default=default, help=",".join(default))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if not 8 <= options.tokens <= ROOM - PROMPT:
        parser.error(f"--tokens {options.tokens}: must be 8 to {ROOM - PROMPT}")
    silence_transformers()
    rows, gpu = [], torch.cuda.get_device_name(0)
    for shape in harness.tracked(options.shapes, len(options.shapes), "shapes"):
        rows.append(row(shape, options.tokens, options.repeats))
        harness.save(options, LABEL, {"gpu": gpu, "rows": rows})  # a run may be cut off
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    harness.report(options, LABEL, {"gpu": gpu, "rows": rows}, lines(rows, gpu))


if __name__ == "__main__":
    main()
