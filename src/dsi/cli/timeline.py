"""`dsi timeline`: draw which server computed what, when."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsi.cli import output as show
from dsi.cli.options import Algorithms, Fields, Json, RealTime, Seed, algorithms, options, whole_numbers
from dsi.planning.simulation import SimulationConfig

if TYPE_CHECKING:
    from dsi.experiments.records import Record

EXAMPLE = "Example: dsi timeline --algorithm si,dsi --acceptance 0.9 --out figure.svg --out trace.json"
SIMULATION = Fields(
    without=(
        "algorithm",
        "lookahead",
        "requests",
        "drafter_copies",
        "nodes",
        "network_jitter",
        "failures_per_hour",
        "repair_s",
        "detection_ms",
    ),
    defaults={"target_ms": 7.0, "drafter_ms": 1.0, "acceptance": 0.8, "sp": 7, "tokens": 16, "min_draft": 0},
)


@options
def timeline(
    algorithm: Algorithms = "nonsi,si,dsi",
    lookahead: Annotated[str, typer.Option(help="Draft tokens per verification, or auto (see simulate).")] = "auto",
    seed: Seed = 0,
    *,
    simulation: Annotated[SimulationConfig, SIMULATION],
    real_time: RealTime = False,
    trace: Annotated[
        Path | None, typer.Option(help="Draw a trace instead: what `dsi serve` gives at /v1/traces/ID.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Also write a picture (.svg, .png) or a Chrome/Perfetto trace (.json); repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw who computed what, when: Figure 1 of the paper for any setting."""
    paths = [show.writable(path) for path in out or []]
    if trace is None:
        simulation = simulation.with_spec(lookahead=_one_lookahead(lookahead))
        records = _simulated(simulation, algorithms(algorithm), seed, real_time)
    else:
        records = _traced(trace)
    for path in paths:
        _save(records, path)
    show.timelines(records, paths, json)


def _simulated(simulation: SimulationConfig, names: list[str], seed: int, real_time: bool) -> list[Record]:
    from dsi.experiments.records import record

    records = []
    with show.progress("algorithms", len(names)) as advance:
        for name in names:
            records.append(record(simulation, name, seed, real_time))
            advance()
    return records


def _traced(path: Path) -> list[Record]:
    """The runs in a trace that have a token."""
    from dsi.plot.trace import read

    try:
        records = [record for record in read(jsonlib.loads(path.read_text())) if record.times_ms]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({(error.strerror or '').lower()})") from error
    except ValueError as error:
        reason = "is not JSON" if isinstance(error, jsonlib.JSONDecodeError) else str(error)
        raise ValueError(f"{path}: {reason}") from error
    if not records:
        raise ValueError(f"{path}: is a trace without a token")
    return records


def _one_lookahead(text: str) -> int | None:
    if text == "auto":
        return None
    lookaheads = whole_numbers("lookahead", text, 1)
    if len(lookaheads) > 1:
        raise ValueError(f"lookahead {text!r}: a timeline shows one run, so must be one number or auto")
    return lookaheads[0]


def _save(records: list[Record], path: Path) -> None:
    if path.suffix == ".json":
        from dsi.plot.trace import trace

        path.write_text(jsonlib.dumps(trace(records)))
    else:
        from dsi.plot import style
        from dsi.plot.timeline import figure

        style.save(figure(records), path)
