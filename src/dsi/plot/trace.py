"""Runs to Chrome trace JSON, which Perfetto and chrome://tracing open, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.experiments.records import Block, Instant, Record

COLOURS = {
    "verified": "thread_state_running",
    "stale": "grey",
    "prefilled": "thread_state_runnable",
    "accepted": "good",
    "rejected": "terrible",
}
OLD_OUTCOMES = {"judged": "verified", "warmed": "prefilled"}  # in traces of earlier releases


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """Return a document in which each run is a process and each server a thread.

    Verified tokens, decisions and rejections are instants of the process; the latter two have a category.
    """
    return {
        "traceEvents": [event for pid, record in enumerate(records, 1) for event in _events(pid, record)],
        "displayTimeUnit": "ms",
    }


def _events(pid: int, record: Record) -> list[dict[str, Any]]:
    threads = {name: tid for tid, name in enumerate(record.servers, start=1)}
    names = [_name("process_name", pid, 0, f"{record.title} ({record.label})")]
    names[0]["args"] |= {"algorithm": record.algorithm, "label": record.label, "overlap": record.overlap}  # for `read`
    names += [_name("thread_name", pid, tid, name) for name, tid in threads.items()]
    spans = [_span(pid, threads[block.server], block) for block in record.blocks]
    tokens = [_instant(pid, f"token {i}", time) for i, time in enumerate(record.times_ms, start=1)]
    instants = [_instant(pid, i.title, i.at_ms, cat=i.kind, args=i.details) for i in record.instants]
    return names + spans + tokens + instants


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
            "texts": block.num_texts,
        },
    }


def _instant(pid: int, name: str, at_ms: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": name, "pid": pid, "tid": 0, "ts": at_ms * 1000, **fields}


def read(document: Any) -> list[Record]:
    """Return the runs of a document that `trace` has made."""
    try:
        events = document["traceEvents"]
        return [_record(event, events) for event in events if event["name"] == "process_name"]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError("is no trace of dsi: what it says of its servers is missing") from error


def _record(head: dict[str, Any], events: list[dict[str, Any]]) -> Record:
    own = [event for event in events if event["pid"] == head["pid"]]
    names = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    spans = sorted((event for event in own if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    points = sorted((event for event in own if event["ph"] == "i"), key=lambda event: float(event["ts"]))
    times = [float(event["ts"]) / 1000 for event in points if "cat" not in event]
    instants = [Instant(e["cat"], float(e["ts"]) / 1000, e["name"], e["args"]) for e in points if "cat" in e]
    return Record(
        algorithm=head["args"]["algorithm"],
        label=head["args"]["label"],
        servers=tuple(names.values()),
        blocks=tuple(_block(names[event["tid"]], event) for event in spans),
        times_ms=tuple(times),
        instants=tuple(instants),
        overlap=head["args"].get("overlap", {}),
    )


def _block(server: str, event: dict[str, Any]) -> Block:
    details, start = event["args"], float(event["ts"]) / 1000
    outcome = OLD_OUTCOMES.get(details["outcome"], details["outcome"])
    if outcome not in COLOURS:
        raise KeyError(outcome)
    end = start + float(event["dur"]) / 1000
    sizes = details["place"], details["width"], details.get("texts", 1)  # which earlier releases do not say
    return Block(server, details["role"], event["cat"], outcome, start, end, *sizes)
