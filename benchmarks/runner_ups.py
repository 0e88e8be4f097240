"""How often the built-in drafter's runner-up is right where its first choice is wrong: what trees can gain."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import harness
from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.engine.build_processes import ModelPair, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.prompts import sample_prompts
from dsi.experiments import datasets
from dsi.experiments.acceptance import Estimate
from dsi.models.protocol import NEVER, ForwardRequest
from dsi.sampling.logits import top_k_tokens


def measure(prompts: int, tokens: int) -> Iterator[dict[str, float]]:
    """Let the drafter read what the target wrote, and rank its choices at each position."""
    pair = load_model_pair(EngineConfig())
    chosen = sample_prompts(datasets.read("builtin", None, None), pair.tokenizer, prompts, 0, tokens, pair.context)
    for temperature in (0.0, 1.0):
        texts = [
            draft_ranks(pair, prompt, tokens, Sampling(temperature, seed=seed))
            for seed, prompt in enumerate(chosen.prompts)
        ]
        runner_up = Estimate.of_rate([[hit for first, hit in text if not first] for text in texts])
        positions = [position for text in texts for position in text]
        yield {
            "temperature": temperature,
            "positions": len(positions),
            "acceptance": fmean(first for first, _ in positions),
            "runner_up_acceptance": runner_up.mean,
            "low": runner_up.low,
            "high": runner_up.high,
        }


def draft_ranks(pair: ModelPair, prompt: Tokens, tokens: int, sampling: Sampling) -> list[tuple[bool, bool]]:
    """Return for each position whether the first choice is right, and whether the runner-up is."""
    model, text = pair.target.fresh(), list(prompt)
    while len(text) < len(prompt) + tokens and (
        len(text) == len(prompt) or text[-1] not in pair.tokenizer.eos_token_ids
    ):
        text += model.answer(ForwardRequest(text, len(text), sampling=sampling))
    logits = pair.drafter.fresh().backend.forward(text[:-1], len(prompt), NEVER)
    ranks = []
    for position, (row, target_token) in enumerate(zip(logits, text[len(prompt) :]), len(prompt)):
        first, second = top_k_tokens(row, sampling, position, 2)
        ranks.append((first == target_token, second == target_token))
    return ranks


def line(row: dict[str, float]) -> str:
    return (
        f"temperature {row['temperature']:g}: first choice right {row['acceptance']:.3f} of {row['positions']} "
        f"positions; where it is wrong, the runner-up is right {row['runner_up_acceptance']:.3f} "
        f"(95%: {row['low']:.3f} to {row['high']:.3f}; measured)"
    )


def main() -> None:
    options = harness.arguments(__doc__, "--prompts 5", prompts=50, tokens=96).parse_args()
    rows = list(measure(options.prompts, options.tokens))
    harness.report(options, "measured", {"rows": rows}, map(line, rows))


if __name__ == "__main__":
    main()
