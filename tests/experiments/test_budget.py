"""Every algorithm on the same processors: layouts, entries and verdicts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsi.core.generation import Tally
from dsi.core.request import Completion
from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine
from dsi.experiments.budget import (
    ALGORITHMS,
    MEASURED,
    OTHER,
    SIMULATED,
    Configuration,
    Entry,
    Layout,
    Table,
    acceptance,
    check_algorithms,
    check_one_text,
    check_processors,
    check_share,
    configurations,
    engines,
    entries,
    layouts,
    measured,
    simulated,
    with_layout,
)
from dsi.experiments.divergence import check_equal
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

ALL, OWN = Layout(2), Layout(2, 1)


def configuration(algorithm: str, layout: Layout, lookahead: int | None = None) -> Configuration:
    return Configuration(SpecConfig(algorithm, lookahead), layout)


def completion(times: list[float], tally: Tally, tokens: int = 7) -> Completion:
    return Completion((tokens,) * len(times), "length", tuple(times), tally)


def text(seconds: float, count: int = 20, **tally: int) -> Completion:
    """Evenly written."""
    return completion([seconds * (i + 1) / count for i in range(count)], Tally(**tally))


def found(rates: dict[str, list[float]]) -> Table:
    """Texts of 20 tokens at these speeds."""
    texts = {configuration(name, OWN): [text(20 / rate) for rate in speeds] for name, speeds in rates.items()}
    return Table("made up", entries(texts, MEASURED, 1000))


def test_layouts_divide_all_processors_evenly() -> None:
    assert layouts(1) == [Layout(1)]
    assert layouts(2) == [ALL, OWN]
    assert [(each.targets, each.per_target) for each in layouts(7)] == [(0, 7), (6, 1), (3, 2), (2, 3), (1, 6)]


def test_configurations_on_two_cores_have_non_si_and_si_twice() -> None:
    names = [each.name() for each in configurations(ALGORITHMS, 2, [3, 5])]
    assert names == [
        "non-SI, all 2 cores",
        "non-SI, 1 core",
        "SI (3), all 2 cores",
        "SI (5), all 2 cores",
        "SI (3), 1 target of 1 core",
        "SI (5), 1 target of 1 core",
        "PEARL, 1 target of 1 core",
        "DSI, 1 target of 1 core",
        "auto, 1 target of 1 core",
    ]


def test_configurations_give_several_targets_to_dsi_and_auto_only() -> None:
    found = configurations(ALGORITHMS, 7, [3])
    homes = {name: [each.layout.targets for each in found if each.algorithm == name] for name in ALGORITHMS}
    assert homes == {
        "nonsi": [0, 6],
        "si": [0, 6, 1],
        "pearl": [6, 1],
        "dsi": [6, 3, 2, 1],
        "auto": [6, 3, 2, 1],
    }
    assert configuration("pearl", Layout(7, 6)).name() == "PEARL, 1 target of 1 core"
    assert configuration("dsi", Layout(7, 3)).name("GPU") == "DSI, 3 targets of 2 GPUs"


def test_configurations_on_one_core_share_it() -> None:
    assert [each.name() for each in configurations(ALGORITHMS, 1, [3])] == [
        "non-SI, 1 core",
        "SI (3), 1 core",
        "PEARL, 1 core",
        "DSI, 1 core",
        "auto, 1 core",
    ]


def test_entry_reports_rates_latencies_and_costs() -> None:
    texts = [
        text(2.0, forwards=10, drafted=30, accepted=15, abandoned=4),
        text(4.0, forwards=20, drafted=30, accepted=10),
    ]
    [entry] = entries({configuration("dsi", OWN): texts}, MEASURED, 1000)
    assert (entry.rates, entry.tokens_per_second) == ((10.0, 5.0), 7.5)
    assert entry.times_ms == pytest.approx((150, 1500, 3000))
    costs = (entry.target_forwards, entry.given_up, entry.drafter_forwards, entry.tokens_wasted)
    assert costs == pytest.approx((0.75, 0.1, 1.5, 0.875))
    said = entry.json()
    assert (said["name"], said["label"]) == ("DSI, 1 target of 1 core", "measured")
    assert said["ms_to_token_10"] == pytest.approx(1500)
    assert said["per_token"]["tokens_wasted"] == pytest.approx(0.875)


def test_entry_converts_virtual_milliseconds() -> None:
    [entry] = entries({configuration("dsi", OWN): [text(2000.0)]}, SIMULATED, 1)
    assert entry.rates == (10.0,)
    assert entry.times_ms == pytest.approx((100, 1000, 2000))


def test_entry_of_short_texts_has_no_tenth_token() -> None:
    [entry] = entries({configuration("nonsi", ALL): [text(1.0, count=8), text(1.0, count=8)]}, MEASURED, 1000)
    assert entry.times_ms == pytest.approx((125, None, 1000))


def test_entries_keep_the_fastest_lookahead_of_a_layout() -> None:
    texts = {
        configuration("si", layout, block): [text(seconds)]
        for layout, block, seconds in ((ALL, 3, 2.0), (ALL, 5, 1.0), (OWN, 3, 1.5), (OWN, 5, 3.0))
    }
    assert [(each.layout, each.lookahead) for each in entries(texts, MEASURED, 1000)] == [(ALL, 5), (OWN, 3)]


def test_verdict_compares_runs_side_by_side() -> None:
    table = found({"nonsi": [10, 10, 10, 10], "si": [20, 30, 20, 30], "dsi": [30, 45, 30, 45]})
    verdict = table.verdict
    assert verdict is not None
    assert (verdict.winner.algorithm, verdict.second.algorithm, verdict.clear) == ("dsi", "si", True)
    assert (verdict.margin, verdict.low, verdict.high) == pytest.approx((1.5, 1.5, 1.5))
    said = table.json()
    assert [row["speed_over_nonsi"] for row in said["results"]] == pytest.approx([1, 2.5, 3.75])
    assert said["verdict"]["winner"] == "DSI, 1 target of 1 core"


def test_verdict_is_not_clear_if_the_winner_often_loses() -> None:
    verdict = found({"nonsi": [10, 10, 10, 10], "dsi": [9, 12, 9.5, 13]}).verdict
    assert verdict is not None
    assert (verdict.winner.algorithm, verdict.clear) == ("dsi", False)


def test_verdict_needs_two_algorithms() -> None:
    texts = {configuration("nonsi", ALL): [text(1.0)], configuration("nonsi", OWN): [text(1.1)]}
    table = Table("made up", entries(texts, MEASURED, 1000))
    assert table.verdict is None
    assert table.json()["verdict"] is None


class FakeEngine:
    """Logs which algorithm ran which prompt, and takes one second per token."""

    def __init__(self, log: list[tuple[str, str]], token: int = 7) -> None:
        self.log, self.token, self.deployment = log, token, SimpleNamespace(sp=1, plans={"dsi": None})

    def generate(self, prompt: str, *, algorithm: str, max_new_tokens: int, **_: Any) -> Completion:
        self.log.append((algorithm, prompt))
        return completion([1.0 * (i + 1) for i in range(max_new_tokens)], Tally(), self.token)


def run(fakes: dict[Configuration, FakeEngine], repeats: int) -> list[Table]:
    classes = {"one": ["a", "b"], "two": ["c"]}
    return measured(cast(dict[Configuration, Engine], fakes), classes, repeats, {"max_new_tokens": 3})


def test_measured_interleaves_and_rotates_configurations() -> None:
    log: list[tuple[str, str]] = []
    tables = run({configuration("nonsi", ALL): FakeEngine(log), configuration("dsi", OWN): FakeEngine(log)}, repeats=1)
    assert log[2:] == [  # after one text each to warm up
        ("nonsi", "a"),
        ("dsi", "a"),
        ("dsi", "b"),
        ("nonsi", "b"),
        ("nonsi", "c"),
        ("dsi", "c"),
    ]
    assert [(table.name, [each.runs for each in table.entries]) for table in tables] == [
        ("one", [2, 2]),
        ("two", [1, 1]),
    ]


def test_measured_evicts_a_prompt_between_configurations_of_one_engine() -> None:
    log: list[tuple[str, str]] = []
    engine = FakeEngine(log)
    run({configuration("nonsi", OWN): engine, configuration("si", OWN, 3): engine}, repeats=1)
    prompts = [prompt for _, prompt in log[2:]]
    assert prompts == ["a", OTHER, "a", "b", OTHER, "b", "c", OTHER, "c"]


def test_measured_reports_different_texts_beside_the_figures() -> None:
    one, two = run(
        {configuration("nonsi", ALL): FakeEngine([]), configuration("dsi", OWN): FakeEngine([], token=8)}, repeats=1
    )
    assert [(found.prompt, found.position) for found in (*one.divergences, *two.divergences)] == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
    ]
    assert one.divergences[0].names == (one.entries[1].name,)
    assert (len(one.entries), len(one.json()["divergences"])) == (2, 2)
    with pytest.raises(ValueError, match="prompt 'a': different texts were written"):
        check_equal(one.divergences)


def test_engines_are_one_per_layout_on_the_same_cores() -> None:
    asked: list[dict[str, Any]] = []
    before = os.sched_getaffinity(0)

    @contextmanager
    def load(**options: Any) -> Iterator[object]:
        asked.append(options | {"cores": len(os.sched_getaffinity(0))})
        yield object()

    configs = configurations(ALGORITHMS, 1, [3, 5])
    with engines(cast(Any, load), configs) as running:
        assert set(running) == set(configs)
        assert len({id(engine) for engine in running.values()}) == 2
    assert [each["algorithm"] for each in asked] == ["dsi", "auto"]
    assert [(each["threads"], each["cores"]) for each in asked] == [(1, 1), (1, 1)]
    assert os.sched_getaffinity(0) == before
    assert Layout(8, 7).load() == {"sp": 7, "threads": None}


SETTING = SimulationConfig(
    LatencyModel(20.0, 2.0, by_width=((1, 20.0), (8, 24.0)), target_ttft_ms=40.0, cancel_points=8),
    0.8,
    1,
    40,
    thread_pool=False,
)


def test_with_layout_divides_a_share_of_the_forward() -> None:
    turns = with_layout(SETTING, configuration("si", Layout(4), 5), 0.8)
    assert (turns.latency.target_ms, turns.latency.target_ttft_ms) == pytest.approx((8, 16))
    assert [ms for _, ms in turns.latency.by_width] == pytest.approx([8, 9.6])
    assert (turns.sp, turns.spec.lookahead, turns.latency.drafter_ms) == (1, 5, 2.0)
    own = with_layout(SETTING, configuration("dsi", Layout(4, 3)), 0.8)
    assert (own.sp, own.latency.target_ms, own.latency.by_width) == (3, 20, SETTING.latency.by_width)


def best(table: Table, name: str) -> Entry:
    found = [each for each in table.entries if each.algorithm == name]
    return max(found, key=lambda each: each.tokens_per_second)


@pytest.mark.parametrize(("share", "targets"), [(0.0, 3), (1.0, 1)])
def test_simulated_is_labelled_and_depends_on_the_parallel_fraction(share: float, targets: int) -> None:
    """Where a forward does not scale, DSI has many targets; where it does, one of many processors."""
    configs = configurations(["nonsi", "dsi", "auto"], 4, [])
    settings = {str(rate): replace(SETTING, acceptance=rate) for rate in (0.9, 0.05)}
    good, bad = simulated(settings, configs, share, range(6), "GPU")
    assert (good.acceptance, bad.acceptance) == (0.9, 0.05)
    assert {each.label for each in (*good.entries, *bad.entries)} == {"simulated"}
    assert good.entries[0].rates == pytest.approx([1000 * 40 / (41 * 20 * (1 - share + share / 4))] * 6)
    assert best(good, "dsi").layout.targets == targets
    assert best(bad, "auto").over(best(bad, "dsi")) > 0.9


def test_acceptance_counts_drafted_tokens_only() -> None:
    assert acceptance(["plain", "accepted", "accepted", "accepted", "corrected", "plain"]) == 0.75
    assert acceptance(["plain"]) == 0


def test_check_algorithms_adds_non_si_and_refuses_unknown_names() -> None:
    assert check_algorithms("auto, dsi") == ["nonsi", "dsi", "auto"]
    with pytest.raises(ValueError, match="algorithm 'medusa'"):
        check_algorithms("dsi,medusa")


def test_checks_refuse_bad_numbers() -> None:
    with pytest.raises(ValueError, match="cores 0: must be between 1 and 1000"):
        check_processors("cores", 0, 1)
    with pytest.raises(ValueError, match=r"parallel fraction 1\.5: must be between 0 and 1"):
        check_share(1.5)
    with pytest.raises(ValueError, match=r"rule reject at temperature 0\.7 with --budget"):
        check_one_text("reject", 0.7)
    check_one_text("reject", 0.0)
