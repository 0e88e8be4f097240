"""The built-in pair on this machine's cores: our algorithms and transformers' own. Measured.

One run, interleaved: each prompt goes through every row before the next one. DSI, PEARL and SI have one core
for the target and one for the drafter (`pinned`), or all cores for each forward (`all cores`); transformers
has all cores. All float32 texts are checked to be equal. `--quick` for a first look.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsi.engine.build import quiet
from dsi.engine.engine import Engine
from dsi.experiments.compare import PROMPTS
from dsi.models.names import model_path

Write = Callable[[str], tuple[tuple[int, ...], float]]  # a prompt to its tokens and seconds


@dataclass
class Row:
    name: str
    write: Write
    rates: list[float] = field(default_factory=list)


def ours(engine: Engine, algorithm: str, lookahead: int | None, tokens: int) -> Write:
    def write(prompt: str) -> tuple[tuple[int, ...], float]:
        done = engine.generate(prompt, max_new_tokens=tokens, algorithm=algorithm, lookahead=lookahead)
        return done.tokens, float(done.elapsed)

    return write


def theirs(tokens: int, threads: int, assisted: bool) -> Write:
    """transformers' generate, in this process, with all cores."""
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(model_path("builtin", role)) for role in ("target", "drafter")
    )
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    target, drafter = target.float().eval(), drafter.float().eval()
    options: dict[str, Any] = {"assistant_model": drafter} if assisted else {}

    def write(prompt: str) -> tuple[tuple[int, ...], float]:
        torch.set_num_threads(threads)
        ids = tokenizer(prompt, return_tensors="pt")
        began = perf_counter()
        text = target.generate(**ids, do_sample=False, max_new_tokens=tokens, **options)
        took = perf_counter() - began
        return tuple(text[0, ids["input_ids"].shape[1] :].tolist()), took

    return write


def measure(rows: list[Row], prompts: Sequence[str], repeats: int) -> None:
    for repeat in range(repeats + 1):  # the first is not counted: it warms up
        for prompt in prompts:
            texts = {}
            for row in rows:
                tokens, seconds = row.write(prompt)
                texts[row.name] = tokens
                if repeat:
                    row.rates.append(len(tokens) / seconds)
            if len(set(texts.values())) > 1:
                raise SystemExit(f"prompt {prompt!r}: different texts {texts}")
        print(f"\r{repeat} of {repeats} repeats", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def show(rows: list[Row], best: Row) -> None:
    print(f"{'':34} tokens/s (quartiles)      {best.name} over it")
    for row in rows:
        low, middle, high = quantiles(row.rates, n=4)
        ratio = median(mine / other for mine, other in zip(best.rates, row.rates))
        print(f"{row.name:34} {middle:7.1f} ({low:.1f} to {high:.1f})     {ratio:.2f}")
    print("measured; ratios are medians within a prompt and repeat; all texts equal")


def overhead(engine: Engine, tokens: int) -> float:
    """What plain decoding takes beyond the target's forwards, as a share of them: the engine's own time."""
    fleet, elapsed, before = engine.loaded.fleet, 0.0, engine.loaded.fleet.busy["target-1"]
    for prompt in PROMPTS:
        elapsed += float(engine.generate(prompt, max_new_tokens=tokens, algorithm="nonsi").elapsed)
    busy = float(fleet.busy["target-1"] - before)
    return (elapsed - busy) / busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet()
    cores = torch.get_num_threads()
    tokens, repeats = (32, 1) if options.quick else (options.tokens, options.repeats)
    with Engine.load() as pinned, Engine.load(threads=cores) as free:
        rows = [
            Row("dsi, pinned", ours(pinned, "dsi", None, tokens)),
            Row("pearl, pinned", ours(pinned, "pearl", None, tokens)),
            *(Row(f"si {k}, pinned", ours(pinned, "si", k, tokens)) for k in (3, 5, 8)),
            *(Row(f"si {k}, all cores", ours(free, "si", k, tokens)) for k in (3, 5)),
            Row("non-si, pinned", ours(pinned, "nonsi", None, tokens)),
            Row("non-si, all cores", ours(free, "nonsi", None, tokens)),
            Row("transformers, assistant_model", theirs(tokens, cores, assisted=True)),
            Row("transformers, plain", theirs(tokens, cores, assisted=False)),
        ]
        beyond = overhead(pinned, tokens)
        measure(rows, PROMPTS[:2] if options.quick else PROMPTS, repeats)
    if options.json:
        print(
            json.dumps(
                {
                    "label": "measured",
                    "cores": cores,
                    "overhead": beyond,
                    "rows": {row.name: row.rates for row in rows},
                }
            )
        )
    else:
        show(rows, rows[0])
        print(f"the engine beyond the forwards: {beyond:.1%} of the target's time per token (measured)")


if __name__ == "__main__":
    main()
