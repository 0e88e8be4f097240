"""What is measured of a pair on this machine's cores, and when it is kept."""

import time
from typing import Any

import pytest

from dsi.engine import build_processes
from dsi.engine.build_processes import DISTURBED_SECONDS, MAX_MEASUREMENTS, MeasuredPair, kept_profile, measure_pair
from dsi.planning.latency import LatencyModel

EVERY_CORE = frozenset({"target-1"})


class FleetOnCores:
    """What is asked of a fleet about its cores: how long its threads have waited before and after each measurement."""

    def __init__(self, *seconds: float) -> None:
        self.every_core, self._seconds = EVERY_CORE, iter(seconds)

    def seconds_without_core(self) -> dict[str, float]:
        return {"a thread": next(self._seconds)}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[MeasuredPair]:
    """Measurements, one after another: of 1 ms, 2 ms, and so on."""
    pairs: list[MeasuredPair] = []

    def measure_once(fleet: Any, *_: Any) -> MeasuredPair:
        assert fleet.every_core == EVERY_CORE
        pairs.append(MeasuredPair(LatencyModel(len(pairs) + 1.0, 0.5), fleet.every_core))
        fleet.every_core = frozenset()
        return pairs[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build_processes, "measure_once", measure_once)
    return pairs


def measure(fleet: Any) -> MeasuredPair:
    target: Any = None
    return measure_pair("a pair", fleet, target, 0, [])


def test_measure_pair_keeps_what_was_measured_on_free_cores(measured: list[MeasuredPair]) -> None:
    assert measure(FleetOnCores(0, 0)) == measured[0] == kept_profile("a pair")
    assert len(measured) == 1


def test_measure_pair_repeats_what_was_measured_on_busy_cores(measured: list[MeasuredPair]) -> None:
    assert measure(FleetOnCores(0, 9, 9, 9)) == measured[1] == kept_profile("a pair")


def test_measure_pair_keeps_the_least_disturbed_of_a_few_for_a_while(
    measured: list[MeasuredPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure(FleetOnCores(0, 9e6, 9e6, 9e6 + 10, 9e6 + 10, 18e6)) == measured[1]
    assert len(measured) == MAX_MEASUREMENTS
    assert kept_profile("a pair") == measured[1]
    later = time.time() + DISTURBED_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    assert kept_profile("a pair") is None
