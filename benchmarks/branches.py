"""What runner-up draft tokens are worth: DSI's time with them over one chain's, and over Proposition 1's bound.

Simulated: target 37.7 ms, drafter 2.5 ms, as many targets as Eq. (1) asks for and one more, and some to
spare; the drafter names no runner-up at a share `--no-runner-up-rate` of the positions where its first choice is right.
With `--measure`: how often the built-in drafter's runner-up is right where its first guess is wrong (measured).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean

import harness
from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.core.spec import MIN_RATIO, SpecConfig
from dsi.engine.build_processes import ModelPair, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.prompts import sample_prompts
from dsi.experiments import datasets
from dsi.experiments.acceptance import Estimate
from dsi.models.protocol import NEVER, ForwardRequest
from dsi.paper.claims import bound
from dsi.planning.equation_1 import servers_needed, to_fraction
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.sampling.logits import top_k_tokens

TARGET_MS, DRAFTER_MS, TOKENS = 37.7, 2.5, 200
ACCEPTANCES = (0.63, 0.8, 0.93)
HITS = (0.0, 0.25, 0.5, 0.75, 1.0)
SPARES = (0, 1, 2, 4)


@dataclass(frozen=True)
class Cell:
    acceptance: float
    hit: float
    spare: int
    over_chain: float  # time over that of one chain
    over_bound: float


def mean_ms(acceptance: float, hit: float, spare: int, options: argparse.Namespace) -> float:
    config = SimulationConfig(
        LatencyModel(TARGET_MS, DRAFTER_MS),
        acceptance,
        servers_needed(TARGET_MS, DRAFTER_MS, options.lookahead) + 1 + spare,
        TOKENS,
        runner_up_acceptance=hit,
        no_runner_up_rate=options.no_runner_up_rate,
        spec=SpecConfig(lookahead=options.lookahead, branches=2, spare_targets=spare),
    )
    return fmean(config.run("dsi", seed).ms for seed in range(options.repeats))


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for acceptance in ACCEPTANCES:
        chain = mean_ms(acceptance, 0.0, 0, options)
        most = TARGET_MS * float(bound(to_fraction(DRAFTER_MS) / to_fraction(TARGET_MS), TOKENS, acceptance))
        for hit in HITS:
            for spare in SPARES:
                ms = chain if spare == 0 else mean_ms(acceptance, hit, spare, options)
                yield Cell(acceptance, hit, spare, ms / chain, ms / most)


def lines(results: list[Cell]) -> Iterator[str]:
    for acceptance in ACCEPTANCES:
        yield f"\nacceptance {acceptance}: time over one chain's, and over Proposition 1's bound (simulated)"
        heads = ("runner-up right", *(f"{spare} spare" for spare in SPARES))
        rows = [[cell for cell in results if (cell.acceptance, cell.hit) == (acceptance, hit)] for hit in HITS]
        cells = [(row[0].hit, *(f"{cell.over_chain:.2f}, {cell.over_bound:.2f}" for cell in row)) for row in rows]
        yield from harness.table(heads, cells)


def measure(prompts: int, tokens: int) -> Iterator[dict[str, float]]:
    """Let the drafter read what the target wrote, and rank its choices at each position."""
    pair = load_model_pair(EngineConfig())
    chosen = sample_prompts(datasets.read("builtin", None, None), pair.tokenizer, prompts, 0, tokens, pair.context)
    for temperature in (0.0, 1.0):
        texts = [
            draft_ranks(pair, prompt, tokens, Sampling(temperature, seed=seed))
            for seed, prompt in enumerate(chosen.prompts)
        ]
        hits = [[hit for first, hit, _ in text if not first] for text in texts]
        runner_up = Estimate.of_rate(hits)
        positions = [position for text in texts for position in text]
        first, close = fmean(f for f, _, _ in positions), [ranks for ranks in positions if ranks[2]]
        yield {
            "temperature": temperature,
            "positions": len(positions),
            "acceptance": first,
            "runner_up_acceptance": runner_up.mean,
            "low": runner_up.low,
            "high": runner_up.high,
            "close_runner_up_acceptance": sum(hit for f, hit, _ in close if not f)
            / sum(not f for f, _, _ in positions),
            "no_runner_up": 1 - sum(f for f, _, _ in close) / (first * len(positions)),
        }


def draft_ranks(pair: ModelPair, prompt: Tokens, tokens: int, sampling: Sampling) -> list[tuple[bool, bool, bool]]:
    """Return for each position whether the first choice is right, the runner-up is, and it was close."""
    model, text = pair.target.fresh(), list(prompt)
    while len(text) < len(prompt) + tokens and (
        len(text) == len(prompt) or text[-1] not in pair.tokenizer.eos_token_ids
    ):
        text += model.answer(ForwardRequest(text, len(text), sampling=sampling))
    logits = pair.drafter.fresh().backend.forward(text[:-1], len(prompt), NEVER)
    ranks = []
    for position, (row, target_token) in enumerate(zip(logits, text[len(prompt) :]), len(prompt)):
        first, second = top_k_tokens(row, sampling, position, 2, 0.0)
        close = len(top_k_tokens(row, sampling, position, 2, MIN_RATIO)) == 2
        ranks.append((first == target_token, second == target_token, close))
    return ranks


def measured_line(row: dict[str, float]) -> str:
    return (
        f"temperature {row['temperature']:g}: first choice right {row['acceptance']:.3f} of {row['positions']} "
        f"positions; where it is wrong, the runner-up is right {row['runner_up_acceptance']:.3f} "
        f"(95%: {row['low']:.3f} to {row['high']:.3f}), {row['close_runner_up_acceptance']:.3f} if only those that "
        f"came to {MIN_RATIO:g} of the winner count; then {row['no_runner_up']:.3f} of the right choices have no "
        "runner-up (measured)"
    )


def main() -> None:
    parser = harness.arguments(__doc__, "--repeats 5", repeats=40, lookahead=1, prompts=50, tokens=96)
    parser.add_argument(
        "--no-runner-up-rate", type=harness.share, default=0.6, help="about what the built-in drafter has"
    )
    parser.add_argument("--measure", action="store_true", help="also measure the built-in pair: two minutes")
    options = parser.parse_args()
    results = list(cells(options))
    measured = list(measure(options.prompts, options.tokens)) if options.measure else []
    document = {"rows": [asdict(cell) for cell in results], "measured": measured}
    harness.report(options, "simulated", document, [*lines(results), *map(measured_line, measured)])


if __name__ == "__main__":
    main()
