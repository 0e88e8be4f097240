"""Which rule accepts more where a node of a tree has two children: `match`, or `specinfer` with sampled ones.

Random pairs of distributions over 60 tokens: the target's from a Dirichlet distribution, the drafter's with normal
noise added to its logits. `match` counts how often the target's token is one of the drafter's first two choices, which
are ranked with the same noise; `specinfer` is computed exactly, for two independent draws, for two without
replacement, and for the two likeliest tokens as certain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import harness
from dsi.sampling.acceptance_rules import rejection_acceptance_rate, residual, residual_weights

VOCAB_SIZE, DRAWS = 60, 4000
SETTINGS = ((0.05, 0.5), (0.05, 1.0), (0.2, 1.0), (1.0, 1.0))  # Dirichlet concentration, noise of the drafter's logits

Row = Any  # a distribution


def measure(pairs: int) -> Iterator[dict[str, float]]:
    rng = np.random.default_rng(0)
    for concentration, error in SETTINGS:
        rates = [acceptance(*random_pair(rng, concentration, error), rng) for _ in range(pairs)]
        mean = {name: float(np.mean([row[name] for row in rates])) for name in rates[0]}
        higher = np.mean([row["match"] > row["twice"] for row in rates])
        yield {"concentration": concentration, "error": error, **mean, "match_accepts_more": float(higher)}


def random_pair(rng: np.random.Generator, concentration: float, error: float) -> tuple[Row, Row]:
    p = rng.dirichlet(np.full(VOCAB_SIZE, concentration))
    q = (p + 1e-9) * np.exp(error * rng.normal(size=VOCAB_SIZE))
    return p, q / q.sum()


def acceptance(p: Row, q: Row, rng: np.random.Generator) -> dict[str, float]:
    noise = rng.exponential(size=(DRAWS, VOCAB_SIZE))
    choices = (-q / noise).argsort(axis=1)[:, :2]
    token = (p / noise).argmax(axis=1)
    likeliest = (-q).argsort()[:2]
    return {
        "match": float((choices == token[:, None]).any(axis=1).mean()),
        "twice": twice(p, q),
        "without_replacement": without_replacement(p, q),
        "certain": float(p[likeliest].sum()),
    }


def twice(p: Row, q: Row) -> float:
    first = rejection_acceptance_rate(p, q)
    return first + (1 - first) * rejection_acceptance_rate(after_rejection(p, q), q)


def without_replacement(p: Row, q: Row) -> float:
    """The second draw depends on the first, so every first one that is rejected is summed over."""
    left, total = after_rejection(p, q), rejection_acceptance_rate(p, q)
    for token in (q > p).nonzero()[0]:
        rest = q * (np.arange(VOCAB_SIZE) != token)
        total += (q[token] - p[token]) * rejection_acceptance_rate(left, rest / rest.sum())
    return float(total)


def after_rejection(p: Row, q: Row) -> Row:
    return residual(p, *residual_weights(p, 0, q))


def line(row: dict[str, float]) -> str:
    return (
        f"concentration {row['concentration']:g}, noise {row['error']:g}: match {row['match']:.3f}; specinfer "
        f"{row['twice']:.3f} with two draws, {row['without_replacement']:.3f} without replacement, "
        f"{row['certain']:.3f} with the likeliest two; match accepts more than two draws in "
        f"{row['match_accepts_more']:.0%} of the pairs"
    )


def main() -> None:
    options = harness.arguments(__doc__, "--pairs 5", pairs=60).parse_args()
    rows = list(measure(options.pairs))
    harness.report(options, "sampled", {"rows": rows}, map(line, rows))


if __name__ == "__main__":
    main()
