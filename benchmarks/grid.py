"""How long Figures 2 and 3 of the paper take: about four million settings, exact, on one core. Measured."""

from __future__ import annotations

import argparse
import json
from time import perf_counter

from dsi.paper.figures import figure2, figure3, headings
from dsi.paper.grid import TOKENS, grid
from dsi.plot.heatmap import png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = perf_counter()
    found = grid(options.tokens)
    computed = perf_counter() - began
    for panels, heading in zip((figure2(found), figure3(found)), headings(found)):
        png(list(panels.values()), heading)
    total = perf_counter() - began
    if options.json:
        figures = {"settings": found.settings, "seconds": computed, "seconds_with_pictures": total}
        print(json.dumps({"label": "measured", "tokens": options.tokens, **figures}))
    else:
        rate = found.settings / computed
        print(f"{found.settings:,} settings of {options.tokens} tokens in {computed:.2f} s: {rate:,.0f}/s")
        print(f"both figures, pictures included: {total:.2f} s (measured)")


if __name__ == "__main__":
    main()
