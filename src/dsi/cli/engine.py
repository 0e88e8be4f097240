"""The engine that a command's options describe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from dsi.cli import output as show
from dsi.cli.options import Fields
from dsi.core.messages import TARGET, Sampling
from dsi.core.spec import AUTO, SpecConfig
from dsi.engine.config import EngineConfig, default_algorithm
from dsi.models.cpu.compiler import start_compiling
from dsi.models.names import BUILTIN, model_path
from dsi.models.process_utils import freeze_objects

if TYPE_CHECKING:
    from dsi.core.request import Completion
    from dsi.engine.deployment import Deployment
    from dsi.engine.engine import Engine
    from dsi.fleets.memory import MemoryUse

REPORTED_MIB = 1000  # memory from which a line reports it: half of it is torch and transformers


def _choose_algorithm(spec: dict[str, Any]) -> None:
    """Take numbers without an algorithm as DSI's: `auto`, the default, finds its own."""
    if spec["algorithm"] is None:
        spec["algorithm"] = default_algorithm(AUTO, spec["lookahead"], spec["min_draft"], spec["tree"] or None)


SPEC = Fields(
    only=("algorithm", "lookahead", "min_draft", "tree"),
    auto=("lookahead", "min_draft"),
    defaults={"algorithm": None},
    complete=_choose_algorithm,
    help={
        "algorithm": "nonsi, si, pearl, dsi or auto, the default, which learns what pays; the text is the same.",
        "lookahead": "Draft tokens per verification, or auto: measured, by Eq. (1).",
        "min_draft": "Draft tokens to have before a new root is verified, or auto.",
    },
)
SpecOptions = Annotated[SpecConfig, SPEC]


def load_engine(config: EngineConfig, spec: SpecConfig) -> Engine:
    """Load an engine, show what is being done, and report how its models were prepared."""
    if config.target_devices is None and config.local_models:
        start_compiling()  # while torch is imported
    loading = f"loading {config.target} and {', '.join(config.drafter)}"
    with show.working(loading, quiet=config.target == BUILTIN) as status:
        from dsi.engine.engine import Engine

        engine = Engine.load(config, spec=spec, status=status)
    freeze_objects()
    if (memory := engine_memory(engine)) and memory.total > REPORTED_MIB:
        print(f"dsi: memory: {memory}", file=sys.stderr)
    for warning in engine.deployment.warnings:
        print(f"dsi: {warning}", file=sys.stderr)
    if engine.algorithm == AUTO and engine.deployment.plans:  # on cores, auto decides during a request
        print(show.plans(engine.deployment.plans.values()), file=sys.stderr)
    return engine


def engine_memory(engine: Engine) -> MemoryUse | None:
    """What the servers and this process take; None for servers that are not its children."""
    from dsi.fleets.memory import memory_use
    from dsi.fleets.processes import ProcessFleet

    return memory_use(engine.fleet.worker_pids) if isinstance(engine.fleet, ProcessFleet) else None


def text_document(engine: Engine, spec: SpecConfig, completion: Completion) -> dict[str, Any]:
    """The JSON document of one generated text; the engine must still be running."""
    from dsi.engine.explain import explain

    memory = engine_memory(engine)
    return {
        "text": completion.text,
        "algorithm": spec.algorithm,
        **show.figures(completion),
        "configuration": explain(engine.deployment, spec, completion),
        "memory_mib": memory and memory.json(),
    }


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `Engine.stream` and `Engine.generate`; the repetition penalty is left to the engine."""
    names = [field.name for field in fields(sampling) if "help" in field.metadata]
    return {name: getattr(sampling, name) for name in names if name != "repetition_penalty"}


def generation_arguments(
    config: EngineConfig, sampling: Sampling, max_new_tokens: int, given: Collection[str]
) -> dict[str, Any]:
    """The arguments of `Engine.stream`: options that were given, then the target's generation configuration."""
    defaults: dict[str, Any] = {}
    if not config.target_endpoints:  # whose model's folder may be on another machine
        from dsi.engine.generation_config import ignored_fields, load_generation_config, request_defaults

        stored = load_generation_config(model_path(config.target, TARGET))
        defaults = {name: value for name, value in request_defaults(stored).items() if name not in given}
        has_limit = "max_new_tokens" in {*given, *defaults}
        _report_ignored(config, ignored_fields(stored, config, has_limit))
    penalty = {"repetition_penalty": sampling.repetition_penalty} if "repetition_penalty" in given else {}
    return {"max_new_tokens": max_new_tokens, **sampling_arguments(sampling), **penalty, **defaults}


def report_ignored_defaults(config: EngineConfig) -> None:
    """Say on stderr what a command ignores whose requests have defaults of their own."""
    if config.target_endpoints:
        return
    from dsi.engine.generation_config import ignored_fields, load_generation_config, request_defaults

    stored = load_generation_config(model_path(config.target, TARGET))
    _report_ignored(config, [*request_defaults(stored), *ignored_fields(stored, config, has_limit=True)])


def _report_ignored(config: EngineConfig, ignored: Sequence[str]) -> None:
    if ignored:
        print(f"dsi: {config.target}: its generation_config is not honoured in {', '.join(ignored)}", file=sys.stderr)


def report_contexts(engine: Engine, spec: SpecConfig, completion: Completion, max_new_tokens: int) -> None:
    """Say on stderr where a text came to the end of a model's context."""
    for line in context_notes(engine.deployment, spec, completion, max_new_tokens):
        print(f"dsi: {line}", file=sys.stderr)


def context_notes(
    deployment: Deployment, spec: SpecConfig, completion: Completion, max_new_tokens: int
) -> Iterator[str]:
    if spec.speculates:
        for name, context in deployment.drafter_contexts.items():
            after = max(0, context + 1 - len(completion.prompt))  # tokens that it could draft
            if context and after < len(completion.tokens):
                yield f"the text goes on without the {name} after {after} tokens, at its context of {context}"
    if completion.finish_reason == "length" and len(completion.tokens) < max_new_tokens:
        yield f"the text ends at the target's context of {deployment.context} tokens"
