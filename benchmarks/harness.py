"""What all benchmarks share: arguments, interleaved runs, ratios inside one run, result files, and tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn, TypeVar

from dsi.models.host import processor_name

Input = TypeVar("Input")
Result = TypeVar("Result")
Name = TypeVar("Name")

RESULTS = Path(__file__).parent / "results"


class Parser(argparse.ArgumentParser):
    """A parser that reports bad input in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def arguments(description: str | None, example: str = "", **numbers: int) -> Parser:
    """Return a parser with `--json`, `--out`, and an integer option of at least 1 for each of `numbers`."""
    program = Path(sys.argv[0]).name
    parser = Parser(
        prog=program,
        description=description,
        epilog=f"example: python benchmarks/{program} {example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in numbers.items():
        help = f"default: {default}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--out", type=writable, metavar="FILE", help="also write the document to this file")
    return parser


def positive(text: str) -> int:
    return _at_least(1, int(text))


def count(text: str) -> int:
    """Parse a number of runs that may be 0."""
    return _at_least(0, int(text))


def _at_least(least: int, number: int) -> int:
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} must be at least {least}")
    return number


def share(text: str) -> float:
    """Parse a number between 0 and 1."""
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{number:g} must be between 0 and 1")
    return number


def writable(text: str) -> Path:
    """Parse a path in a folder that exists."""
    if not (path := Path(text)).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    return path


def names(*allowed: str) -> Callable[[str], list[str]]:
    """Parse a comma-separated selection of these names."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(allowed)}")
        return text.split(",")

    return parse


def interleave(
    contenders: Mapping[Name, Callable[[Input], Result]],
    inputs: Sequence[Input],
    repeats: int = 1,
    warm_up: int = 0,
    agree: Callable[[Result], object] | None = None,
    quiet: bool = False,
) -> dict[Name, list[Result]]:
    """Run every contender on an input before the next input, so that a noisy moment affects all of them.

    The order is reversed from one input to the next, so that none always runs first. The
    first `warm_up` rounds are not counted. Contenders that disagree about an input end the benchmark.
    """
    results: dict[Name, list[Result]] = {name: [] for name in contenders}
    rounds = [(repeat >= 0, item) for repeat in range(-warm_up, repeats) for item in inputs]
    for i, (counts, item) in enumerate(rounds if quiet else tracked(rounds, len(rounds), "rounds")):
        row = {name: contenders[name](item) for name in list(contenders)[:: -1 if i % 2 else 1]}
        if agree and len({agree(result) for result in row.values()}) > 1:
            fail(f"input {item!r}: different results { ({name: agree(row[name]) for name in row}) }")
        for name, result in row.items() if counts else ():
            results[name].append(result)
    return results


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Divide runs that were side by side."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def spread(values: Sequence[float], digits: int) -> str:
    """Format a median with its quartiles."""
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return f"{middle} ({low} to {high})"


def extremes(values: Sequence[float], digits: int = 2) -> str:
    """Format a median with the least and the greatest value."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def progress(done: int, total: int, what: str) -> None:
    print(f"\r{done} of {total} {what}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def tracked(results: Iterable[Result], total: int, what: str) -> Iterator[Result]:
    """Pass results on and report how many were finished."""
    for done, result in enumerate(results, 1):
        yield result
        progress(done, total, what)


def log(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def fail(reason: str) -> NoReturn:
    """End with exit status 1: the benchmark ran, and something did not hold."""
    raise SystemExit(f"{Path(sys.argv[0]).name}: {reason}")


def machine() -> dict[str, Any]:
    """Describe where a result comes from."""
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    return facts | {name: _version(name) for name in ("torch", "transformers", "numpy")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(options: argparse.Namespace, label: str, results: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print the tables or one JSON document, and write the document where `--out` says."""
    document = save(options, label, results)
    if options.json:
        print(json.dumps(document, default=str))
    else:
        print(*lines, sep="\n")


def save(options: argparse.Namespace, label: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Write the document where `--out` says: what there is of it so far."""
    document = {"label": label, "machine": machine(), **results}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return document


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lay out columns: the first flush left, the others flush right."""
    cells = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        columns = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        yield "  ".join(columns).rstrip()


def markdown(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lay out a table as the documentation shows it."""
    for row in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(map(str, row)) + " |"
