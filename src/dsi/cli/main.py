"""The application `dsi`: its commands, and how errors are reported. Heavy imports wait until they are needed."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from dsi.cli import chat, compare, generate, measure, paper, plan, serve, simulate, timeline
from dsi.cli.options import current_name

app = typer.Typer(
    help="Distributed speculative inference: lossless decoding that never takes turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"token_normalize_func": current_name},
    epilog="Example: dsi simulate --algorithm si,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4",
)
app.command(epilog=generate.EXAMPLE)(generate.generate)
app.command(epilog=chat.EXAMPLE)(chat.chat)
app.command(epilog=compare.EXAMPLE)(compare.compare)
app.command(epilog=serve.EXAMPLE)(serve.serve)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=simulate.EXAMPLE)(simulate.simulate)
app.command(epilog=timeline.EXAMPLE)(timeline.timeline)
app.add_typer(measure.app, name="measure")
app.add_typer(paper.app, name="paper")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake is one sentence and exit status 2, never a traceback."""
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as exit:
        sys.exit(exit.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except Exception as error:
        _refuse(_sentence(error))
    sys.exit(code)


def _sentence(error: Exception) -> str:
    """The message of a parser's or a fleet's error; any other error is a bug, and is raised again."""
    from dsi.fleets.loop import FleetError

    if isinstance(error, FleetError):
        return str(error)
    if not hasattr(error, "format_message"):
        raise error
    return str(error.format_message())


def _refuse(sentence: str) -> NoReturn:
    print("dsi: " + " ".join(sentence.split()), file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def callback(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dsi import __version__

        print(f"dsi {__version__}")
        raise typer.Exit
