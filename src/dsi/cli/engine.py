"""The engine that a command's options describe."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from dsi.cli import output as show
from dsi.cli.options import Fields
from dsi.core.messages import Sampling
from dsi.core.spec import SpecConfig
from dsi.engine.config import EngineConfig

if TYPE_CHECKING:
    from dsi.engine.engine import Engine

SPEC = Fields(
    only=("algorithm", "lookahead", "min_draft"),
    auto=("lookahead", "min_draft"),
    help={
        "lookahead": "Draft tokens per verification, or auto: measured, by Eq. (1).",
        "min_draft": "Draft tokens to have before a new root is verified, or auto.",
    },
)
SpecOptions = Annotated[SpecConfig, SPEC]


def load_engine(config: EngineConfig, spec: SpecConfig) -> Engine:
    """Load an engine, with a status line on a terminal, and report how its models were prepared."""
    with show.working(f"loading {config.target} and {', '.join(config.drafter)}"):
        from dsi.engine.engine import Engine

        engine = Engine.load(config, spec=spec)
    for warning in engine.deployment.warnings:
        print(f"dsi: {warning}", file=sys.stderr)
    if spec.algorithm == "auto" and engine.deployment.plans:  # on cores, auto decides during a request
        print(show.plans(engine.deployment.plans.values()), file=sys.stderr)
    return engine


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `Engine.stream` and `Engine.generate` for these sampling parameters."""
    return {field.name: getattr(sampling, field.name) for field in fields(sampling) if field.name != "candidates"}
