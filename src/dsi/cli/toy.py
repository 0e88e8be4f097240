"""What the commands that simulate share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dsi.planning.simulation import SimulationConfig

OPTION_FIELDS = {  # options whose field has another name
    "pieces": "cancel_points",
    "drafter_pieces": "drafter_cancel_points",
    "one_cache": "shared_kv",
    "patience": "min_draft",
    "horizon": "max_lead",
    "spare": "spare_targets",
    "second_hit": "runner_up_acceptance",
    "sure": "no_runner_up_rate",
    "notice_ms": "detection_ms",
    "eager": "thread_pool",
}


def algorithms(text: str) -> list[str]:
    from dsi.core.spec import check_algorithm

    return [check_algorithm(name.strip(), auto=True) for name in text.split(",")]


def numbers(name: str, text: str, least: int) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: must be whole numbers separated by commas") from None
    if min(numbers) < least:
        raise ValueError(f"{name} {min(numbers)}: must be at least {least}")
    return numbers


def setting_of(options: dict[str, Any], **fixed: Any) -> SimulationConfig:
    """The setting that a command's options describe; they have the names of its fields."""
    from dataclasses import fields

    from dsi.core.spec import SpecConfig
    from dsi.planning.latency import LatencyModel
    from dsi.planning.simulation import SimulationConfig

    options = {OPTION_FIELDS.get(name, name): value for name, value in (options | fixed).items()}
    given, latency, spec = (
        {field.name: options[field.name] for field in fields(part) if field.name in options}
        for part in (SimulationConfig, LatencyModel, SpecConfig)
    )
    for name in ("algorithm", "drafters"):  # several algorithms, and how many drafters
        spec.pop(name, None)
    return SimulationConfig(LatencyModel(**latency), spec=SpecConfig(**spec), **given)


def profiled(context: typer.Context, path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those that were not given taken from a profile."""
    if path is None:
        return options
    from dsi.experiments.profile import NUMBERS, Profile

    measured = Profile.load(path)
    free = [name for name in NUMBERS if name in options and not given(context, name)]
    found = options | {name: measured.number(name, path) for name in free}
    for role in ("target", "drafter"):
        if f"{role}_ttft_ms" in free:  # a first forward that seemed faster than a later one was only lucky
            found[f"{role}_ttft_ms"] = max(found[f"{role}_ttft_ms"], found[f"{role}_ms"])
    return found


def given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
