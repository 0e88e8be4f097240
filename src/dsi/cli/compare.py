"""`dsi compare`: the same prompts under every algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dsi.cli import budget as cli_budget
from dsi.cli import output as show
from dsi.cli.engine_options import load_engine
from dsi.cli.options import (
    Algorithm,
    AutoPatience,
    Budget,
    BudgetOut,
    BudgetProfile,
    Cores,
    Degree,
    Drafter,
    DrafterDevice,
    DrafterNeeds,
    Dtype,
    Fleet,
    Gpus,
    HangSeconds,
    Json,
    MaxNewTokens,
    Rule,
    Scales,
    Seed,
    StartSeconds,
    Target,
    TargetDevices,
    TargetMp,
    TargetNeeds,
    Temperature,
    Threads,
    TopK,
    TopP,
    Vocab,
)
from dsi.cli.toy import algorithms, given, numbers, profiled, setting_of

CANCEL_POINTS = 5  # where a target's forward on a GPU is taken to end if it is cancelled: a few layers each
EXAMPLE = "Example: dsi compare --repeats 5 --json. Example: dsi compare --budget --cores 2 --out budget.svg"


def compare(
    context: typer.Context,
    target: Target = "builtin",
    drafter: Drafter = None,
    vocab: Vocab = "auto",
    algorithm: Algorithm = "nonsi,si,pearl,dsi",
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt on each line.")] = None,
    sp: Degree = None,
    target_mp: TargetMp = 1,
    lookahead: Annotated[str, typer.Option(help="For pearl and dsi: a number, or auto by Eq. (1).")] = "auto",
    si_lookaheads: Annotated[str, typer.Option(help="Blocks that si tries; its best is shown.")] = "3,5,8,12",
    patience: AutoPatience = "auto",
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    rule: Rule = "match",
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(help="Times that each prompt is run under each algorithm.")] = 3,
    dtype: Dtype = "float32",
    threads: Threads = None,
    target_devices: TargetDevices = None,
    drafter_device: DrafterDevice = None,
    fleet: Fleet = None,
    target_needs: TargetNeeds = None,
    drafter_needs: DrafterNeeds = None,
    hang_seconds: HangSeconds = None,
    start_seconds: StartSeconds = None,
    budget: Budget = False,
    cores: Cores = None,
    gpus: Gpus = None,
    profile: BudgetProfile = None,
    scales: Scales = None,
    out: BudgetOut = None,
    json: Json = False,
) -> None:
    """The same prompts under every algorithm, interleaved and repeated; all texts are checked to be equal.

    Above temperature 0, rules other than match give each algorithm a text of its own, the same every time.
    With --budget, each algorithm has the same processors, in arrangements of its own.
    """
    from dsi.experiments.compare import compare as measured
    from dsi.experiments.compare import contenders

    cli_budget.check_options({name: each for name, each in locals().items() if given(context, name)})
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    blocks = numbers("si lookaheads", si_lookaheads, 1)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "rule": rule,
    }
    if budget:
        _compare_budget(context, locals(), blocks, options)
        return
    names = contenders(algorithms(algorithm), blocks)
    texts = _prompts(prompts)
    with (
        load_engine(locals() | {"algorithm": "dsi"}) as engine,
        show.progress("texts", len(names) * len(texts) * repeats) as advance,
    ):
        rows = measured(engine, names, texts, repeats, options, advance)
    show.comparison(rows, json, rule == "match" or temperature == 0)


def _compare_budget(context: typer.Context, options: dict[str, Any], blocks: list[int], said: dict[str, Any]) -> None:
    for path in options["out"] or []:
        show.writable(path, show.PICTURES)
    if not given(context, "algorithm"):
        options = options | {"algorithm": f"{options['algorithm']},auto"}
    if options["profile"] is None:
        cli_budget.on_cores(options, blocks, _classes(options["prompts"]), said)
        return
    from dsi.experiments.profile import NUMBERS, Profile

    name = Profile.load(options["profile"]).dataset
    measured = profiled(context, options["profile"], dict.fromkeys(NUMBERS))
    fixed = {"sp": 1, "tokens": said["max_new_tokens"], "eager": False, "pieces": CANCEL_POINTS}
    fixed["drafter_pieces"] = 1  # a guess that is on its way cannot be called back
    cli_budget.on_gpus(options, blocks, name, setting_of(measured, **fixed))


def _prompts(file: Path | None) -> list[str]:
    from dsi.experiments.compare import PROMPTS

    lines = PROMPTS if file is None else [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: has no prompt in it")
    return list(lines)


def _classes(file: Path | None) -> dict[str, list[str]]:
    """A file is a class of its own."""
    from dsi.experiments.compare import CLASSES

    if file is not None:
        return {file.stem: _prompts(file)}
    return {name: list(prompts) for name, prompts in CLASSES.items()}
