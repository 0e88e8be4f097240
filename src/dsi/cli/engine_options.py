"""From the options of a command to an engine."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dsi.cli import output as show
from dsi.core.messages import Sampling

if TYPE_CHECKING:
    from dsi.engine.engine import Engine


def load_engine(options: dict[str, Any], **more: Any) -> Engine:
    """Loading takes seconds: said on a terminal, and gone when it is done."""
    from rich.console import Console

    names = (
        "sp",
        "target_mp",
        "algorithm",
        "lookahead",
        "patience",
        "dtype",
        "threads",
        "target_devices",
        "drafter_device",
        "vocab",
        "fleet",
        "hang_seconds",
        "start_seconds",
    )
    drafters = options["drafter"] or ["builtin"]
    check_sampling(options)
    with Console(stderr=True).status(f"loading {options['target']} and {', '.join(drafters)}"):
        from dsi.engine.engine import Engine

        chosen = {name: options[name] for name in names} | needs_of(options) | more
        engine = Engine.load(options["target"], drafters, **chosen)
    for warning in engine.deployment.warnings:
        print(f"dsi: {warning}", file=sys.stderr)
    if options["algorithm"] == "auto" and engine.deployment.plans:  # on cores, it chooses on the way
        print(show.choices(engine.deployment.plans.values()), file=sys.stderr)
    return engine


def check_sampling(options: dict[str, Any]) -> None:
    """Before anything that takes seconds."""
    Sampling(**{each.name: options[each.name] for each in fields(Sampling) if each.name in options})


def needs_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the servers ask of the machines of a cluster, by role."""
    given = {"target": options["target_needs"], "drafter": options["drafter_needs"]}
    asked = {role: text for role, text in given.items() if text is not None}
    if asked and options["fleet"] is None:
        [(role, text), *_] = asked.items()
        raise ValueError(f"{role} resources {text!r}: are for --fleet ray")
    if not asked:
        return {}
    from dsi.fleets.ray_actors import parse_resources

    return {"needs": {role: parse_resources(text) for role, text in asked.items()}}
