"""How long Figures 2 and 3 of the paper take: about four million settings, exact, on one core. Measured."""

from __future__ import annotations

from time import perf_counter

import harness
from dsi.paper.figures import figure2, figure3, headings
from dsi.paper.grid import TOKENS, grid
from dsi.plot import heatmap, style


def main() -> None:
    options = harness.arguments(__doc__, "--tokens 20", tokens=TOKENS).parse_args()
    began = perf_counter()
    speeds = grid(options.tokens)
    computed = perf_counter() - began
    for panels, heading in zip((figure2(speeds), figure3(speeds)), headings(speeds)):
        style.rendered(heatmap.figure(list(panels.values()), heading), "png")
    total = perf_counter() - began
    results = {
        "tokens": options.tokens,
        "settings": speeds.settings,
        "seconds": computed,
        "seconds_with_pictures": total,
    }
    lines = [
        f"{speeds.settings:,} settings of {options.tokens} tokens in {computed:.2f} s: "
        f"{speeds.settings / computed:,.0f}/s",
        f"both figures, pictures included: {total:.2f} s (measured)",
    ]
    harness.report(options, "measured", results, lines)


if __name__ == "__main__":
    main()
