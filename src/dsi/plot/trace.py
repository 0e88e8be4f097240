"""A run as Chrome trace JSON, which Perfetto and chrome://tracing open, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.experiments.records import Block, Record, Remark

COLOURS = {
    "judged": "thread_state_running",
    "stale": "grey",
    "warmed": "thread_state_runnable",
    "accepted": "good",
    "rejected": "terrible",
}


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """Each run is a process, each server a thread; a token made certain is an instant of the process, and
    so are decisions and rejections, which have a category."""
    return {
        "traceEvents": [event for pid, record in enumerate(records, 1) for event in _events(pid, record)],
        "displayTimeUnit": "ms",
    }


def _events(pid: int, record: Record) -> list[dict[str, Any]]:
    threads = {name: tid for tid, name in enumerate(record.servers, start=1)}
    named = [_name("process_name", pid, 0, f"{record.title} ({record.label})")]
    about = {"algorithm": record.algorithm, "label": record.label, "overlap": record.overlap}
    named[0]["args"] |= about  # for `read`
    named += [_name("thread_name", pid, tid, name) for name, tid in threads.items()]
    spans = [_span(pid, threads[block.server], block) for block in record.blocks]
    tokens = [_token(pid, i, time) for i, time in enumerate(record.times_ms, start=1)]
    return named + spans + tokens + [_remark(pid, remark) for remark in record.remarks]


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(pid: int, tid: int, block: Block) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{block.kind} {block.place}" + (f"+{block.width}" if block.width > 1 else ""),
        "cat": block.kind,
        "pid": pid,
        "tid": tid,
        "ts": block.start_ms * 1000,  # microseconds, as the format wants them
        "dur": (block.end_ms - block.start_ms) * 1000,
        "cname": COLOURS[block.outcome],
        "args": {
            "outcome": block.outcome,
            "place": block.place,
            "width": block.width,
            "role": block.role,
        },
    }


def _token(pid: int, number: int, time_ms: float) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": f"token {number}", "pid": pid, "tid": 0, "ts": time_ms * 1000}


def _remark(pid: int, remark: Remark) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "p",
        "name": remark.title,
        "cat": remark.kind,
        "pid": pid,
        "tid": 0,
        "ts": remark.at_ms * 1000,
        "args": remark.what,
    }


def read(document: Any) -> list[Record]:
    """The runs of a trace that `trace` has made."""
    try:
        events = document["traceEvents"]
        return [_record(event, events) for event in events if event["name"] == "process_name"]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError("is no trace of dsi: what it says of its servers is missing") from error


def _record(head: dict[str, Any], events: list[dict[str, Any]]) -> Record:
    mine = [event for event in events if event["pid"] == head["pid"]]
    names = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    spans = sorted((event for event in mine if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    instants = sorted((event for event in mine if event["ph"] == "i"), key=lambda event: float(event["ts"]))
    times = [float(event["ts"]) / 1000 for event in instants if "cat" not in event]
    said = [Remark(e["cat"], float(e["ts"]) / 1000, e["name"], e["args"]) for e in instants if "cat" in e]
    return Record(
        algorithm=head["args"]["algorithm"],
        label=head["args"]["label"],
        servers=tuple(names.values()),
        blocks=tuple(_block(names[event["tid"]], event) for event in spans),
        times_ms=tuple(times),
        remarks=tuple(said),
        overlap=head["args"].get("overlap", {}),
    )


def _block(server: str, event: dict[str, Any]) -> Block:
    what, start = event["args"], float(event["ts"]) / 1000
    if what["outcome"] not in COLOURS:
        raise KeyError(what["outcome"])
    end = start + float(event["dur"]) / 1000
    return Block(server, what["role"], event["cat"], what["outcome"], start, end, what["place"], what["width"])
