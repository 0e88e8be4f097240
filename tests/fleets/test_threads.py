"""Real time: what only threads have."""

import threading
import time

import pytest

from dsi.core.policies import distributed
from dsi.core.request import Request
from dsi.fleets.loop import EngineLoop
from dsi.fleets.threads import ThreadCancelFlag, ThreadFleet, on_time, timer_lateness
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig


def test_thread_fleet_close_leaves_no_thread() -> None:
    config = SimulationConfig(LatencyModel(5.0, 1.0), 0.8, sp=3, tokens=10)
    before = set(threading.enumerate())
    fleet = config.real_time(seed=0)
    assert len(set(threading.enumerate()) - before) == 4
    EngineLoop(fleet).run(Request((1,), 10, distributed(2)))
    fleet.close()
    assert set(threading.enumerate()) - before == set()


def test_thread_fleet_close_does_not_wait_for_long_forwards() -> None:
    fleet = SimulationConfig(LatencyModel(60_000.0, 60_000.0), 0.8, sp=2, tokens=10).real_time(seed=0)
    EngineLoop(fleet).submit(Request((1,), 10, distributed(1)))
    began = time.perf_counter()
    fleet.close()
    assert time.perf_counter() - began < 4


def test_thread_cancel_flag_is_checked_at_cancel_points() -> None:
    gone = ThreadCancelFlag(cancel_points=2)
    gone.set()
    began = time.perf_counter()
    assert gone.wait(0.1)
    assert 0.03 < time.perf_counter() - began < 0.09
    assert ThreadCancelFlag(cancel_points=2).wait(0.001) is False


def test_on_time_subtracts_the_timer_lateness() -> None:
    late, share = timer_lateness()
    assert late >= 0
    assert 0 <= share < 0.5
    assert 0 <= on_time(0.02) <= 0.02
    assert on_time(0.0) == 0


def test_thread_fleet_takes_at_least_the_virtual_time() -> None:
    config = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=4, tokens=20)
    virtual = config.run("dsi", seed=1)
    waited = config.run("dsi", seed=1, real_time=True)
    assert waited.completion.tokens == virtual.completion.tokens
    assert waited.ms > 0.97 * virtual.ms


def test_thread_fleet_refuses_negative_cancel_points() -> None:
    with pytest.raises(ValueError, match="cancel points -1"):
        ThreadFleet([], cancel_points=-1)
