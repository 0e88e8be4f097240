"""`dsi compare`: the same prompts under every algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsi.cli import output as show
from dsi.cli.budget import BudgetComparison, BudgetOptions, check_given
from dsi.cli.engine import SPEC, load_engine, report_ignored_defaults, sampling_arguments
from dsi.cli.options import Algorithms, Fields, Json, MaxNewTokens, algorithms, given, options, read_text, whole_numbers
from dsi.core.messages import PENALTIES, Sampling
from dsi.core.spec import SpecConfig
from dsi.engine.config import FLOAT32, EngineConfig

EXAMPLE = "Example: dsi compare --repeats 5 --json. Example: dsi compare --budget --cores 2 --out budget.svg"
OWN_SPEC = Fields(
    only=("lookahead", "min_draft"),
    auto=SPEC.auto,
    help={**SPEC.help, "lookahead": "For pearl and dsi: a number, or auto by Eq. (1)."},
)


@options
def compare(
    context: typer.Context,
    algorithm: Algorithms = "nonsi,si,pearl,dsi,auto",
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt on each line.")] = None,
    si_lookaheads: Annotated[str, typer.Option(help="Lookaheads that si tries; its best is shown.")] = "3,5,8,12",
    max_new_tokens: MaxNewTokens = 96,
    repeats: Annotated[int, typer.Option(help="Times that each prompt is run under each algorithm.")] = 3,
    *,
    config: EngineConfig,
    spec: Annotated[SpecConfig, OWN_SPEC],
    sampling: Annotated[Sampling, Fields(without=("min_p", *PENALTIES))],
    budget: Annotated[
        bool,
        typer.Option(
            "--budget",
            help="The same cores for every algorithm and auto, in arrangements of their own, by prompt class.",
        ),
    ] = False,
    budget_options: BudgetOptions,
    json: Json = False,
) -> None:
    """The same prompts under every algorithm, interleaved and repeated; all texts are checked to be equal.

    In float32, and wherever forwards are exact, different texts are an error; otherwise the result says where they
    part, and by what margin.
    Above temperature 0, rules other than match give each algorithm a text of its own, the same every time.
    With --budget, each algorithm has the same processors, in arrangements of its own.
    """
    from dsi.experiments.compare import compare as measured, specs
    from dsi.experiments.divergence import check_equal

    options_given = given(context)
    check_given(options_given)
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    lookaheads = whole_numbers("si lookaheads", si_lookaheads, 1)
    if budget and config.uses_endpoints:
        raise ValueError("--budget: is about the cores of this machine, and engines behind URLs have their own")
    if budget:
        run = BudgetComparison(config, sampling, max_new_tokens, repeats, algorithm, lookaheads, budget_options, json)
        run.run(lambda: _classes(prompts))
        return
    configs = specs(algorithms(algorithm), lookaheads)
    texts = _prompts(prompts)
    with (
        load_engine(config, spec) as engine,
        show.progress("texts", len(configs) * len(texts) * repeats) as advance,
    ):
        report_ignored_defaults(config)
        arguments = {"max_new_tokens": max_new_tokens, **sampling_arguments(sampling)}
        must_agree = engine.deployment.exact or (config.dtype == FLOAT32 and not config.target_endpoints)
        comparison = measured(engine, configs, texts, repeats, arguments, advance)
    show.comparison(comparison, json, sampling.rule == "match" or sampling.temperature == 0)
    if must_agree:
        check_equal(comparison.divergences)


def _prompts(file: Path | None) -> list[str]:
    from dsi.experiments.compare import PROMPTS

    lines = PROMPTS if file is None else [line for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: has no prompt in it")
    return list(lines)


def _classes(file: Path | None) -> dict[str, list[str]]:
    """Prompts by class; a file is a class of its own."""
    from dsi.experiments.compare import CLASSES

    if file is not None:
        return {file.stem: _prompts(file)}
    return {name: list(prompts) for name, prompts in CLASSES.items()}
