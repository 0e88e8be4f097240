"""`dsi plan`: the fastest deployment on so many processors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsi.cli import output as show
from dsi.cli.options import Json, option
from dsi.engine.config import DTYPES, EngineConfig, join_targets
from dsi.models.endpoints.address import is_address
from dsi.planning.equation_1 import PARALLEL_FRACTION, check_latencies
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

if TYPE_CHECKING:
    from dsi.engine.plan_endpoints import EndpointPlan
    from dsi.planning.search import DeploymentPlan, PairProfile, Sensitivity

EXAMPLE = "Example: dsi plan --target builtin --drafter builtin --cores 2"
ACCEPTANCE = 0.8  # assumed where it is not known
SHOWN_WIDTH = 8  # positions of the widest verification that is shown
CANCEL_POINTS = 8  # of a forward that was not measured here
POINTS = (*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1000)  # of the picture


def plan(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this model (a folder, a name on the hub, builtin), or the engines behind these URLs."
        ),
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="With this smaller one, likewise; repeatable.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Processors in all.")] = None,
    cores: Annotated[
        int | None, typer.Option(help="Instead: cores of this machine, for models that are measured here.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Take what is measured from a file of `dsi measure`; what is given here comes first."),
    ] = None,
    target_ms: Annotated[float | None, option(LatencyModel, "target_ms")] = None,
    drafter_ms: Annotated[float | None, option(LatencyModel, "drafter_ms")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="How often a draft token is right: 0 to 1; 0.8 where it is not known.")
    ] = None,
    contention: Annotated[float | None, option(LatencyModel, "contention")] = None,
    runner_up_acceptance: Annotated[float, option(SimulationConfig, "runner_up_acceptance")] = 0.0,
    target_gpus: Annotated[int | None, typer.Option(help="GPUs that one target needs; 1 by itself.")] = None,
    drafter_gpus: Annotated[int | None, typer.Option(help="GPUs that the drafter needs; 1 by itself.")] = None,
    parallel_fraction: Annotated[
        float | None,
        typer.Option(help="The share of a target forward that is divided among its GPUs: 0 to 1; 0.8 by itself."),
    ] = None,
    dtype: Annotated[str, option(EngineConfig, "dtype")] = "float32",
    plot: Annotated[
        Path | None, typer.Option(help="Draw expected latency by number of processors (.svg, .png).")
    ] = None,
    json: Json = False,
) -> None:
    """What is fastest with these processors: plain decoding, SI, PEARL or DSI, and in which arrangement.

    The pair is measured here (--target, --drafter, --cores), or its figures are given or read from a file of
    `dsi measure`. The best five, why, what would change them, and the command to run the first.
    """
    from dsi.planning.search import SHOWN, count_candidates, search_processors, sensitivities

    given = GivenFigures(target_ms, drafter_ms, acceptance, contention)
    names = (*(target or ()), *(drafter or ()))
    if any(map(is_address, names)):
        _check_no_processors(gpus=gpus, cores=cores, profile=profile, plot=plot)
        config = EngineConfig(tuple(target or ("builtin",)), tuple(drafter or ("builtin",)), dtype=dtype)  # type: ignore[arg-type]
        _plan_endpoints(config, acceptance, json)
        return
    model = join_targets(target) if target else None
    processors = _count_processors(gpus, cores)
    _check_split(cores, target_gpus, drafter_gpus, parallel_fraction)
    target_gpus, drafter_gpus = (1 if gpus is None else gpus for gpus in (target_gpus, drafter_gpus))
    fraction = PARALLEL_FRACTION if parallel_fraction is None else parallel_fraction
    _check_share("runner-up acceptance", runner_up_acceptance)
    _check_share("parallel fraction", fraction)
    if target_gpus < 1 or drafter_gpus < 1:
        raise ValueError(f"{target_gpus} GPUs per target, {drafter_gpus} per drafter: each needs at least 1")
    if plot is not None:
        show.writable(plot, show.PICTURES)
    pair = _pair_profile(model, drafter, cores, profile, given, dtype)
    if cores is None:
        pair = _split(pair, processors, target_gpus, drafter_gpus, fraction)
    pair = pair.for_all(runner_up_acceptance=runner_up_acceptance)
    with show.progress("arrangements", 5 * count_candidates(pair, processors)) as advance:
        plans = search_processors(pair, processors, advance)
        changes = sensitivities(pair, plans[0], processors, advance)
    if plot is not None:
        _draw(pair, processors, plot)
    unnamed = ("builtin", "builtin") if cores is not None else ("TARGET", "DRAFTER")
    models = (model or unnamed[0], plans[0].drafter or (drafter or [unnamed[1]])[0])
    first = _command(plans[0], models, dtype, processors, cores is not None)
    equation = _equation(pair, processors, target_gpus)
    if json:
        show.document(
            **(equation or {}),
            label="forecast",
            evidence=pair.json(),
            offers=[plan.json() for plan in plans[:SHOWN]],
            sensitivity=[{"what": change.change, "ms": change.ms, "best": change.best.json()} for change in changes],
            command=first,
        )
        return
    _print_plans(plans[:SHOWN], pair, cores is not None)
    _print_changes(changes, plans[0])
    print(f"\nto run the first: {first}")
    if equation:
        _print_equation(equation, processors, target_gpus, drafter_gpus, "GPU" if cores is None else "core")
    if plot is not None:
        print(f"wrote {plot}")


def _check_no_processors(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name}: engines behind URLs are measured as they are; leave it out")


def _plan_endpoints(config: EngineConfig, acceptance: float | None, json: bool) -> None:
    """Measure engines behind URLs, and say whether speculation over them pays."""
    with show.working(f"measuring {config.target} and {', '.join(config.drafter)}") as status:
        from dsi.engine.engine import Engine
        from dsi.engine.plan_endpoints import plan_endpoints

        with Engine.load(config, algorithm="nonsi", status=status) as engine:
            planned = plan_endpoints(engine, acceptance)
    command = _endpoint_command(config, planned)
    if json:
        show.document(label="forecast", **planned.json(), command=command)
        return
    streamed = planned.stream_ms is not None
    rows = [
        [
            "nonsi, streamed" if streamed and not best.spec.speculates else best.spec.algorithm,
            str(best.spec),
            f"{best.ms:.2f}",
        ]
        for best in planned.best
    ]
    show.table(["algorithm", "configuration", "ms a token"], rows)
    source = "measured" if acceptance is None else "given"
    print(f"forecast: acceptance {planned.acceptance:.2f} {source}; {_latencies(planned)}")
    print(_turning_point(planned))
    print(f"\nto run the first: {command}")


def _latencies(planned: EndpointPlan) -> str:
    latency = planned.latency
    streamed = "" if planned.stream_ms is None else f", {planned.stream_ms:.2f} ms a token streamed"
    widths = dict(latency.by_width)
    widest = max(width for width in widths if width <= SHOWN_WIDTH)
    return (
        f"verifying 1 position takes {float(latency.target_ms):.2f} ms, {widest} take {float(widths[widest]):.2f}"
        f"{streamed}; each other busy target adds {latency.contention:.0%}; "
        f"a draft token takes {float(latency.drafter_ms):.2f} ms"
    )


def _turning_point(planned: EndpointPlan) -> str:
    pays = "speculation pays" if planned.speculates else "speculation does not pay"
    if planned.turning_ms is None:
        return f"{pays}, also with {'more' if planned.speculates else 'less'} delay"
    more = "more" if planned.turning_ms > 0 else "less"
    return f"{pays}; it would not be so with {abs(planned.turning_ms):g} ms {more} for each verification"


def _endpoint_command(config: EngineConfig, planned: EndpointPlan) -> str:
    targets = " ".join(f"--target {name}" for name in config.target.split(","))
    drafters = " ".join(f"--drafter {name}" for name in config.drafter)
    best = planned.best[0].spec
    numbers = f" --lookahead {best.lookahead}" if best.lookahead else ""
    numbers += f" --min-draft {best.min_draft or 0}" if best.algorithm == "dsi" else ""
    return f"dsi generate {targets} {drafters} --algorithm {best.algorithm}{numbers}"


@dataclass(frozen=True)
class GivenFigures:
    """What the user says of the pair instead of measuring it; None: nothing."""

    target_ms: float | None
    drafter_ms: float | None
    acceptance: float | None
    contention: float | None

    def __post_init__(self) -> None:
        check_latencies(*(1.0 if ms is None else ms for ms in (self.target_ms, self.drafter_ms)))
        _check_share("acceptance", self.acceptance)

    def over(self, pair: PairProfile) -> PairProfile:
        """Replace the acceptance rate and the contention of a profile."""
        sources = {"acceptance": "assumed", "contention": "assumed", **pair.sources}
        if self.acceptance is not None:
            pair, sources["acceptance"] = pair.for_all(acceptance={"match": self.acceptance}), "given"
        if self.contention is not None:
            pair, sources["contention"] = pair.with_latency(contention=self.contention), "given"
        return replace(pair, sources=sources)


def _count_processors(gpus: int | None, cores: int | None) -> int:
    if (gpus is None) == (cores is None):
        raise ValueError("processors: give --gpus, or --cores of this machine")
    return gpus if gpus is not None else cores or 0


def _check_split(
    cores: int | None, target_gpus: int | None, drafter_gpus: int | None, parallel_fraction: float | None
) -> None:
    split = {"target-gpus": target_gpus, "drafter-gpus": drafter_gpus, "parallel-fraction": parallel_fraction}
    given = [f"--{name} {value:g}" for name, value in split.items() if value is not None]
    if cores is not None and given:
        raise ValueError(f"cores {cores}: are measured as they are; {', '.join(given)} would be for --gpus")


def _check_share(name: str, share: float | None) -> None:
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"{name} {share:g}: must be between 0 and 1")


def _pair_profile(
    target: str | None,
    drafter: list[str] | None,
    cores: int | None,
    profile: Path | None,
    given: GivenFigures,
    dtype: str,
) -> PairProfile:
    """Given figures come first, then a profile, then what is measured here."""
    drafters = drafter or ["builtin"]
    if cores is not None:
        if profile is not None or given.target_ms is not None:
            raise ValueError(f"cores {cores}: are measured here; with given figures say --gpus {cores}")
        return given.over(_measured_here(target or "builtin", drafters, cores, dtype))
    if profile is not None:
        return given.over(_from_profile(profile, given))
    if given.target_ms is not None and given.drafter_ms is not None:
        return given.over(_from_figures(given.target_ms, given.drafter_ms))
    if target is None:
        missing = "target-ms" if given.target_ms is None else "drafter-ms"
        raise ValueError(f"--{missing} is missing: give it, or a --profile that has it")
    return given.over(_measured_here(target, drafters, 1, dtype))


def _measured_here(target: str, drafters: list[str], cores: int, dtype: str) -> PairProfile:
    config = EngineConfig(target, tuple(drafters), dtype=dtype)
    config.check_measurable()  # before anything that takes seconds
    with show.working(f"loading {target} and {', '.join(drafters)}"):
        from dsi.engine.profile_host import count_steps, profile_host
    with show.progress("measurements", count_steps(cores, len(drafters))) as advance:
        return profile_host(config, cores, advance)


def _from_figures(target_ms: float, drafter_ms: float) -> PairProfile:
    from dsi.planning.search import PairProfile

    latency = LatencyModel(target_ms, drafter_ms, by_width=((1, target_ms),), cancel_points=CANCEL_POINTS)
    return PairProfile({1: latency}, {"match": ACCEPTANCE}, sources=dict.fromkeys(("target", "drafter"), "given"))


def _from_profile(path: Path, given: GivenFigures) -> PairProfile:
    from dsi.experiments.profile import Profile
    from dsi.planning.search import PairProfile

    profile = Profile.load(path)
    sources = dict.fromkeys(("target", "drafter"), "measured")
    by_width = profile.by_width(path) if given.target_ms is None else ((1, given.target_ms),)
    drafter_ms = profile.number("drafter_ms", path) if given.drafter_ms is None else given.drafter_ms
    latency = LatencyModel(by_width[0][1], drafter_ms, by_width=by_width, cancel_points=CANCEL_POINTS)
    if not {"acceptance", "rules"} & profile.parts.keys():
        return PairProfile({1: latency}, {"match": ACCEPTANCE}, sources=sources)
    return PairProfile({1: latency}, profile.acceptance_by_rule(path), sources=sources | {"acceptance": "measured"})


def _split(pair: PairProfile, processors: int, target_gpus: int, drafter_gpus: int, fraction: float) -> PairProfile:
    """Assume how a target's forward scales over several processors, where it was not measured."""
    sources = {**pair.sources, "mp": f"{fraction:g} of a forward scales, assumed"}
    split = pair.split(target_gpus, max(processors, target_gpus), fraction)
    alternatives = tuple(
        replace(other, drafter_processors=drafter_gpus * other.drafters) for other in split.alternatives
    )
    return replace(split, drafter_processors=drafter_gpus, sources=sources, alternatives=alternatives)


def _draw(pair: PairProfile, processors: int, path: Path) -> None:
    from dsi.planning.search import count_candidates, ms_by_processors
    from dsi.plot import processors as chart, style

    least = min(pair.by_mp)
    counts = sorted({count for count in POINTS if least <= count < processors} | {processors})
    with show.progress("arrangements", sum(count_candidates(pair, count) for count in counts)) as advance:
        lines = ms_by_processors(pair, counts, advance)
    style.save(chart.figure(lines, "forecast from " + _sources(pair)), path)


def _command(plan: DeploymentPlan, models: tuple[str, str], dtype: str, processors: int, cores: bool) -> str:
    """The command that runs a plan where it can be run; the engine chooses the other options."""
    drafters = " ".join(f"--drafter {name}" for name in models[1].split("+"))
    command = f"dsi generate --target {models[0]} {drafters} --algorithm {plan.algorithm}"
    if dtype != DTYPES[0]:
        command += f" --dtype {dtype}"
    if plan.sp > 1:
        command += f" --sp {plan.sp}"
    if plan.spec.lookahead:
        command += f" --lookahead {plan.spec.lookahead}"
    if plan.algorithm == "dsi":
        command += f" --min-draft {plan.spec.min_draft or 0}"
    if plan.spec.tree:
        command += f" --tree {plan.spec.tree}"
    if plan.spec.rule != "match":
        command += f" --rule {plan.spec.rule} --temperature 1"
    return command + (_threads(plan, processors) if cores else _devices(plan))


def _threads(plan: DeploymentPlan, cores: int) -> str:
    """The option for threads, unless an engine would by itself.

    It gives the drafter a core and the targets the rest, and lets servers that take turns use every core if faster.
    """
    usual = {max(1, (cores - 1) // plan.sp), *([cores] if plan.spec.takes_turns else [])}
    return "" if plan.mp in usual else f" --threads {plan.mp}"


def _devices(plan: DeploymentPlan) -> str:
    if plan.mp > 1:
        return "  # with targets that are tensor parallel over GPUs, which dsi does not have yet"
    if plan.sp > 1 and plan.spec.tree:
        return "  # with trees on several GPUs, which dsi does not have yet"
    first = plan.processors - plan.sp
    places = ",".join(f"cuda:{first + i}" for i in range(plan.sp))
    return f" --target-devices {places} --drafter-device cuda:0"


def _equation(pair: PairProfile, processors: int, target_gpus: int) -> dict[str, Any] | None:
    """The plan by Eq. (1), which does not depend on acceptance; None where there is no room for a pair."""
    from dsi.planning import equation_1

    least = min(pair.by_mp)
    if processors < least + pair.drafter_processors:
        return None
    target_ms = round(float(pair.latency.target_ms), 6)
    drafter_ms = round(float(pair.latency.drafter_ms), 6)
    planned = equation_1.plan(target_ms, drafter_ms, processors, target_gpus, pair.drafter_processors)
    return {
        "sp": planned.sp,
        "lookahead": planned.lookahead,
        "gpus_used": planned.gpus_used,
        "gpus_spare": processors - planned.gpus_used,
        "busy_targets": planned.busy,
        "inequality": planned.inequality,
    }


def _sources(pair: PairProfile) -> str:
    return ", ".join(f"{name} {source}" for name, source in pair.sources.items())


def _print_plans(plans: list[DeploymentPlan], pair: PairProfile, cores: bool) -> None:
    from dsi.planning.search import explanation

    several = bool(pair.alternatives)
    heads = ["", "algorithm", "SP", "MP", "cores" if cores else "GPUs", "tokens/s", "ms a token", "why"]
    heads += ["drafter"] * several
    rows = [
        [
            str(place),
            plan.title + (f", {plan.spec.rule}" if plan.spec.rule != "match" else ""),
            str(plan.sp),
            str(plan.mp),
            str(plan.processors),
            f"{plan.tokens_per_second:.1f}",
            f"{plan.ms:.2f}",
            explanation(plan, pair),
            *([plan.drafter] * several),
        ]
        for place, plan in enumerate(plans, 1)
    ]
    show.table(heads, rows)
    rates = "; ".join(
        " ".join([one.drafter] * several) + ", ".join(f" {rule} {rate:.2f}" for rule, rate in one.acceptance.items())
        for one in pair.all
    ).strip()
    print(f"forecast, simulated in virtual time: acceptance {rates}; {_sources(pair)}")


def _print_changes(changes: list[Sensitivity], first: DeploymentPlan) -> None:
    print()
    for change in changes:
        better = change.best
        same = better.layout == first.layout
        then = "and still the best" if same else f"{better.title} (SP {better.sp}, MP {better.mp}) {better.ms:.2f}"
        print(f"with {change.change}: {change.ms:.2f} ms a token; {then}")


def _print_equation(equation: dict[str, Any], processors: int, target_gpus: int, drafter_gpus: int, unit: str) -> None:
    size = f"{target_gpus} {unit}{'s' * (target_gpus > 1)} each"
    print("\nby Eq. (1) of the paper, which keeps targets from waiting and does not ask about acceptance:")
    print(f"SP degree   {equation['sp']} ({size}), and one drafter on {drafter_gpus}")
    print(f"lookahead   {equation['lookahead']}, the smallest that Eq. (1) allows:")
    print(f"            {equation['inequality']}")
    print(f"allocation  {equation['gpus_used']} of {processors} {unit}s, {equation['gpus_spare']} spare")
