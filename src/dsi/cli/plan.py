"""dsi plan: what to do with so many processors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsi.cli import output as show
from dsi.cli.options import Dtype, Json, Profile
from dsi.engine.config import EngineConfig

if TYPE_CHECKING:
    from dsi.planning.search import DeploymentPlan, PairProfile, Sensitivity

EXAMPLE = "Example: dsi plan --target builtin --drafter builtin --cores 2"
ACCEPTANCE = 0.8  # taken where nobody says
CANCEL_POINTS = 8  # of a forward that was not measured here
POINTS = (*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1000)  # of the picture


def plan(
    target: Annotated[
        str | None, typer.Option(help="Measure this model (a folder, a name on the hub, or builtin).")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="With this smaller one, likewise; repeatable.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Processors in all.")] = None,
    cores: Annotated[
        int | None, typer.Option(help="Instead: cores of this machine, for models that are measured here.")
    ] = None,
    profile: Profile = None,
    target_ms: Annotated[float | None, typer.Option(help="A target forward, in milliseconds.")] = None,
    drafter_ms: Annotated[float | None, typer.Option(help="A drafter forward, in milliseconds.")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="How often a guess is right: 0 to 1; 0.8 where nobody says.")
    ] = None,
    contention: Annotated[
        float | None, typer.Option(help="By what share each other busy target slows one down.")
    ] = None,
    second_hit: Annotated[
        float, typer.Option(help="How often a second guess is right where the first is wrong: 0 to 1.")
    ] = 0.0,
    target_gpus: Annotated[int | None, typer.Option(help="GPUs that one target needs; 1 by itself.")] = None,
    drafter_gpus: Annotated[int | None, typer.Option(help="GPUs that the drafter needs; 1 by itself.")] = None,
    scales: Annotated[
        float | None,
        typer.Option(help="The share of a target forward that scales with its GPUs: 0 to 1; 0.8 by itself."),
    ] = None,
    dtype: Dtype = "float32",
    plot: Annotated[
        Path | None, typer.Option(help="Draw expected latency by number of processors (.svg, .png).")
    ] = None,
    json: Json = False,
) -> None:
    """What is fastest with these processors: plain decoding, SI, PEARL or DSI, and in which arrangement.

    The pair is measured here (--target, --drafter, --cores), or its figures are given or read from a file of
    `dsi measure`. The best five, why, what would change them, and the command to run the first.
    """
    from dsi.planning.equation_1 import SCALES
    from dsi.planning.search import SHOWN, count_candidates, search_processors, sensitivities

    given = {"target_ms": target_ms, "drafter_ms": drafter_ms, "acceptance": acceptance}
    given |= {"contention": contention}
    processors = counted(gpus, cores)
    check_spread(cores, {"target-gpus": target_gpus, "drafter-gpus": drafter_gpus, "scales": scales})
    target_gpus, drafter_gpus = (1 if each is None else each for each in (target_gpus, drafter_gpus))
    scales = SCALES if scales is None else scales
    check(given | {"second hit": second_hit, "scales": scales}, target_gpus, drafter_gpus)
    if plot is not None:
        show.writable(plot, show.PICTURES)
    evidence = gathered(target, drafter, cores, profile, given, dtype)
    if cores is None:
        evidence = spread_out(evidence, processors, target_gpus, drafter_gpus, scales)
    evidence = evidence.for_all(runner_up_acceptance=second_hit)
    with show.progress("arrangements", 5 * count_candidates(evidence, processors)) as advance:
        found = search_processors(evidence, processors, advance)
        changes = sensitivities(evidence, found[0], processors, advance)
    if plot is not None:
        draw(evidence, processors, plot)
    unnamed = ("builtin", "builtin") if cores is not None else ("TARGET", "DRAFTER")
    models = (target or unnamed[0], found[0].drafter or (drafter or [unnamed[1]])[0])
    first = command(found[0], models, processors, cores is not None)
    rule = equation(evidence, processors, target_gpus)
    if json:
        show.document(
            **(rule or {}),
            label="forecast",
            evidence=evidence.json(),
            offers=[offer.json() for offer in found[:SHOWN]],
            sensitivity=[asked(change) for change in changes],
            command=first,
        )
        return
    print_offers(found[:SHOWN], evidence, cores is not None)
    print_changes(changes, found[0])
    print(f"\nto run the first: {first}")
    if rule:
        print_equation(rule, processors, target_gpus, drafter_gpus, "GPU" if cores is None else "core")
    if plot is not None:
        print(f"wrote {plot}")


def counted(gpus: int | None, cores: int | None) -> int:
    if (gpus is None) == (cores is None):
        raise ValueError("processors: give --gpus, or --cores of this machine")
    return gpus if gpus is not None else cores or 0


def check_spread(cores: int | None, spread: dict[str, float | None]) -> None:
    said = [f"--{name} {value:g}" for name, value in spread.items() if value is not None]
    if cores is not None and said:
        raise ValueError(f"cores {cores}: are measured as they are; {', '.join(said)} would be for --gpus")


def check(shares: dict[str, float | None], target_gpus: int, drafter_gpus: int) -> None:
    from dsi.planning.equation_1 import check_latencies

    known = [1.0 if shares[name] is None else shares[name] or 0.0 for name in ("target_ms", "drafter_ms")]
    check_latencies(*known)
    for name in ("acceptance", "second hit", "scales"):
        value = shares[name]
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} {value:g}: must be between 0 and 1")
    if target_gpus < 1 or drafter_gpus < 1:
        raise ValueError(f"{target_gpus} GPUs per target, {drafter_gpus} per drafter: each needs at least 1")


def gathered(
    target: str | None,
    drafter: list[str] | None,
    cores: int | None,
    profile: Path | None,
    given: dict[str, float | None],
    dtype: str,
) -> PairProfile:
    """What is given comes first, then a profile, then what is measured here."""
    if cores is not None:
        if profile is not None or given["target_ms"] is not None:
            raise ValueError(f"cores {cores}: are measured here; with given figures say --gpus {cores}")
        return overridden(here(target or "builtin", drafter or ["builtin"], cores, dtype), given)
    if profile is None and (given["target_ms"] is None or given["drafter_ms"] is None):
        if target is None:
            missing = "target-ms" if given["target_ms"] is None else "drafter-ms"
            raise ValueError(f"--{missing} is missing: give it, or a --profile that has it")
        return overridden(here(target, drafter or ["builtin"], 1, dtype), given)
    return overridden(told(profile, given), given)


def here(target: str, drafters: list[str], cores: int, dtype: str) -> PairProfile:
    config = EngineConfig(target, tuple(drafters), dtype=dtype)
    config.check_measurable()  # before anything that takes seconds
    with show.working(f"loading {target} and {', '.join(drafters)}"):
        from dsi.engine.profile_host import count_steps, profile_host
    with show.progress("measurements", count_steps(cores, len(drafters))) as advance:
        return profile_host(config, cores, advance)


def told(path: Path | None, given: dict[str, float | None]) -> PairProfile:
    """From a profile, or from numbers alone."""
    from dsi.planning.latency import LatencyModel
    from dsi.planning.search import PairProfile

    if path is None:
        target_ms, drafter_ms = float(given["target_ms"] or 0), float(given["drafter_ms"] or 0)
        latency = LatencyModel(target_ms, drafter_ms, by_width=((1, target_ms),), cancel_points=CANCEL_POINTS)
        return PairProfile({1: latency}, {"match": ACCEPTANCE}, sources=dict.fromkeys(("target", "drafter"), "given"))
    from dsi.experiments.profile import Profile

    known = Profile.load(path)
    sources = dict.fromkeys(("target", "drafter"), "measured")
    widths = ((1, given["target_ms"]),) if given["target_ms"] is not None else known.by_width(path)
    fast = given["drafter_ms"] if given["drafter_ms"] is not None else known.number("drafter_ms", path)
    latency = LatencyModel(widths[0][1], fast, by_width=widths, cancel_points=CANCEL_POINTS)
    if not {"acceptance", "rules"} & known.parts.keys():
        return PairProfile({1: latency}, {"match": ACCEPTANCE}, sources=sources)
    return PairProfile({1: latency}, known.acceptance_by_rule(path), sources=sources | {"acceptance": "measured"})


def overridden(evidence: PairProfile, given: dict[str, float | None]) -> PairProfile:
    rate, crowd = given["acceptance"], given["contention"]
    sources = dict(evidence.sources)
    if rate is not None:
        evidence, sources["acceptance"] = evidence.for_all(acceptance={"match": rate}), "given"
    if crowd is not None:
        evidence, sources["contention"] = evidence.with_latency(contention=crowd), "given"
    return replace(evidence, sources={"acceptance": "assumed", "contention": "assumed"} | sources)


def spread_out(
    evidence: PairProfile, processors: int, target_gpus: int, drafter_gpus: int, scales: float
) -> PairProfile:
    """How a target scales over several processors is a parameter where it is not measured."""
    sources = {**evidence.sources, "mp": f"{scales:g} of a forward scales, assumed"}
    split = evidence.split(target_gpus, max(processors, target_gpus), scales)
    others = tuple(replace(each, drafter_processors=drafter_gpus * each.drafters) for each in split.alternatives)
    return replace(split, drafter_processors=drafter_gpus, sources=sources, alternatives=others)


def draw(evidence: PairProfile, processors: int, path: Path) -> None:
    from dsi.planning.search import count_candidates, ms_by_processors
    from dsi.plot.processors import save

    least = min(evidence.by_mp)
    counts = sorted({each for each in POINTS if least <= each < processors} | {processors})
    with show.progress("arrangements", sum(count_candidates(evidence, each) for each in counts)) as advance:
        lines = ms_by_processors(evidence, counts, advance)
    save(lines, path, "forecast from " + said_sources(evidence))


def command(offer: DeploymentPlan, models: tuple[str, str], processors: int, cores: bool) -> str:
    """What runs it, where it can be run; the rest of the options are found by `auto`."""
    drafters = " ".join(f"--drafter {name}" for name in models[1].split("+"))
    said = f"dsi generate --target {models[0]} {drafters} --algorithm {offer.algorithm}"
    if offer.sp > 1:
        said += f" --sp {offer.sp}"
    if offer.spec.lookahead:
        said += f" --lookahead {offer.spec.lookahead}"
    if offer.algorithm == "dsi":
        said += f" --patience {offer.spec.min_draft or 0}"
    if offer.spec.rule != "match":
        said += f" --rule {offer.spec.rule} --temperature 1"
    return said + (threads(offer, processors) if cores else devices(offer))


def threads(offer: DeploymentPlan, cores: int) -> str:
    """By itself, an engine gives the drafter a core and the targets the rest."""
    usual = max(1, (cores - 1) // offer.sp)
    alone = offer.algorithm in ("nonsi", "si")
    return f" --threads {offer.mp}" if alone or offer.mp != usual else ""


def devices(offer: DeploymentPlan) -> str:
    if offer.mp > 1:
        return "  # with targets that are tensor parallel over GPUs, which dsi does not have yet"
    first = offer.processors - offer.sp
    places = ",".join(f"cuda:{first + i}" for i in range(offer.sp))
    return f" --target-devices {places} --drafter-device cuda:0"


def equation(evidence: PairProfile, processors: int, target_gpus: int) -> dict[str, Any] | None:
    """The paper's own answer, which knows nothing of acceptance; None where there is no room for a pair."""
    from dsi.planning import equation_1 as planner

    least = min(evidence.by_mp)
    if processors < least + evidence.drafter_processors:
        return None
    slow = round(float(evidence.latency.target_ms), 6)
    fast = round(float(evidence.latency.drafter_ms), 6)
    found = planner.plan(slow, fast, processors, target_gpus, evidence.drafter_processors)
    return {
        "sp": found.sp,
        "lookahead": found.lookahead,
        "gpus_used": found.gpus_used,
        "gpus_spare": processors - found.gpus_used,
        "busy_targets": found.busy,
        "inequality": found.inequality,
    }


def asked(change: Sensitivity) -> dict[str, Any]:
    return {"what": change.change, "ms": change.ms, "best": change.best.json()}


def said_sources(evidence: PairProfile) -> str:
    return ", ".join(f"{name} {source}" for name, source in evidence.sources.items())


def print_offers(found: list[DeploymentPlan], evidence: PairProfile, cores: bool) -> None:
    from dsi.planning.search import explanation

    several = bool(evidence.alternatives)
    heads = ["", "algorithm", "SP", "MP", "cores" if cores else "GPUs", "tokens/s", "ms a token", "why"]
    heads += ["drafter"] * several
    rows = [
        [
            str(place),
            offer.title + (f", {offer.spec.rule}" if offer.spec.rule != "match" else ""),
            str(offer.sp),
            str(offer.mp),
            str(offer.processors),
            f"{offer.tokens_per_second:.1f}",
            f"{offer.ms:.2f}",
            explanation(offer, evidence),
            *([offer.drafter] * several),
        ]
        for place, offer in enumerate(found, 1)
    ]
    show.table(heads, rows)
    rates = "; ".join(
        " ".join([each.drafter] * several) + ", ".join(f" {rule} {rate:.2f}" for rule, rate in each.acceptance.items())
        for each in evidence.all
    ).strip()
    print(f"forecast, rehearsed in virtual time: acceptance {rates}; {said_sources(evidence)}")


def print_changes(changes: list[Sensitivity], first: DeploymentPlan) -> None:
    print()
    for change in changes:
        better = change.best
        same = better.layout == first.layout
        then = "and still the best" if same else f"{better.title} (SP {better.sp}, MP {better.mp}) {better.ms:.2f}"
        print(f"with {change.change}: {change.ms:.2f} ms a token; {then}")


def print_equation(rule: dict[str, Any], processors: int, target_gpus: int, drafter_gpus: int, unit: str) -> None:
    each = f"{target_gpus} {unit}{'s' * (target_gpus > 1)} each"
    print("\nby Eq. (1) of the paper, which keeps targets from waiting and does not ask about acceptance:")
    print(f"SP degree   {rule['sp']} ({each}), and one drafter on {drafter_gpus}")
    print(f"lookahead   {rule['lookahead']}, the smallest that Eq. (1) allows:")
    print(f"            {rule['inequality']}")
    print(f"allocation  {rule['gpus_used']} of {processors} {unit}s, {rule['gpus_spare']} spare")
