"""Whether the texts of each rule are as likely as the target says, on the built-in pair's own vocabulary.

Texts of two tokens under DSI with three targets (virtual time, real forwards), counted, against the target's
probabilities: a chi-square, in standard deviations above what chance gives. 30,000 texts show a total
variation of 0.02 at about 5. A biased rule, which tries the guess first that the target likes best, is
shown beside them; exit status 1 if a rule is above 4, or the biased one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dsi.cli import output as show
from dsi.core.messages import RULES
from dsi.engine.build import load_apart
from dsi.experiments.unbiased import Remembered, chi_square
from dsi.sampling import acceptance_rules as rules
from dsi.sampling import verify

PROMPT = "Once upon a time"
ALLOWED = 4.0


def favourite_first(p: Any, guesses: Any, uniforms: Any, noise: Any) -> int:
    return rules.specinfer(p, sorted(guesses, key=lambda guess: -p[guess[0]]), uniforms, noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=30_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pair = load_apart("builtin", "builtin")
    target, drafter = Remembered(pair.target.backend), Remembered(pair.drafter.backend)
    prompt = pair.text.encode(PROMPT)
    with show.progress("texts", options.samples * (len(RULES) + 1)) as advance:
        found = {rule: chi_square(target, drafter, rule, prompt, options.samples, advance) for rule in RULES}
        verify.specinfer = favourite_first  # type: ignore[attr-defined]
        biased = chi_square(target, drafter, "specinfer", prompt, options.samples, advance)
    if options.json:
        print(json.dumps({"label": "real forwards", "samples": options.samples, **found, "biased": biased}))
    else:
        for rule, sigmas in {**found, "biased": biased}.items():
            print(f"{rule:10} {sigmas:6.2f} standard deviations above chance, {options.samples} texts")
    sys.exit(max(found.values()) > ALLOWED or biased <= ALLOWED)


if __name__ == "__main__":
    main()
