"""The rules that accept guesses, beside one another on the built-in pair and on a large vocabulary. Measured.

Speed: every rule under DSI and SI with real processes at temperature 1, interleaved: each prompt goes through
all of them before the next one. The texts differ from rule to rule, so a ratio is a median over many.
Acceptance: each rule's, on the same texts of the target, and whether `reject` accepts at least as often as
`match`, and `block` at least as many guesses of a block as `reject`; exit status 1 if one does not, beyond
the noise. Cost: each rule on rows of 128,000 tokens in numpy, given the probabilities and the noise, when
every guess falls; beside what these take; exit status 1 above 1 ms. `--quick` for a first look.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np

from dsi.core.generation import Policy
from dsi.core.messages import RULES, Sampling
from dsi.core.request import Completion, Request
from dsi.engine.build import load_apart, quiet
from dsi.engine.engine import Engine
from dsi.engine.prompts import sample_prompts
from dsi.experiments.by_rule import Accepted, Figure, RuleTrial, summary, trials
from dsi.experiments.compare import PROMPTS
from dsi.experiments.datasets import read
from dsi.sampling.acceptance_rules import block, reject, specinfer
from dsi.sampling.logits import gumbel_argmax, probabilities
from dsi.sampling.noise import exponential, noise_key

VOCABULARY = 128_000
LOOKAHEAD = 5
ALLOWED_MS = 1.0
WARM = 1.0  # temperature
Found = dict[tuple[float, str], list[RuleTrial]]


@dataclass
class Row:
    """One rule under one algorithm; `guessed` is the share of each text that its drafter knew before."""

    algorithm: str
    rule: str
    rates: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)

    def count(self, done: Completion) -> None:
        self.rates.append(len(done.tokens) / float(done.elapsed))
        self.guessed.append(done.tally.accepted / len(done.tokens))


def speed(prompts: Sequence[str], tokens: int, repeats: int, lookahead: int | None) -> list[Row]:
    """With this lookahead for all, or each algorithm with its own."""
    rows = [Row(*names) for names in product(("dsi", "si"), RULES)]
    with Engine.load() as engine:
        policies = {row.algorithm: engine.policy(row.algorithm, lookahead) for row in rows}
        for repeat in range(repeats + 1):  # the first is not counted: it warms up
            for (number, prompt), row in product(enumerate(prompts), rows):
                sampling = Sampling(WARM, seed=repeat * len(prompts) + number, rule=row.rule)
                done = write(engine, prompt, tokens, policies[row.algorithm], sampling)
                if repeat:
                    row.count(done)
            print(f"\r{repeat} of {repeats} repeats", end="", file=sys.stderr, flush=True)
        own = {name: lookahead or engine.loaded.lookahead(name) for name in policies}
    print(f"\nlookahead: {own}", file=sys.stderr)
    return rows


def write(engine: Engine, prompt: str, tokens: int, policy: Policy, sampling: Sampling) -> Completion:
    request = Request(engine.text.encode(prompt), tokens, policy, sampling, engine.text.eos_token_ids)
    [done] = engine.run(request)
    return done


def show_speed(rows: list[Row]) -> None:
    print(f"{'':16} tokens/s (quartiles)     over match (quartiles)   of the text guessed")
    for row in rows:
        first = next(each for each in rows if each.algorithm == row.algorithm)
        rates = middle(row.rates, 1)
        ratios = middle([mine / other for mine, other in zip(row.rates, first.rates)], 2)
        share = sum(row.guessed) / len(row.guessed)
        print(f"{f'{row.algorithm}, {row.rule}':16} {rates:24} {ratios:24} {share:.3f}")
    print(f"measured: {len(rows[0].rates)} texts each, temperature {WARM:g}; ratios by prompt and repeat\n")


def middle(numbers: list[float], digits: int) -> str:
    low, half, high = (f"{number:.{digits}f}" for number in quantiles(numbers, n=4))
    return f"{half} ({low} to {high})"


def acceptance(count: int, tokens: int) -> Found:
    """Every rule on the same texts."""
    pair = load_apart("builtin", "builtin")
    chosen = sample_prompts(read("builtin", None, None), pair.text, count, 0, tokens, pair.context)
    target, drafter = (lambda: pair.target.fresh().backend), (lambda: pair.drafter.fresh().backend)
    return trials(target, drafter, chosen.prompts, tokens, RULES, [WARM], LOOKAHEAD, pair.text.eos_token_ids)


def differences(found: Found) -> dict[str, Figure]:
    """Place by place and block by block, so that what makes a text hard or easy falls out."""
    match, reject, together = (found[WARM, rule] for rule in ("match", "reject", "block"))
    alone, row = list(zip(reject, match)), list(zip(together, reject))
    place, block = (
        "reject over match, accepted per place",
        f"block over reject, accepted per block of {LOOKAHEAD}",
    )
    return {
        place: beyond([(a.hits, b.hits) for a, b in alone]),
        f"{place}, promised": beyond([(a.promises, b.promises) for a, b in alone]),
        block: beyond([(a.blocks, b.blocks) for a, b in row]),
        f"{block}, promised": beyond([(a.block_promises, b.block_promises) for a, b in row]),
    }


def beyond(texts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Figure:
    return Figure.of([[a - b for a, b in zip(*pair, strict=True)] for pair in texts])


def show_acceptance(results: list[Accepted], gaps: dict[str, Figure]) -> None:
    print(f"{'':10} per place (promised)    per block of {LOOKAHEAD} (promised)")
    for each in results:
        alone = f"{each.places.mean:.3f} ({each.promised:.3f})" if each.places else "-"
        print(f"{each.rule:10} {alone:23} {each.blocks.mean:.3f} ({each.block_promised:.3f})")
    for name, gap in gaps.items():
        verdict = "does NOT hold" if gap.high < 0 else "holds" if gap.low > 0 else "holds within the noise"
        print(f"{name}: {gap.mean:+.3f} (95%: {gap.low:+.3f} to {gap.high:+.3f}), {verdict}")
    print(f"measured at temperature {WARM:g}, on the same texts of the target\n")


def costs(repeats: int) -> dict[str, float]:
    """Milliseconds per place, the best of many: what else the machine does only adds."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 3, VOCABULARY).astype(np.float32)
    p, q = (probabilities(row, Sampling(WARM)) for row in (scores, rng.normal(0, 3, VOCABULARY)))
    ids = np.arange(VOCABULARY)
    noise = exponential(noise_key(0, 0), ids)
    token = int((p / q).argmin())  # of all guesses the likeliest to fall
    guess, falls = (token, q), [1.0] * LOOKAHEAD
    return {
        "match": best(lambda: gumbel_argmax(p, noise), repeats),
        "reject": best(lambda: reject(p, *guess, 1.0, noise), repeats),
        "block": best(lambda: block([p] * LOOKAHEAD, [guess] * LOOKAHEAD, falls, lambda _: noise), repeats) / LOOKAHEAD,
        "specinfer": best(lambda: specinfer(p, [guess] * 2, [1.0, 1.0], noise), repeats),
        "probabilities": best(lambda: probabilities(scores, Sampling(WARM)), repeats),
        "probabilities, top-k 50": best(lambda: probabilities(scores, Sampling(WARM, top_k=50)), repeats),
        "probabilities, top-p 0.9": best(lambda: probabilities(scores, Sampling(WARM, top_p=0.9)), repeats),
        "probabilities, both": best(lambda: probabilities(scores, Sampling(WARM, 50, 0.9)), repeats),
        "noise": best(lambda: exponential(noise_key(0, 0), ids), repeats),
    }


def best(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return 1000 * min(times)


def show_costs(found: dict[str, float]) -> None:
    print(f"ms per place, {VOCABULARY:,} tokens, one core, numpy float64, every guess falls")
    for name, ms in found.items():
        verdict = "" if name not in RULES else "  under 1 ms" if ms < ALLOWED_MS else "  NOT under 1 ms"
        print(f"{name:26} {ms:6.3f}{verdict}")
    print("measured; the rules are given probabilities and noise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--lookahead", type=int, help="for speed; without it, each algorithm's own")
    parser.add_argument("--prompts", type=int, default=30, help="for acceptance")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet()
    tokens, repeats, count = (32, 1, 4) if options.quick else (options.tokens, options.repeats, options.prompts)
    cost = costs(20 * repeats)
    rows = speed(PROMPTS[:2] if options.quick else PROMPTS, tokens, repeats, options.lookahead)
    found = acceptance(count, tokens)
    results, gaps = [summary(*which, each) for which, each in found.items()], differences(found)
    if options.json:
        document: dict[str, Any] = {"label": "measured", "ms": cost, "rows": [asdict(row) for row in rows]}
        document |= {"acceptance": [each.json() for each in results]}
        print(json.dumps(document | {"gaps": {name: asdict(gap) for name, gap in gaps.items()}}))
    else:
        show_costs(cost)
        print()
        show_speed(rows)
        show_acceptance(results, gaps)
    slow = [name for name in RULES if cost[name] >= ALLOWED_MS]
    sys.exit(bool(slow or any(gap.high < 0 for gap in gaps.values())))


if __name__ == "__main__":
    main()
