"""What is measured through a fleet, with models that wait for known times."""

import time
from functools import partial

import pytest

from dsi.core.messages import DRAFTER, TARGET
from dsi.engine.profile_fleet import LOOKUP_SHARE, FleetProfiler, fitted_widths, measured_latency, typical_ms
from dsi.engine.profile_trees import ON_CPU, with_trees
from dsi.fleets.servers import Server
from dsi.fleets.threads import ThreadFleet
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import ToyTarget
from dsi.models.wait import Latency, Wait
from dsi.planning.latency import LatencyModel

SAMPLE = tuple(range(100, 200))
STEPS = ((1, 0.010), (64, 0.015))


def waiting() -> ThreadFleet:
    target = ToyTarget(0)
    models = {TARGET: Wait(target, Latency(0.010, by_width=STEPS)), DRAFTER: Wait(target, Latency(0.003))}
    return ThreadFleet([Server(f"{role}-1" if role == TARGET else role, role, model) for role, model in models.items()])


class Failing:
    def answer(self, request: ForwardRequest) -> tuple[int, ...]:
        raise OSError(f"no memory for {len(request.tokens)} tokens")


def test_fleet_profiler_measures_what_its_models_wait() -> None:
    fleet = waiting()
    try:
        latency = FleetProfiler(fleet, SAMPLE, drafter=DRAFTER).latency()
    finally:
        fleet.close()
    by_width = dict(latency.by_width)
    assert latency.target_ms == pytest.approx(10, rel=0.5)
    assert by_width[16] == pytest.approx(15, rel=0.5)
    assert latency.drafter_ms == pytest.approx(3, rel=0.5)
    assert latency.drafter_delay_ms >= 0


def test_fleet_profiler_keeps_within_short_contexts() -> None:
    fleet = waiting()
    try:
        latency = FleetProfiler(fleet, SAMPLE, 12, DRAFTER, 4).latency()
    finally:
        fleet.close()
    assert 0 < latency.drafter_ms < 10 <= latency.target_ms * 1.1


def test_fleet_profiler_takes_lookups_as_nearly_free() -> None:
    fleet = waiting()
    try:
        latency = FleetProfiler(fleet, SAMPLE).latency()
    finally:
        fleet.close()
    assert latency.drafter_ms == LOOKUP_SHARE * latency.target_ms


def test_fleet_profiler_says_why_a_server_cannot_work() -> None:
    fleet = ThreadFleet([Server("target-1", TARGET, Failing())])
    try:
        with pytest.raises(ValueError, match="a server cannot work: OSError: no memory for 33 tokens"):
            FleetProfiler(fleet, SAMPLE)
    finally:
        fleet.close()


def test_with_trees_leaves_out_what_chains_take_as_well() -> None:
    """Real threads that wait 6 ms longer than the latencies say."""
    fleet, latency = waiting(), LatencyModel(4.0, 3.0)
    try:
        every, own = (with_trees(latency, fleet, SAMPLE[:4], 256, ON_CPU, chain) for chain in (False, True))
    finally:
        fleet.close()
    assert own.tree_ms < every.tree_ms - 3


def test_fitted_widths_draws_a_line_beyond_one_token() -> None:
    curve = fitted_widths({1: 8.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 18.0})
    assert [curve[width] for width in (1, 2, 3, 32)] == pytest.approx([8.0, 11.0, 11.5, 26.0])
    assert fitted_widths({1: 8.0}) == {1: 8.0}
    wide = fitted_widths({1: 8.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 18.0, 32: 34.0, 64: 34.0})
    assert [wide[width] for width in (2, 16, 20, 32, 48, 64)] == pytest.approx([11, 18, 22, 34, 34, 34])
    assert min(fitted_widths({1: 8.0, 2: 9.0, 16: 5.0}).values()) == 8.0  # never less than for one token


def test_fitted_widths_are_flat_while_forwards_wait_for_memory() -> None:
    """A line through wider forwards as well would make the third token look expensive."""
    curve = fitted_widths({1: 1.2, 2: 1.3, 4: 1.3, 8: 1.3, 16: 2.1})
    assert [curve[width] for width in (2, 4, 8, 12, 16, 24, 32)] == pytest.approx([1.3, 1.3, 1.3, 1.7, 2.1, 2.9, 3.7])


def test_measured_latency_never_falls_with_the_width() -> None:
    times = [ms for _, ms in measured_latency({1: 8.0, 2: 14.0, 4: 9.0, 8: 9.0}, 1.0).by_width]
    assert times == sorted(times)


def test_typical_ms_takes_the_median_of_interleaved_rounds() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return {"a": 1.0, "b": 2.0}[name] + len(order)

    medians = typical_ms({name: partial(measure, name) for name in ("a", "b")})
    assert medians == {"a": 1 + len(order) / 2, "b": 3 + len(order) / 2}
    assert order == ["a", "b"] * (len(order) // 2)


def test_typical_ms_ends_when_measurements_take_long() -> None:
    times: list[float] = []

    def slow() -> float:
        time.sleep(0.3)
        times.append(1.0)
        return 1.0

    typical_ms({"slow": slow})
    assert len(times) == 3
