"""`dsi timeline`: draw who computed what, when."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsi.cli import output as show
from dsi.cli.toy import algorithms, numbers, setting_of

if TYPE_CHECKING:
    from dsi.experiments.records import Record

from dsi.cli.options import (
    Acceptance,
    Algorithm,
    Contention,
    DrafterMs,
    Drafters,
    DrafterTtftMs,
    Eager,
    Horizon,
    Jitter,
    Json,
    NetworkMs,
    OneCache,
    PerTokenMs,
    Pieces,
    Rule,
    Seed,
    Sp,
    TargetMs,
    TargetTtftMs,
    Tokens,
    Waited,
)

EXAMPLE = "Example: dsi timeline --algorithm si,dsi --acceptance 0.9 --out figure.svg --out trace.json"


def timeline(
    algorithm: Algorithm = "nonsi,si,dsi",
    target_ms: TargetMs = 7.0,
    drafter_ms: DrafterMs = 1.0,
    acceptance: Acceptance = 0.8,
    lookahead: Annotated[str, typer.Option(help="Guesses per verification, or auto (see simulate).")] = "auto",
    sp: Sp = 7,
    tokens: Tokens = 16,
    seed: Seed = 0,
    drafters: Drafters = 1,
    patience: Annotated[int, typer.Option(help="dsi: guesses to have before a fresh root is watched.")] = 0,
    horizon: Horizon = float("inf"),
    pieces: Pieces = 0,
    target_ttft_ms: TargetTtftMs = None,
    drafter_ttft_ms: DrafterTtftMs = None,
    per_token_ms: PerTokenMs = 0.0,
    jitter: Jitter = 0.0,
    network_ms: NetworkMs = 0.0,
    contention: Contention = 0.0,
    one_cache: OneCache = False,
    rule: Rule = "match",
    eager: Eager = True,
    waited: Waited = False,
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
    from dsi.experiments.records import record

    paths = [show.writable(path) for path in out or []]
    if trace is not None:
        records = _traced(trace)
    else:
        names = algorithms(algorithm)
        setting = setting_of(locals(), lookahead=_one_lookahead(lookahead))
        with show.progress("algorithms", len(names)) as advance:
            records = []
            for name in names:
                records.append(record(setting, name, seed, waited))
                advance()
    for path in paths:
        _save(records, path)
    show.timelines(records, paths, json)


def _traced(path: Path) -> list[Record]:
    """The runs of a trace, those in which a token came."""
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
    blocks = numbers("lookahead", text, 1)
    if len(blocks) > 1:
        raise ValueError(f"lookahead {text!r}: a timeline shows one run, so must be one number or auto")
    return blocks[0]


def _save(records: list[Record], path: Path) -> None:
    if path.suffix == ".json":
        from dsi.plot.trace import trace

        path.write_text(jsonlib.dumps(trace(records)))
    else:
        from dsi.plot.timeline import save

        save(records, path)
