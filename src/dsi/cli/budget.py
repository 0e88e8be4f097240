"""`dsi compare --budget`: the same processors for every algorithm, here or in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsi.cli import output as show
from dsi.cli.engine_options import load_engine

if TYPE_CHECKING:
    from dsi.experiments.budget import Contender, Table
    from dsi.planning.simulation import SimulationConfig

Options = dict[str, Any]  # of the command
Classes = Mapping[str, Sequence[str]]
ARRANGED = (  # what each algorithm gets its own of
    "sp",
    "target_mp",
    "lookahead",
    "patience",
    "threads",
    "target_devices",
    "drafter_device",
    "fleet",
    "target_needs",
    "drafter_needs",
)
ONLY_HERE = ("cores", "gpus", "profile", "scales", "out")
SPOKEN = ("target", "drafter", "vocab", "prompts", "temperature", "top_p", "top_k", "rule", "dtype")
DRAWS = 4  # texts for each repeat where a profile stands for the prompts


def check_options(given: Mapping[str, Any]) -> None:
    """Of what the user gave, nothing may be left without effect."""
    if not given.get("budget"):
        _refuse(given, ONLY_HERE, "is for --budget")
        return
    _refuse(given, ARRANGED, "not with --budget, which arranges the processors for each algorithm")
    if ("gpus" in given) != ("profile" in given):
        name = "gpus" if "gpus" in given else "profile"
        raise ValueError(f"--{name} {given[name]}: --gpus and --profile go together")
    if "gpus" in given:
        _refuse(given, ("cores",), "not with --gpus")
        _refuse(given, SPOKEN, "not with --profile, from which all is simulated")


def _refuse(given: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    for name in names:
        if name in given:
            value = given[name]
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"--{name.replace('_', '-')} {shown}: {reason}")


def on_cores(options: Options, blocks: Sequence[int], classes: Classes, said: Options) -> None:
    """Measured where there are so many cores; `said` is what every text is written with."""
    from dsi.experiments import budget

    here = budget.cores_here()
    cores = here if options["cores"] is None else budget.check_processors("cores", options["cores"], 1)
    budget.check_one_text(said["rule"], said["temperature"])
    if said["max_new_tokens"] < 1:
        raise ValueError(f"max new tokens {said['max_new_tokens']}: must be at least 1")
    entrants = budget.contenders(budget.check_entrants(options["algorithm"]), cores, blocks)
    if cores > here:
        _beyond(options, cores, entrants, classes, said)
        return
    if options["scales"] is not None:  # which would be without effect
        cores_asked = budget.plural(cores, "core")
        raise ValueError(f"--scales {options['scales']}: {cores_asked} of {here} here, so all is measured")
    texts = sum(map(len, classes.values())) * options["repeats"]
    with (
        budget.engines(partial(load_engine, options), entrants) as running,
        show.progress("texts", len(entrants) * texts) as advance,
    ):
        tables = budget.measured(running, classes, options["repeats"], said, advance)
    about = f"{_runs(tables)} on {budget.plural(cores, 'core')}, all equal"
    _report(tables, options, about, cores=cores, equal=True)


def _beyond(options: Options, cores: int, entrants: Sequence[Contender], classes: Classes, said: Options) -> None:
    """More cores than there are: latencies and acceptance from here, all else in virtual time."""
    from dataclasses import replace

    from dsi.experiments import budget

    share = _share(options)
    prompts = sum(map(len, classes.values()))
    chosen = options | {"algorithm": "dsi"}
    with load_engine(chosen, sp=1) as engine, show.progress("texts", prompts) as advance:
        rates = budget.counted(engine, classes, said, advance)
        setting = engine.deployment.simulation(1, said["max_new_tokens"])
    settings = {name: replace(setting, acceptance=rate) for name, rate in rates.items()}
    count = max(map(len, classes.values())) * options["repeats"]
    origin = f"of the {budget.cores_here()} here" if budget.cores_here() > 1 else "here"
    _simulate(settings, options, cores, "core", entrants, share, count, f"as measured on one {origin}")


def on_gpus(options: Options, blocks: Sequence[int], name: str, setting: SimulationConfig) -> None:
    """In virtual time, with what a profile has of one GPU."""
    from dsi.experiments import budget

    gpus = budget.check_processors("gpus", options["gpus"], 2)
    entrants = budget.contenders(budget.check_entrants(options["algorithm"]), gpus, blocks)
    origin = f"from {options['profile']}"
    count = DRAWS * options["repeats"]
    _simulate({name: setting}, options, gpus, "GPU", entrants, _share(options), count, origin)


def _share(options: Options) -> float:
    from dsi.experiments import budget
    from dsi.planning.equation_1 import SCALES

    return SCALES if options["scales"] is None else budget.check_share(options["scales"])


def _simulate(
    settings: Mapping[str, SimulationConfig],
    options: Options,
    total: int,
    unit: str,
    entrants: Sequence[Contender],
    share: float,
    count: int,
    origin: str,
) -> None:
    from dsi.experiments import budget

    seeds = range(options["seed"], options["seed"] + count)
    with show.progress("contenders", len(settings) * len(entrants)) as advance:
        tables = budget.simulated(settings, entrants, share, seeds, unit, advance)
    first = next(iter(settings.values()))
    about = (
        f"{_runs(tables)} on {budget.plural(total, unit)}; a target forward {first.latency.target_ms:.2f} ms and a "
        f"drafter's {first.latency.drafter_ms:.2f} ms on one {unit}, {origin}; {share:.0%} of a target forward is "
        f"divided among its {unit}s"
    )
    known = {"target_ms": first.latency.target_ms, "drafter_ms": first.latency.drafter_ms, "scales": share}
    _report(tables, options, about, **{f"{unit.lower()}s": total}, **known)


def _runs(tables: Sequence[Table]) -> str:
    return f"{tables[0].entries[0].runs} texts of each class and contender"


def _report(tables: list[Table], options: Options, about: str, **known: Any) -> None:
    paths: list[Path] = options["out"] or []
    for path in paths:
        from dsi.plot.budget import save

        save(tables, f"The same processors for every algorithm: {about.partition(';')[0]}", path)
    show.budget(tables, about, options["json"], paths, **known)
