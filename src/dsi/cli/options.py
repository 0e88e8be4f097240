"""Options derived from the fields of configuration dataclasses, so that each option is written once.

A command declares parameters of configuration types, as `engine: EngineConfig`. `@options` replaces each of them
by one option for every field that has `metadata={"help": ...}`, builds the configurations from the values, and
calls the command with them. A field that two configurations share is one option. The metadata `option` is a
field's name on the command line where it differs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

OLD_NAMES = {  # kept for one release
    "patience": "min-draft",
    "horizon": "max-lead",
    "pieces": "cancel-points",
    "one-cache": "shared-kv",
    "no-one-cache": "no-shared-kv",
    "eager": "thread-pool",
    "no-eager": "no-thread-pool",
    "waited": "real-time",
    "waited-repeats": "real-time-repeats",
    "second-hit": "runner-up-acceptance",
    "scales": "parallel-fraction",
    "notice-ms": "detection-ms",
    "target-needs": "target-resources",
    "drafter-needs": "drafter-resources",
}

GIVEN_UP = ("branches", "spare-targets", "spare", "no-runner-up-rate", "sure")  # refused by name for one release


def current_name(name: str) -> str:
    """The name of an option, for its name or the one it had in the last release."""
    if name in GIVEN_UP:
        raise ValueError(f"--{name}: is gone with runner-ups for spare targets; use --tree")
    return OLD_NAMES.get(name, name)


@dataclasses.dataclass(frozen=True)
class Fields:
    """Which fields of a configuration a command takes, and what it changes about them."""

    only: Collection[str] = ()  # empty: all
    without: Collection[str] = ()
    auto: Collection[str] = ()  # the word auto stands for None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    complete: Callable[[dict[str, Any]], None] | None = None  # fills in what the user left open
    help: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name not in self.without and (not self.only or name in self.only)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Derive the options of a command from its configurations, and call it with them."""
    hints = get_type_hints(command, include_extras=True)
    configs: dict[str, tuple[type, Fields]] = {}
    parameters: dict[str, Parameter] = {}
    for name, parameter in signature(command).parameters.items():
        config, *rest = get_args(hints[name]) or (hints[name],)
        if isinstance(config, type) and dataclasses.is_dataclass(config):
            configs[name] = config, next((part for part in rest if isinstance(part, Fields)), Fields())
            for derived in _parameters(*configs[name]):
                parameters.setdefault(derived.name, derived)
        else:
            parameters[name] = parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)

    @wraps(command)
    def parsed(**values: Any) -> None:
        built = {name: _build(config, chosen, values) for name, (config, chosen) in configs.items()}
        own = {name: value for name, value in values.items() if name in hints}
        command(**own, **built)

    parsed.__signature__ = signature(command).replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    parsed.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return parsed


def option(config: Any, name: str, help: str | None = None) -> Any:
    """The option of one field, for a command that takes it by itself."""
    [field] = [field for field in dataclasses.fields(config) if field.name == name]
    return _option(field, Fields(help={} if help is None else {name: help}))


def _parameters(config: Any, chosen: Fields) -> Iterator[Parameter]:
    for field, kind in _taken(config, chosen):
        if dataclasses.is_dataclass(kind):
            yield from _parameters(kind, chosen)
            continue
        default = chosen.defaults.get(field.name, None if field.default is dataclasses.MISSING else field.default)
        if default is None and field.name in chosen.auto:
            default = "auto"
        parsed = str if field.name in chosen.auto else _parsed_as(kind)
        if field.metadata.get("repeatable"):
            default, parsed = (default,), list[parsed]  # type: ignore[valid-type]
        annotation = Annotated[parsed, _option(field, chosen)]  # type: ignore[valid-type]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build(config: Any, chosen: Fields, values: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for field, kind in _taken(config, chosen):
        value = _build(kind, chosen, values) if dataclasses.is_dataclass(kind) else values[field.name]
        if field.name in chosen.auto:
            value = number_or_auto(field.name.replace("_", " "), value)
        arguments[field.name] = tuple(value) if isinstance(value, list) else value
    if chosen.complete is not None:
        chosen.complete(arguments)
    return config(**arguments)


def _taken(config: Any, chosen: Fields) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields that the command takes, and the configurations that contain some, each with its type."""
    scope = vars(sys.modules[config.__module__])
    for field in dataclasses.fields(config):
        if "help" in field.metadata and field.name in chosen:
            yield field, get_type_hints(SimpleNamespace(__annotations__={"type": field.type}), scope)["type"]
            continue
        nested = scope.get(str(field.type))
        if isinstance(nested, type) and dataclasses.is_dataclass(nested) and any(_taken(nested, chosen)):
            yield field, nested


def _parsed_as(kind: Any) -> Any:
    """The type that typer parses for a field: a list for a tuple, a float for any kind of number."""
    if get_origin(kind) is tuple:
        return list[get_args(kind)[0]]  # type: ignore[misc]
    if float in get_args(kind):
        return float | None if NoneType in get_args(kind) else float
    return kind


def _option(field: dataclasses.Field[Any], chosen: Fields) -> Any:
    name = field.metadata.get("option", field.name.replace("_", "-"))
    flags = f"--{name}/--no-{name}" if str(field.type).startswith("bool") else f"--{name}"
    return typer.Option(flags, help=chosen.help.get(field.name, field.metadata["help"]))


def given(context: typer.Context) -> dict[str, Any]:
    """The options that the user gave, without those left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def number_or_auto(name: str, text: str) -> int | None:
    """Parse a whole number, or auto as None."""
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{name} {text!r}: must be a whole number or auto") from None


def whole_numbers(name: str, text: str, least: int) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: must be whole numbers separated by commas") from None
    if min(numbers) < least:
        raise ValueError(f"{name} {min(numbers)}: must be at least {least}")
    return numbers


def read_text(file: Path) -> str:
    """Read a file of UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{file}: is not UTF-8 text (byte 0x{byte:02x} at position {error.start})") from None


def algorithms(text: str) -> list[str]:
    """Parse names of algorithms separated by commas."""
    from dsi.core.spec import check_algorithm

    return [check_algorithm(name.strip(), auto=True) for name in text.split(",")]


Algorithms = Annotated[str, typer.Option("--algorithm", help="nonsi, si, pearl, dsi or auto; several, with commas.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
Seed = Annotated[int, typer.Option(help="Same seed, same texts and drafts.")]
RealTime = Annotated[bool, typer.Option("--real-time", help="Real threads that wait instead of computing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
