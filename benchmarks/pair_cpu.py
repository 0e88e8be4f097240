"""The built-in pair on this machine's cores: our algorithms and transformers' own. Measured.

One run, interleaved: each prompt goes through every row before the next one. DSI, PEARL and SI have one core
for the target and one for the drafter (`pinned`), or all cores for each forward (`all cores`); transformers
has all cores. All float32 texts are checked to be equal. `--quick` for a first look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from dsi.core.sequence import Tokens
from dsi.engine.build import silence_transformers
from dsi.engine.engine import Engine
from dsi.experiments.compare import PROMPTS
from dsi.models.names import model_path


@dataclass(frozen=True)
class Text:
    tokens: Tokens
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


Write = Callable[[str], Text]


def ours(engine: Engine, algorithm: str, lookahead: int | None, tokens: int) -> Write:
    def write(prompt: str) -> Text:
        done = engine.generate(prompt, max_new_tokens=tokens, algorithm=algorithm, lookahead=lookahead)
        return Text(done.tokens, float(done.elapsed))

    return write


def theirs(tokens: int, threads: int, assisted: bool) -> Write:
    """Return transformers' generate, in this process, with all cores."""
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(model_path("builtin", role)) for role in ("target", "drafter")
    )
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    target, drafter = target.float().eval(), drafter.float().eval()
    options: dict[str, Any] = {"assistant_model": drafter} if assisted else {}

    def write(prompt: str) -> Text:
        torch.set_num_threads(threads)
        ids = tokenizer(prompt, return_tensors="pt")
        began = perf_counter()
        output = target.generate(**ids, do_sample=False, max_new_tokens=tokens, **options)
        seconds = perf_counter() - began
        return Text(tuple(output[0, ids["input_ids"].shape[1] :].tolist()), seconds)

    return write


def overhead(engine: Engine, tokens: int) -> float:
    """Return what plain decoding takes beyond the target's forwards, as a share of them."""
    fleet, elapsed, before = engine.deployment.fleet, 0.0, engine.deployment.fleet.busy["target-1"]
    for prompt in PROMPTS:
        elapsed += float(engine.generate(prompt, max_new_tokens=tokens, algorithm="nonsi").elapsed)
    busy = float(fleet.busy["target-1"] - before)
    return (elapsed - busy) / busy


def main() -> None:
    parser = harness.arguments(__doc__, "--quick", repeats=3, tokens=96)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    silence_transformers()
    cores = torch.get_num_threads()
    tokens, repeats = (32, 1) if options.quick else (options.tokens, options.repeats)
    with Engine.load() as pinned, Engine.load(threads=cores) as free:
        rows = {
            "dsi, pinned": ours(pinned, "dsi", None, tokens),
            "pearl, pinned": ours(pinned, "pearl", None, tokens),
            **{f"si {k}, pinned": ours(pinned, "si", k, tokens) for k in (3, 5, 8)},
            **{f"si {k}, all cores": ours(free, "si", k, tokens) for k in (3, 5)},
            "non-si, pinned": ours(pinned, "nonsi", None, tokens),
            "non-si, all cores": ours(free, "nonsi", None, tokens),
            "transformers, assistant_model": theirs(tokens, cores, assisted=True),
            "transformers, plain": theirs(tokens, cores, assisted=False),
        }
        engine_share = overhead(pinned, tokens)
        prompts = PROMPTS[:2] if options.quick else PROMPTS
        texts = harness.interleave(rows, prompts, repeats, warm_up=1, agree=lambda text: text.tokens)
    rates = {name: [text.rate for text in row] for name, row in texts.items()}
    dsi = rates["dsi, pinned"]
    lines = harness.table(
        ("", "tokens/s (quartiles)", "dsi, pinned over it"),
        [(name, harness.spread(row, 1), f"{median(harness.ratios(dsi, row)):.2f}") for name, row in rates.items()],
    )
    notes = [
        "measured; ratios are medians within a prompt and repeat; all texts equal",
        f"the engine beyond the forwards: {engine_share:.1%} of the target's time per token (measured)",
    ]
    harness.report(options, "measured", {"overhead": engine_share, "rows": rates}, [*lines, *notes])


if __name__ == "__main__":
    main()
