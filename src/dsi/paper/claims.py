"""Check the theory of the paper: its theorems over a grid, and the examples in its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from math import ceil
from typing import Any

import numpy as np

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import SpecConfig
from dsi.planning import theory
from dsi.planning.equation_1 import plan, servers_needed
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

RATES = np.arange(0, 101, 5) / 100
DRAFTERS = [Fraction(i, 100) for i in (1, 2, 3, 5, 7, 10, 14, 20, 25, 33, 50, 67, 80, 90, 100)]
LOOKAHEADS = (1, 2, 3, 5, 8, 13, 21, 34)
SPS = (1, 2, 3, 5, 7, None)
LENGTHS = (1, 2, 10, 50, 100)
CLAIMS = 6
PATHS = 300  # simulated, for what must hold on every path


@dataclass(frozen=True)
class Check:
    """A bound over many settings, as ratios of what is bounded to its bound."""

    claim: str
    settings: int
    largest: float  # ratio; above 1 violates the claim
    where: str
    violations: int
    smallest: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return not self.violations

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


Ratio = tuple[str, Any]  # a setting in words, and its ratios over the acceptance rates


def check(claim: str, ratios: Iterable[Ratio], note: str = "") -> Check:
    largest, where, smallest, count, violations = 0.0, "", float("inf"), 0, 0
    for setting, values in ratios:
        values = np.atleast_1d(values)
        count += values.size
        violations += int((values > 1 + 1e-9).sum())
        smallest = min(smallest, float(values.min()))
        if values.max() > largest:
            largest, at = float(values.max()), int(values.argmax())
            where = setting + (f", acceptance {RATES[at]:g}" if values.size > 1 else "")
    return Check(claim, count, largest, where, violations, smallest, note)


def checks(progress: Progress = no_progress) -> list[Check]:
    results = []
    for claim, ratios, note in (
        (
            "Theorem 1: DSI takes no longer than non-SI, in expectation",
            theorem_1(),
            "with any SP degree, which is more than the theorem says",
        ),
        ("Theorem 1 on every path", paths(), "each of the simulator's runs, and not only their mean"),
        (
            "Theorem 2: DSI takes no longer than SI with the same lookahead",
            theorem_2(None),
            "as many targets as can be of use",
        ),
        ("Theorem 2 with one target more than Eq. (1) asks for", theorem_2(1), "one for the verification of the root"),
        (
            "Theorem 2 with only as many targets as Eq. (1) asks for",
            theorem_2(0),
            "Eq. (1) counts full blocks: the verification of each new root, which starts before anything is drafted, "
            "needs a target of its own, or the first block waits for it, where SI would have waited for draft tokens",
        ),
        (
            "Proposition 1: DSI with lookahead 1 takes no longer than the bound",
            proposition_1(),
            "the bound is the expected time itself: the largest and the smallest ratio are both 1",
        ),
    ):
        results.append(check(claim, ratios, note))
        progress()
    return results


def theorem_1() -> Iterator[Ratio]:
    for drafter, lookahead, sp, tokens in product(DRAFTERS, LOOKAHEADS, SPS, LENGTHS):
        latency = LatencyModel(1, drafter)
        setting = f"drafter {float(drafter):g}, lookahead {lookahead}, SP {sp or 'enough'}, {tokens} tokens"
        yield setting, theory.dsi(tokens, latency, RATES, lookahead, sp) / theory.nonsi(tokens, latency)


def paths() -> Iterator[Ratio]:
    """In exact fractions, so that no violation is due to rounding."""
    for seed in range(PATHS):
        drafter, lookahead = DRAFTERS[seed % len(DRAFTERS)], LOOKAHEADS[seed % len(LOOKAHEADS)]
        sp, acceptance = 1 + seed % 7, (seed * 37 % 101) / 100
        spec = SpecConfig(lookahead=lookahead)
        config = SimulationConfig(LatencyModel(Fraction(1), drafter), acceptance, sp, 30, spec)
        forwards = config.run("dsi", seed).completion.elapsed / 30
        where = f"drafter {float(drafter):g}, lookahead {lookahead}, SP {sp}, acceptance {acceptance:g}"
        yield f"{where}, seed {seed}", float(forwards)


def theorem_2(extra_targets: int | None) -> Iterator[Ratio]:
    """With so many targets more than Eq. (1) requires; None: as many as can be of use."""
    for drafter, lookahead, tokens in product(DRAFTERS, LOOKAHEADS, LENGTHS):
        latency = LatencyModel(1, drafter)
        sp = None if extra_targets is None else servers_needed(1, drafter, lookahead) + extra_targets
        dsi = theory.dsi(tokens, latency, RATES, lookahead, sp)
        setting = f"drafter {float(drafter):g}, lookahead {lookahead}, {tokens} tokens"
        yield setting, dsi / theory.si(tokens, latency, RATES, lookahead)


def proposition_1() -> Iterator[Ratio]:
    for drafter, tokens in product(DRAFTERS, LENGTHS):
        dsi = theory.dsi(tokens, LatencyModel(1, drafter), RATES, 1)
        yield f"drafter {float(drafter):g}, {tokens} tokens", dsi / bound(drafter, tokens, RATES)


def bound(drafter: Fraction, tokens: int, acceptance: Any) -> Any:
    """Proposition 1, in target forwards."""
    rest = tokens - 1
    return float(drafter) * acceptance * rest + (1 - acceptance) * rest + 1


@dataclass(frozen=True)
class Example:
    """A number in the paper's text, and the one computed here."""

    what: str
    paper: str
    ours: str
    note: str


def examples() -> list[Example]:
    return [long_text_speedup(), *largest_gains(), exposed_forwards(), *si_example(), *examples_of_eq_1()]


def long_text_speedup() -> Example:
    """A drafter of negligible latency, and a long text."""
    tokens, latency = 2000, LatencyModel(1, Fraction(1, 1000))
    speedup = theory.nonsi(tokens, latency) / float(theory.dsi(tokens, latency, 0.8, 1))
    return Example(
        "DSI over non-SI at acceptance 0.8, as the text grows and drafting costs nothing",
        "5x",
        f"{speedup:.2f}x",
        f"exact; {tokens} tokens, a drafter of a thousandth of the target's latency",
    )


def largest_gains() -> Iterator[Example]:
    for drafter, lookahead, paper in ((Fraction(1, 20), 5, "4x"), (Fraction(1, 100), 2, "50x")):
        latency, tokens = LatencyModel(1, drafter), 2000
        si, dsi = (float(time(tokens, latency, 1.0, lookahead)) for time in (theory.si, theory.dsi))
        yield Example(
            f"DSI over SI, a perfect drafter of {float(drafter):.0%} latency, lookahead {lookahead}",
            paper,
            f"{si / dsi:.1f}x",
            f"exact; the paper's is target over block, {1 / (lookahead * float(drafter)):.0f}, without the "
            f"token that SI's target adds to each block and without SI's own drafting",
        )


def exposed_forwards() -> Example:
    """Blocks of two draft tokens, at least one of which is rejected."""
    config = SimulationConfig(LatencyModel(10, 1), 0.8, 5, 50, SpecConfig(lookahead=2))
    tallies = [config.run("dsi", seed).completion.tally for seed in range(100)]
    counted, useful = sum(t.exposed for t in tallies), sum(t.useful for t in tallies)
    return Example(
        "share of target forwards that cost time, lookahead 2, acceptance 0.8, five targets",
        "36%",
        f"{1 - 0.8**2:.0%}; {counted / useful:.0%} simulated",
        "1 - 0.8^2 is for whole blocks; the verification of each new root is a forward too, over one position only",
    )


def si_example() -> Iterator[Example]:
    """100 tokens, 30 and 6 ms, lookahead 5, 1.5 draft tokens accepted in each block."""
    latency, rate = LatencyModel(30, 6), acceptance_rate(1.5, 5)
    exact = float(theory.si(100, latency, rate, 5))
    forwards = ceil(100 / 2.5)
    sketch = forwards * (5 * 6 + 30)
    yield Example(
        "SI: 100 tokens, 30 and 6 ms, lookahead 5, 1.5 accepted drafts per block",
        "2400 ms",
        f"{sketch} ms as the paper counts; {exact:.0f} ms exact",
        f"acceptance {rate:.3f} gives 1.5; the exact time counts that the last block is cut short",
    )
    yield Example(
        "the same over non-SI", "1.25x", f"{3000 / sketch:.2f}x; {3000 / exact:.2f}x exact", "non-SI takes 3000 ms"
    )


def acceptance_rate(accepted: float, lookahead: int) -> float:
    """The acceptance rate with which so many draft tokens of a block are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        too_low = sum(middle**i for i in range(1, lookahead + 1)) < accepted
        low, high = (middle, high) if too_low else (low, middle)
    return low


def examples_of_eq_1() -> Iterator[Example]:
    busy, best = servers_needed(1, Fraction(1, 20), 5), plan(20, 1, gpus=7, target_gpus=2)
    yield Example(
        "processors for a drafter of 5% latency with lookahead 5, by Eq. (1)",
        "1 + 4 = 5",
        f"1 + {busy} = {1 + busy}",
        "dsi plan --target-ms 20 --drafter-ms 1 --gpus 5",
    )
    yield Example(
        "seven GPUs, two for each target, a drafter of 5% latency",
        "SP 3, lookahead 7",
        f"SP {best.sp}, lookahead {best.lookahead}",
        "dsi plan --target-ms 20 --drafter-ms 1 --gpus 7 --target-gpus 2",
    )
