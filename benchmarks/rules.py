"""The acceptance rules, beside one another on the built-in pair and on a large vocabulary. Measured.

Speed: every rule under DSI and SI with real processes at temperature 1, interleaved: each prompt goes through
all of them before the next one. The texts differ from rule to rule, so a ratio is a median over many.
Acceptance: each rule's, on the same texts of the target, and whether `reject` accepts at least as often as
`match`, and `block` at least as many guesses of a block as `reject`; exit status 1 if one does not, beyond
the noise. Cost: each rule on rows of 128,000 tokens in numpy, given the probabilities and the noise, when
every draft token is rejected; beside what these take; exit status 1 above 1 ms. `--quick` for a first look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np

import harness
from dsi.core.generation import Policy
from dsi.core.messages import RULES, Sampling
from dsi.core.request import Completion, Request
from dsi.core.spec import SpecConfig
from dsi.engine.build import silence_transformers
from dsi.engine.build_processes import load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.engine.prompts import sample_prompts
from dsi.experiments.acceptance import Estimate
from dsi.experiments.by_rule import Accepted, RuleTrial, summary, trials
from dsi.experiments.compare import PROMPTS
from dsi.experiments.datasets import read
from dsi.sampling.acceptance_rules import block, reject, specinfer
from dsi.sampling.logits import gumbel_argmax, probabilities
from dsi.sampling.noise import exponential, noise_key

VOCABULARY = 128_000
LOOKAHEAD = 5
ALLOWED_MS = 1.0
TEMPERATURE = 1.0
Trials = dict[tuple[float, str], list[RuleTrial]]
Row = dict[str, Any]


def speed(prompts: Sequence[str], tokens: int, repeats: int, lookahead: int | None) -> list[Row]:
    """Time all rules with this lookahead, or with each algorithm's own."""
    seeded = [(seed, prompts[seed % len(prompts)]) for seed in range((repeats + 1) * len(prompts))]
    with Engine.load() as engine:
        policies = {name: engine.policy(SpecConfig(name, lookahead)) for name in ("dsi", "si")}
        contenders = {
            (algorithm, rule): partial(write, engine, tokens, policy, rule)
            for (algorithm, policy), rule in product(policies.items(), RULES)
        }
        texts = harness.interleave(contenders, seeded)
        harness.log(f"lookahead: { ({name: lookahead or engine.deployment.lookahead(name) for name in policies}) }")
    return [row(*names, done[len(prompts) :]) for names, done in texts.items()]  # the first round warms up


def row(algorithm: str, rule: str, done: Sequence[Completion]) -> Row:
    """Return one rule under one algorithm; `accepted` is the share of each text that was drafted."""
    return {
        "algorithm": algorithm,
        "rule": rule,
        "rates": [len(text.tokens) / float(text.elapsed) for text in done],
        "accepted": [text.tally.accepted / len(text.tokens) for text in done],
    }


def write(engine: Engine, tokens: int, policy: Policy, rule: str, seeded: tuple[int, str]) -> Completion:
    seed, prompt = seeded
    sampling = Sampling(TEMPERATURE, seed=seed, rule=rule)
    [done] = engine.loop.run(
        Request(engine.tokenizer.encode(prompt), tokens, policy, sampling, engine.tokenizer.eos_token_ids)
    )
    return done


def speed_lines(rows: list[Row]) -> Iterator[str]:
    match = {row["algorithm"]: row["rates"] for row in rows if row["rule"] == "match"}
    cells = [
        (
            f"{row['algorithm']}, {row['rule']}",
            harness.spread(row["rates"], 1),
            harness.spread(harness.ratios(row["rates"], match[row["algorithm"]]), 2),
            f"{fmean(row['accepted']):.3f}",
        )
        for row in rows
    ]
    yield from harness.table(("", "tokens/s (quartiles)", "over match (quartiles)", "share drafted"), cells)
    yield f"measured: {len(rows[0]['rates'])} texts each, temperature {TEMPERATURE:g}; ratios by prompt and repeat\n"


def acceptance(count: int, tokens: int) -> Trials:
    """Every rule on the same texts."""
    pair = load_model_pair(EngineConfig())
    chosen = sample_prompts(read("builtin", None, None), pair.tokenizer, count, 0, tokens, pair.context)
    target, drafter = (lambda: pair.target.fresh().backend), (lambda: pair.drafter.fresh().backend)
    return trials(
        target, drafter, chosen.prompts, tokens, RULES, [TEMPERATURE], LOOKAHEAD, pair.tokenizer.eos_token_ids
    )


def differences(results: Trials) -> dict[str, Estimate]:
    """Subtract position by position and block by block, so that easy and hard texts cancel out."""
    match, reject, block_rule = (results[TEMPERATURE, rule] for rule in ("match", "reject", "block"))
    by_position, by_block = list(zip(reject, match)), list(zip(block_rule, reject))
    position, block = (
        "reject over match, accepted per position",
        f"block over reject, accepted per block of {LOOKAHEAD}",
    )
    return {
        position: beyond([(a.hits, b.hits) for a, b in by_position]),
        f"{position}, promised": beyond([(a.promises, b.promises) for a, b in by_position]),
        block: beyond([(a.blocks, b.blocks) for a, b in by_block]),
        f"{block}, promised": beyond([(a.block_promises, b.block_promises) for a, b in by_block]),
    }


def beyond(texts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    return Estimate.of_mean([[a - b for a, b in zip(*pair, strict=True)] for pair in texts])


def acceptance_lines(results: list[Accepted], gaps: dict[str, Estimate]) -> Iterator[str]:
    yield f"{'':10} per position (promised) per block of {LOOKAHEAD} (promised)"
    for result in results:
        positions = f"{result.places.mean:.3f} ({result.promised:.3f})" if result.places else "-"
        yield f"{result.rule:10} {positions:23} {result.blocks.mean:.3f} ({result.block_promised:.3f})"
    for name, gap in gaps.items():
        verdict = "does NOT hold" if gap.high < 0 else "holds" if gap.low > 0 else "holds within the noise"
        yield f"{name}: {gap.mean:+.3f} (95%: {gap.low:+.3f} to {gap.high:+.3f}), {verdict}"
    yield f"measured at temperature {TEMPERATURE:g}, on the same texts of the target"


def costs(repeats: int) -> dict[str, float]:
    """Milliseconds per position, the best of many: what else the machine does only adds."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, VOCABULARY).astype(np.float32)
    p, q = (probabilities(row, Sampling(TEMPERATURE)) for row in (logits, rng.normal(0, 3, VOCABULARY)))
    ids = np.arange(VOCABULARY)
    noise = exponential(noise_key(0, 0), ids)
    token = int((p / q).argmin())  # the likeliest to be rejected
    draft, uniforms = (token, q), [1.0] * LOOKAHEAD
    return {
        "match": best(lambda: gumbel_argmax(p, noise), repeats),
        "reject": best(lambda: reject(p, *draft, 1.0, noise), repeats),
        "block": best(lambda: block([p] * LOOKAHEAD, [draft] * LOOKAHEAD, uniforms, lambda _: noise), repeats)
        / LOOKAHEAD,
        "specinfer": best(lambda: specinfer(p, [draft] * 2, [1.0, 1.0], noise), repeats),
        "probabilities": best(lambda: probabilities(logits, Sampling(TEMPERATURE)), repeats),
        "probabilities, top-k 50": best(lambda: probabilities(logits, Sampling(TEMPERATURE, top_k=50)), repeats),
        "probabilities, top-p 0.9": best(lambda: probabilities(logits, Sampling(TEMPERATURE, top_p=0.9)), repeats),
        "probabilities, both": best(lambda: probabilities(logits, Sampling(TEMPERATURE, 50, 0.9)), repeats),
        "noise": best(lambda: exponential(noise_key(0, 0), ids), repeats),
    }


def best(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return 1000 * min(times)


def cost_lines(ms_by_rule: dict[str, float]) -> Iterator[str]:
    yield f"ms per position, {VOCABULARY:,} tokens, one core, numpy float64, every draft token is rejected"
    for name, ms in ms_by_rule.items():
        verdict = "" if name not in RULES else "  under 1 ms" if ms < ALLOWED_MS else "  NOT under 1 ms"
        yield f"{name:26} {ms:6.3f}{verdict}"
    yield "measured; the rules are given probabilities and noise\n"


def main() -> None:
    parser = harness.arguments(__doc__, "--quick", repeats=3, tokens=96, prompts=30)
    parser.add_argument("--lookahead", type=harness.positive, help="for speed; without it, each algorithm's own")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    silence_transformers()
    tokens, repeats, count = (32, 1, 4) if options.quick else (options.tokens, options.repeats, options.prompts)
    cost = costs(20 * repeats)
    rows = speed(PROMPTS[:2] if options.quick else PROMPTS, tokens, repeats, options.lookahead)
    trials_by_rule = acceptance(count, tokens)
    results = [summary(*which, trials) for which, trials in trials_by_rule.items()]
    gaps = differences(trials_by_rule)
    document = {
        "ms": cost,
        "rows": rows,
        "acceptance": [result.json() for result in results],
        "gaps": {name: asdict(gap) for name, gap in gaps.items()},
    }
    lines = [*cost_lines(cost), *speed_lines(rows), *acceptance_lines(results, gaps)]
    harness.report(options, "measured", document, lines)
    slow = [name for name in RULES if cost[name] >= ALLOWED_MS]
    sys.exit(bool(slow or any(gap.high < 0 for gap in gaps.values())))


if __name__ == "__main__":
    main()
