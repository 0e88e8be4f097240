"""`dsi simulate`: toy models under one or more algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsi.cli import output as show
from dsi.cli.options import Algorithms, Fields, Json, RealTime, Seed, algorithms, options, whole_numbers
from dsi.planning.simulation import SimulationConfig

EXAMPLE = "Example: dsi simulate --algorithm nonsi,si,dsi --lookahead 1,2,5,10 --json"
SIMULATION = Fields(
    without=("algorithm", "lookahead", "min_draft"),
    defaults={"target_ms": 20.0, "drafter_ms": 2.0, "acceptance": 0.8, "sp": 7, "tokens": 100},
)


def measured_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make what a profile measured the defaults of the options that the user did not give."""
    if path is not None:
        from dsi.experiments.profile import NUMBERS, Profile

        profile = Profile.load(path)

        def number(name: str) -> Any:
            value = profile.number(name, path)
            later = name.replace("_ttft", "")  # a first forward is not faster than later ones: that was noise
            return value if later == name else max(value, context.params[later])

        context.default_map = {name: lambda name=name: number(name) for name in NUMBERS}
    return path


@options
def simulate(
    algorithm: Algorithms = "nonsi,si,pearl,dsi",
    lookahead: Annotated[
        str,
        typer.Option(
            help="Draft tokens per verification; several separated by commas: the best is taken. auto: by "
            "Eq. (1) for dsi, the best block for si, target over drafter latency for pearl."
        ),
    ] = "auto",
    min_draft: Annotated[
        str,
        typer.Option(
            help="dsi: draft tokens to have before a new root is verified; several separated by commas: the best."
        ),
    ] = "0",
    repeats: Annotated[int, typer.Option(help="Runs, each with a seed of its own.")] = 30,
    seed: Seed = 0,
    *,
    simulation: Annotated[SimulationConfig, SIMULATION],
    real_time: RealTime = False,
    profile: Annotated[  # noqa: ARG001 - its callback reads it
        Path | None,
        typer.Option(
            help="Take what is measured from a file of `dsi measure`; what is given here comes first.",
            callback=measured_defaults,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run toy models under one or more algorithms, in virtual time or on real threads."""
    from dsi.experiments.simulate import best, variants

    names = algorithms(algorithm)
    lookaheads = [None] if lookahead == "auto" else whole_numbers("lookahead", lookahead, 1)
    min_drafts = whole_numbers("min draft", min_draft, 0)
    runs = sum(len(variants(simulation, name, lookaheads, min_drafts)) * repeats for name in names)
    with show.progress("runs", runs) as advance:
        results = [best(simulation, name, lookaheads, min_drafts, repeats, seed, real_time, advance) for name in names]
    show.simulations(results, json)
