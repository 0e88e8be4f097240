"""Options that are derived from the fields of configuration dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dsi.cli.options import OLD_NAMES, Fields, current_name, options


@dataclass(frozen=True)
class Speed:
    target_ms: float | int = field(metadata={"help": "A target forward."})
    jitter: float = field(default=0.0, metadata={"help": "Spread."})
    internal: int = 3

    def __post_init__(self) -> None:
        if self.target_ms <= 0:
            raise ValueError(f"target {self.target_ms} ms: must be above 0")


@dataclass(frozen=True)
class Setup:
    speed: Speed
    models: tuple[str, ...] = field(default=("builtin",), metadata={"help": "Names.", "option": "model"})
    lookahead: int | None = field(default=None, metadata={"help": "Draft tokens."})
    shared_kv: bool = field(default=False, metadata={"help": "One KV cache."})
    rule: str = field(default="match", metadata={"help": "Acceptance rule."})
    path: Path | None = field(default=None, metadata={"help": "Not taken."})


@dataclass(frozen=True)
class Draw:
    rule: str = field(default="match", metadata={"help": "Acceptance rule."})
    seed: int = field(default=0, metadata={"help": "Seed."})


CALLS: list[tuple[str, Setup, Draw]] = []
app = typer.Typer(rich_markup_mode=None, context_settings={"token_normalize_func": current_name})
CHOSEN = Fields(
    without=("path",), auto=("lookahead",), defaults={"target_ms": 20.0}, help={"lookahead": "Or auto, by Eq. (1)."}
)


@app.command()
@options
def show(
    word: Annotated[str, typer.Argument(help="A word.")] = "none", *, setup: Annotated[Setup, CHOSEN], draw: Draw
) -> None:
    CALLS.append((word, setup, draw))


def called(*arguments: str) -> tuple[str, Setup, Draw]:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return CALLS.pop()


def test_options_default_to_the_fields_or_to_what_the_command_says() -> None:
    assert called() == ("none", Setup(Speed(20.0)), Draw())


def test_options_build_nested_configurations() -> None:
    given = "hi --target-ms 4 --jitter 0.5 --model a --model b --lookahead 7 --shared-kv --rule block --seed 9"
    setup = Setup(Speed(4.0, 0.5), ("a", "b"), 7, True, "block")
    assert called(*given.split()) == ("hi", setup, Draw("block", 9))


def test_options_read_auto_as_none() -> None:
    assert called("--lookahead", "auto")[1].lookahead is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--lookahead two", "lookahead 'two': must be a whole number or auto"),
        ("--target-ms 0", "target 0.0 ms: must be above 0"),
    ],
)
def test_options_report_values_that_a_configuration_refuses(given: str, sentence: str) -> None:
    assert str(CliRunner().invoke(app, given.split()).exception) == sentence


def test_options_show_the_help_of_fields_unless_the_command_changes_it() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "A target forward. [default: 20.0]" in shown
    assert "Or auto, by Eq. (1). [default: auto]" in shown
    assert "--shared-kv / --no-shared-kv One KV cache." in shown
    assert "internal" not in shown
    assert "Not taken" not in shown


def test_options_accept_the_names_of_the_last_release_without_showing_them() -> None:
    assert called("--one-cache")[1].shared_kv
    assert "one-cache" not in CliRunner().invoke(app, ["--help"]).output
    assert not OLD_NAMES.keys() & set(OLD_NAMES.values())
