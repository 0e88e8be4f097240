"""`dsi simulate`: toy models under one or more algorithms."""

from __future__ import annotations

from typing import Annotated

import typer

from dsi.cli import output as show
from dsi.cli.options import (
    Acceptance,
    Algorithm,
    Contention,
    DrafterCopies,
    DrafterMs,
    Drafters,
    DrafterTtftMs,
    Eager,
    FailuresPerHour,
    Horizon,
    Jitter,
    Json,
    NetworkJitter,
    NetworkMs,
    Nodes,
    NoticeMs,
    OneCache,
    PerTokenMs,
    Pieces,
    Profile,
    RepairS,
    Requests,
    Rule,
    Seed,
    Sp,
    TargetMs,
    TargetTtftMs,
    Tokens,
    Waited,
)
from dsi.cli.toy import algorithms, numbers, profiled, setting_of

EXAMPLE = "Example: dsi simulate --algorithm nonsi,si,dsi --lookahead 1,2,5,10 --json"


def simulate(
    context: typer.Context,
    algorithm: Algorithm = "nonsi,si,pearl,dsi",
    target_ms: TargetMs = 20.0,
    drafter_ms: DrafterMs = 2.0,
    acceptance: Acceptance = 0.8,
    lookahead: Annotated[
        str,
        typer.Option(
            help="Guesses per verification; several separated by commas: the best is taken. auto: by "
            "Eq. (1) for dsi, the best block for si, target over drafter latency for pearl."
        ),
    ] = "auto",
    sp: Sp = 7,
    tokens: Tokens = 100,
    repeats: Annotated[int, typer.Option(help="Runs, each with a seed of its own.")] = 30,
    seed: Seed = 0,
    drafters: Drafters = 1,
    drafter_copies: DrafterCopies = 1,
    requests: Requests = 1,
    patience: Annotated[
        str,
        typer.Option(
            help="dsi: guesses to have before a fresh root is watched; several separated by commas: the best."
        ),
    ] = "0",
    horizon: Horizon = float("inf"),
    branches: Annotated[int, typer.Option(help="dsi: guesses for each place; 2 has second guesses.")] = 1,
    second_hit: Annotated[
        float, typer.Option(help="How often a second guess is right where the first is wrong: 0 to 1.")
    ] = 0.0,
    sure: Annotated[
        float, typer.Option(help="How often there is no second guess where the first is right: 0 to 1.")
    ] = 0.0,
    spare: Annotated[int, typer.Option(help="dsi: targets, of the SP degree, that look past second guesses.")] = 0,
    pieces: Pieces = 0,
    target_ttft_ms: TargetTtftMs = None,
    drafter_ttft_ms: DrafterTtftMs = None,
    per_token_ms: PerTokenMs = 0.0,
    jitter: Jitter = 0.0,
    network_ms: NetworkMs = 0.0,
    network_jitter: NetworkJitter = 0.0,
    nodes: Nodes = None,
    failures_per_hour: FailuresPerHour = 0.0,
    repair_s: RepairS = 10.0,
    notice_ms: NoticeMs = 0.0,
    contention: Contention = 0.0,
    one_cache: OneCache = False,
    rule: Rule = "match",
    eager: Eager = True,
    waited: Waited = False,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Run toy models under one or more algorithms, in virtual time or on real threads."""
    from dsi.experiments.simulate import best, choices

    names = algorithms(algorithm)
    blocks = [None] if lookahead == "auto" else numbers("lookahead", lookahead, 1)
    waits = numbers("patience", patience, 0)
    setting = setting_of(profiled(context, profile, locals()), lookahead=None, patience=0)
    runs = sum(len(choices(setting, name, blocks, waits)) * repeats for name in names)
    with show.progress("runs", runs) as advance:
        results = [best(setting, name, blocks, waits, repeats, seed, waited, advance) for name in names]
    show.simulations(results, json)
