"""Pictures read records and run nothing."""

import json
from pathlib import Path

import pytest

from dsi.core.adaptive import AdaptiveController
from dsi.core.request import Request
from dsi.experiments.records import Record, record, recorded
from dsi.fleets.loop import EngineLoop
from dsi.planning.auto import latency_table
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig
from dsi.plot.style import save
from dsi.plot.terminal import draw, legend
from dsi.plot.timeline import figure
from dsi.plot.trace import read, trace

SETTING = SimulationConfig(LatencyModel(20.0, 2.0, target_ttft_ms=40.0), 0.7, sp=4, tokens=20)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [record(SETTING, name, seed=4) for name in ("nonsi", "si", "dsi")]


def test_terminal_draws_every_active_server(records: list[Record]) -> None:
    lines = draw(records[2], 80).plain.splitlines()
    assert [line.split()[0] for line in lines] == [
        "target-1",
        "target-2",
        "target-3",
        "target-4",
        "drafter",
        "text",
    ]
    assert max(len(line) for line in lines) <= 80
    assert {"█", "░", "·"} <= set("".join(lines[:4]))
    assert {"▄", "×"} <= set(lines[4])
    assert sum(int(digit) for digit in lines[5] if digit.isdigit()) == 20


def test_terminal_draws_several_runs_on_one_scale(records: list[Record]) -> None:
    longest = records[0].total_ms
    lengths = [len(draw(r, 100, longest).plain.splitlines()[-1].rstrip()) for r in records]
    assert sorted(lengths, reverse=True) == lengths
    assert "drafter, rejected" in legend().plain


def test_trace_has_the_events_that_perfetto_reads(records: list[Record]) -> None:
    document = json.loads(json.dumps(trace(records)))
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(r.blocks) for r in records)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"DSI (simulated)", "target-1", "drafter"} <= names
    instants = [event for event in events if event["ph"] == "i"]
    assert sum(event["name"].startswith("token ") for event in instants) == 60
    assert {event["cat"] for event in instants if "cat" in event} == {"rejection"}
    [head] = [event for event in events if event.get("args", {}).get("algorithm") == "nonsi"]
    assert head["args"]["overlap"]["time_over_ideal"] == 1


def test_timeline_figure_has_a_panel_for_each_run(records: list[Record]) -> None:
    picture = figure(records)
    assert [axes.get_title(loc="left").split(":")[0] for axes in picture.axes] == ["non-SI", "SI", "DSI"]
    assert picture.axes[-1].get_xlabel() == "time (ms, simulated)"
    assert [label.get_text() for label in picture.axes[2].get_yticklabels()][-2:] == ["drafter", "text"]


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_timeline_save_is_reproducible(records: list[Record], tmp_path: Path, name: str, begins: bytes) -> None:
    save(figure(records), tmp_path / name)
    first = (tmp_path / name).read_bytes()
    save(figure(records), tmp_path / name)
    assert first.startswith(begins)
    assert (tmp_path / name).read_bytes() == first


def test_trace_read_returns_the_records(records: list[Record]) -> None:
    back = read(json.loads(json.dumps(trace(records))))
    assert [(one.algorithm, one.label, one.servers) for one in back] == [
        (one.algorithm, one.label, one.servers) for one in records
    ]
    for one, other in zip(back, records):
        assert one.times_ms == pytest.approx(other.times_ms)
        assert [block.outcome for block in one.blocks] == [block.outcome for block in other.blocks]
        ends = [block.end_ms for block in one.blocks]
        assert ends == pytest.approx([block.end_ms for block in other.blocks])


def test_trace_read_returns_decisions_and_rejections() -> None:
    steps = ((1, 20.0), (64, 30.0))  # so that wrong guesses cost time
    setting = SimulationConfig(
        LatencyModel(20.0, 2.0, contention=0.2, cancel_points=8, by_width=steps), 0.0, 3, 80, thread_pool=False
    )
    controller = AdaptiveController(latency_table(setting), ("drafter",), 0.7)
    [done] = EngineLoop(setting.simulated(1)).run(Request((1, 2), 80, controller))
    drawn = recorded("auto", "simulated", ("target-1", "drafter"), (), done, 1)
    assert {instant.kind for instant in drawn.instants} == {"decision", "rejection"}
    assert "no speculation" in [instant.title for instant in drawn.instants]
    [back] = read(json.loads(json.dumps(trace([drawn]))))
    assert len(back.times_ms) == 80
    assert back.times_ms == pytest.approx(drawn.times_ms)
    assert [(i.kind, i.title, i.details) for i in back.instants] == [
        (i.kind, i.title, i.details) for i in drawn.instants
    ]
    assert [i.at_ms for i in back.instants] == pytest.approx([i.at_ms for i in drawn.instants])
    assert back.overlap == drawn.overlap
    assert back.title == "auto"


@pytest.mark.parametrize("document", [[], {}, {"traceEvents": 3}, {"traceEvents": [{"name": "process_name"}]}])
def test_trace_read_refuses_other_documents(document: object) -> None:
    with pytest.raises(ValueError, match="is no trace of dsi"):
        read(document)


def test_trace_read_accepts_outcomes_of_earlier_releases(records: list[Record]) -> None:
    text = json.dumps(trace(records)).replace('"verified"', '"judged"').replace('"prefilled"', '"warmed"')
    outcomes = [[block.outcome for block in one.blocks] for one in read(json.loads(text))]
    assert outcomes == [[block.outcome for block in one.blocks] for one in records]
