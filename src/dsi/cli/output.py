"""What the commands print: tables and text on stdout, progress on stderr, or one JSON document."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from dsi.core.progress import Progress, Status, no_status

if TYPE_CHECKING:
    from dsi.core.request import Completion
    from dsi.experiments.budget import Entry, Table, Verdict
    from dsi.experiments.compare import Comparison
    from dsi.experiments.divergence import Divergence
    from dsi.experiments.records import Record
    from dsi.experiments.simulate import Result
    from dsi.planning.search import DeploymentPlan

SERVERS_LISTED = 12
PICTURES = (".svg", ".png")
SILENCE_SECONDS = 2.0
WIDE = 200
BUDGET_HEADS = [
    "",
    "tokens/s",
    "quartiles",
    "over non-SI",
    "ms to 1st",
    "10th",
    "last",
    "target forwards",
    "given up",
    "drafter forwards",
    "wasted",
]


@contextmanager
def progress(what: str, total: int) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line every few seconds."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_progress(what, total)
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def writable(path: Path, endings: tuple[str, ...] = (*PICTURES, ".json")) -> Path:
    """Refuse a path that cannot be written, before anything is computed."""
    if path.suffix not in endings:
        *others, last = endings
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{path}: the name must end in {allowed}")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    return path


@contextmanager
def working(on: str, quiet: bool = True) -> Iterator[Status]:
    """Show a status line on a terminal; elsewhere, unless `quiet`, a line for each stage that comes late."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_status if quiet else _plain_status()
        return
    with console.status(escape(on)) as line:
        yield lambda stage: line.update(escape(stage))


def _plain_progress(what: str, total: int) -> Progress:
    from time import monotonic

    done, printed = 0, monotonic()

    def advance() -> None:
        nonlocal done, printed
        done += 1
        if monotonic() - printed > SILENCE_SECONDS:
            printed = monotonic()
            print(f"dsi: {done} of {total} {what}", file=sys.stderr)

    return advance


def _plain_status() -> Status:
    """Print a stage if it begins more than two seconds after the first, and how far it is every few seconds."""
    from time import monotonic

    started: float | None = None
    printed, shown = 0.0, ""

    def report(stage: str) -> None:
        nonlocal started, printed, shown
        now = monotonic()
        if started is None:
            started = printed = now
        name = stage.partition(":")[0]
        if now - printed > SILENCE_SECONDS or (name != shown and now - started > SILENCE_SECONDS):
            printed, shown = now, name
            print(f"dsi: {stage}", file=sys.stderr, flush=True)

    return report


def beside(ours: int, published: int) -> str:
    return f"{ours} ({published})" + ("" if ours == published else "  DIFFERS")


def figures(done: Completion) -> dict[str, Any]:
    return {
        "label": "measured",
        "tokens": len(done.tokens),
        "token_ids": list(done.tokens),
        "prompt_tokens": len(done.prompt),
        "prompt_token_ids": list(done.prompt),
        "finish_reason": done.finish_reason,
        "seconds": done.elapsed,
        "ttft_seconds": done.ttft,
        "tpot_seconds": done.tpot,
        "tokens_per_second": len(done.tokens) / done.elapsed,
        "target_forwards": done.tally.forwards,
        "drafted": done.tally.drafted,
        "accepted": done.tally.accepted,
        **overlapped(done),
    }


def overlapped(done: Completion) -> dict[str, Any]:
    """The overlap, each rejection's cost, and the decisions of `auto`."""
    if done.overlap is None:
        return {}
    losses = [
        {"token": loss.token, "at_ms": loss.at * 1000, "lost_ms": loss.lost * 1000} for loss in done.overlap.losses
    ]
    turns = [{"at_ms": at * 1000, **decision.json()} for at, decision in done.decisions]
    return {"overlap": {**done.overlap.json(), "losses": losses}} | ({"decisions": turns} if turns else {})


def plans(plans: Iterable[DeploymentPlan]) -> str:
    """The plan that was chosen, and those it was compared with."""
    first, *others = plans
    beside = ", ".join(f"{plan.algorithm} {plan.ms:.2f}" for plan in others)
    return (
        f"auto: {first.algorithm}, SP {first.sp}, lookahead {first.spec.lookahead}, "
        f"min draft {first.spec.min_draft or 0}: "
        f"{first.ms:.2f} ms a token simulated with measured latencies ({beside})"
    )


def summary(algorithm: str, done: Completion) -> str:
    numbers = figures(done)
    return (
        f"{algorithm}: {numbers['tokens']} tokens in {numbers['seconds']:.2f} s, "
        f"{numbers['tokens_per_second']:.1f} tokens/s, {numbers['accepted']} of them guessed, "
        f"{numbers['target_forwards']} target forwards (measured)"
    )


def comparison(comparison: Comparison, json: bool, one_text: bool = True) -> None:
    rows, divergences = comparison.rows, comparison.divergences
    if json:
        parted = [found.json() for found in divergences]
        document(label="measured", results=[row.json() for row in rows], equal=not parted, divergences=parted)
        return
    columns = [
        {
            "tokens per second": f"{row.tokens_per_second:.1f}",
            "  quartiles": f"{row.low:.1f} to {row.high:.1f}",
            **{f"speed over {other.name}": f"{row.over(other):.2f}" for other in rows[:-1]},
            "target forwards": f"{row.forwards:.1f}",
            "drafts wasted": f"{row.wasted:.1f}",
            **_overlap(row.overlap),
        }
        for row in rows
    ]
    _print_columns([row.name for row in rows], columns)
    equal = equality(divergences, one_text)
    print(f"measured: {rows[0].runs} texts each, {equal}; ratios are medians within a prompt and repeat")
    _print_divergences(divergences)


def equality(divergences: Sequence[Divergence], one_text: bool = True) -> str:
    """Whether the texts that should be equal are."""
    if divergences:
        return f"those of {len(divergences)} {'prompt' if len(divergences) == 1 else 'prompts'} not equal"
    return "all equal" if one_text else "those of one algorithm and prompt equal"


def _print_divergences(divergences: Iterable[Divergence]) -> None:
    for found in divergences:
        print(found)


def budget(tables: list[Table], about: str, json: bool, files: Iterable[Path], **figures: Any) -> None:
    """Print the contenders and the winner of each class; `figures` go into the JSON document."""
    label = tables[0].entries[0].label
    if json:
        classes = [table.json() for table in tables]
        document(label=label, **figures, classes=classes, files=[str(path) for path in files])
        return
    for prompt_class in tables:
        rate = "" if prompt_class.acceptance is None else f", acceptance {prompt_class.acceptance:.2f}"
        print(f"{prompt_class.name}{rate} ({label})")
        table(BUDGET_HEADS, [_contender(entry, prompt_class.entries[0]) for entry in prompt_class.entries])
        print(verdict(prompt_class.verdict) if prompt_class.verdict else "nobody to compare with", end="\n\n")
    print("over non-SI: median of ratios within a prompt and repeat; forwards, given up, wasted: per token")
    print(f"{label}: {about}")
    _print_divergences(found for prompt_class in tables for found in prompt_class.divergences)
    for path in files:
        print(f"wrote {path}", file=sys.stderr)


def _contender(entry: Entry, first: Entry) -> list[str]:
    times = ("-" if ms is None else f"{ms:.1f}" for ms in entry.times_ms)
    return [
        entry.name,
        f"{entry.tokens_per_second:.1f}",
        f"{entry.low:.1f} to {entry.high:.1f}",
        f"{entry.over(first):.2f}",
        *times,
        f"{entry.target_forwards:.2f}",
        f"{entry.given_up:.2f}",
        f"{entry.drafter_forwards:.2f}",
        f"{entry.tokens_wasted:.2f}",
    ]


def verdict(result: Verdict) -> str:
    close = "" if result.clear else ": too close to call"
    return (
        f"winner: {result.winner.name}, {result.margin:.2f} times as fast as {result.second.name} "
        f"(quartiles {result.low:.2f} to {result.high:.2f}){close}"
    )


def _overlap(overlap: dict[str, Any]) -> dict[str, str]:
    """The rows about the overlap in one algorithm's column."""
    idle, lost = overlap["idle_share"] or {}, overlap["lost_per_rejection_ms"]
    return {
        "target forwards hidden": f"{overlap['hidden_share']:.0%}",
        "target forwards wasted": f"{overlap['wasted_forwards']:.1f}",
        "drafter's lead (tokens)": f"{overlap['drafter_lead']:.1f}",
        **{f"idle: {name}": f"{share:.0%}" for name, share in _by_server(idle).items()},
        "rejections": f"{overlap['rejections']:.1f}",
        "  ms lost to each": "-" if lost is None else f"{lost:.1f}",
        "time over the ideal": "-" if overlap["time_over_ideal"] is None else f"{overlap['time_over_ideal']:.2f}",
    }


def simulations(results: list[Result], json: bool) -> None:
    if json:
        documents = [result.json() for result in results]
        if len(results) == 1:
            document(**documents[0])
        else:
            document(label=results[0].label, results=documents, speedups=_speedups(results))
        return
    _print_columns([result.title for result in results], [_column(result, results) for result in results])
    first = results[0]
    requests = f"{first.requests} requests of " * (first.requests > 1)
    nodes = f", on {first.nodes} machine{'s' * (first.nodes > 1)}" if first.nodes else ""
    print(
        f"{first.label}: means of {first.repeats} runs of {requests}{first.tokens} tokens, ± 95% confidence; "
        f"SP {first.sp}, acceptance {first.acceptance:g}{nodes}"
    )


def _column(result: Result, results: list[Result]) -> dict[str, str]:
    """The rows of one algorithm's column, from top to bottom."""
    speedups = _speedups(results)[result.algorithm]
    return {
        _times(result): f"{result.mean_ms:.1f} ± {result.ci95_ms:.1f}",
        "spread (stdev, ms)": f"{result.stdev_ms:.1f}",
        f"tokens per second{', in all' * (result.requests > 1)}": f"{result.tokens_per_second:.1f}",
        **{f"speed over {other.title}": f"{speedups[other.algorithm]:.2f}" for other in results[:-1]},
        **_failures(result),
        "lookahead": "-" if result.lookahead is None else str(result.lookahead),
        "min draft": str(result.min_draft) if result.algorithm == "dsi" else "-",
        "target forwards": f"{result.target_forwards:.1f}",
        "  their time hidden": f"{result.hidden:.0%}",
        "  begun and given up": f"{result.stale_forwards:.1f}",
        "drafts": f"{result.drafted:.1f}",
        "  of them wasted": f"{result.wasted_drafts:.1f}",
        **{f"busy: {name}": f"{share:.0%}" for name, share in _by_server(result.busy).items()},
    }


def _times(result: Result) -> str:
    return "ms" if result.requests == 1 else f"ms for one of {result.requests}"


def _failures(result: Result) -> dict[str, str]:
    if result.unfailing_ms is None:
        return {}
    return {
        "servers that failed": f"{result.failures:.2f}",
        "  time over none failing": f"{result.failure_cost:.3f}",
    }


def _by_server(shares: dict[str, float]) -> dict[str, float]:
    """Each server's share, or the mean of each role's where there are too many to list."""
    if len(shares) <= SERVERS_LISTED:
        return shares
    roles: dict[str, list[float]] = {}
    for name, share in shares.items():
        roles.setdefault(name.partition("-")[0], []).append(share)
    return {f"{role}s (mean of {len(s)})": sum(s) / len(s) for role, s in roles.items()}


def _speedups(results: list[Result]) -> dict[str, dict[str, float]]:
    """speedups[a][b]: how many times as fast as b is a."""
    return {a.algorithm: {b.algorithm: b.mean_ms / a.mean_ms for b in results} for a in results}


def timelines(records: list[Record], paths: list[Path], json: bool) -> None:
    if json:
        runs = [
            {
                "algorithm": record.algorithm,
                "label": record.label,
                "total_ms": record.total_ms,
                "tokens": len(record.times_ms),
                "times_ms": record.times_ms,
                "instants": [vars(instant) for instant in record.instants],
                "remarks": [  # its name in earlier releases
                    {"kind": i.kind, "at_ms": i.at_ms, "title": i.title, "what": i.details} for i in record.instants
                ],
                "overlap": record.overlap,
                "blocks": [vars(block) for block in record.blocks],
            }
            for record in records
        ]
        document(label=records[0].label, runs=runs, files=[str(path) for path in paths])
        return
    from rich.console import Console

    from dsi.plot.terminal import draw, legend

    console = Console(highlight=False)
    longest = max(record.total_ms for record in records)
    for record in records:
        console.print(f"{record.title}: {len(record.times_ms)} tokens in {record.total_ms:.1f} ms ({record.label})")
        console.print(draw(record, console.width, longest), crop=False)
        console.print()
    console.print(legend())
    for path in paths:
        print(f"wrote {path}", file=sys.stderr)


def _print_columns(titles: list[str], columns: list[dict[str, str]]) -> None:
    """Print one column for each algorithm."""
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    table(["", *titles], rows)


def table(heads: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: what reads it should not find words cut in two.
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)


def document(**document: Any) -> None:
    print(jsonlib.dumps(document, allow_nan=False), flush=True)
