from dataclasses import replace
from fractions import Fraction
from itertools import islice, pairwise
from statistics import fmean

import pytest

from dsi.core.spec import ALGORITHMS, check_algorithm
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

CONFIG = SimulationConfig(LatencyModel(20.0, 2.0), 0.8, sp=4, tokens=40)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"acceptance": 1.2}, r"acceptance 1\.2: must be between 0 and 1"),
        ({"acceptance": float("nan")}, "acceptance nan"),
        ({"sp": 0}, "SP degree 0: must be between 1 and 1000"),
        ({"tokens": 0}, "tokens 0"),
        ({"drafters": 0}, "drafters 0"),
        ({"nodes": 0}, r"nodes \(machines, each with a server\) 0: must be between 1 and 5"),
        ({"nodes": 6}, r"nodes \(machines, each with a server\) 6: must be between 1 and 5"),
        ({"requests": 0}, "requests 0"),
        ({"drafter_copies": 0}, "drafter copies 0"),
        ({"failures_per_hour": -1}, "failures per hour -1"),
        ({"repair_s": float("nan")}, "repair in s nan"),
        ({"detection_ms": -1}, "detection in ms -1"),
    ],
)
def test_simulation_config_refuses_numbers_out_of_range(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(CONFIG, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_ms": 0}, "target latency 0 ms"),
        ({"drafter_ms": -2.5}, r"drafter latency -2\.5 ms"),
        ({"cancel_points": -1}, "cancel points -1"),
        ({"target_ttft_ms": 10}, r"target time to first token in ms 10: must be between 20 and 1e\+09"),
        ({"jitter": 1}, "jitter 1"),
        ({"network_ms": -1}, "network delay in ms -1"),
        ({"network_ms": float("inf")}, "network delay in ms inf"),
        ({"contention": float("nan")}, "contention nan"),
        ({"network_jitter": 1}, r"network jitter 1: must be between 0 and 0\.99"),
        ({"target_ms": 1e300}, "target latency in ms 1e\\+300: must be between 1e-06 and 1e\\+09"),
    ],
)
def test_latency_model_refuses_numbers_out_of_range(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CONFIG.with_latency(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lookahead": 0}, "lookahead 0: must be at least 1"),
        ({"min_draft": -1}, "min draft -1"),
        ({"max_lead": 0}, "max lead 0"),
        ({"tree": -1}, "tree -1: must be at least 0"),
    ],
)
def test_simulation_config_refuses_impossible_speculation(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CONFIG.with_spec(**changes)


def test_check_algorithm_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="algorithm 'medusa': must be one of nonsi, si, pearl, dsi"):
        check_algorithm("medusa")


def test_simulation_servers_are_targets_then_drafters() -> None:
    names = [server.name for server in replace(CONFIG, sp=2, drafters=3).servers(seed=0)]
    assert names == ["target-1", "target-2", "drafter", "drafter-2", "drafter-3"]


def test_simulation_in_real_time_refuses_what_threads_cannot_do() -> None:
    with pytest.raises(ValueError, match="only virtual time has them"):
        CONFIG.with_latency(network_ms=3).real_time(seed=0)
    with pytest.raises(ValueError, match="5 failures per hour: only virtual time has them"):
        replace(CONFIG, failures_per_hour=5).real_time(seed=0)


def where(**changes: int) -> dict[str, int]:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return config.machines([server.name for server in config.servers(seed=0)])


def test_simulation_machines_are_filled_evenly_from_the_drafter_on() -> None:
    assert where(sp=4, nodes=2) == {"drafter": 0, "target-1": 0, "target-2": 0, "target-3": 1, "target-4": 1}
    assert list(where(sp=4, nodes=5).values()) == [0, 1, 2, 3, 4]
    sizes = [list(where(sp=63, nodes=8).values()).count(machine) for machine in range(8)]
    assert sizes == [8] * 8


def test_simulation_drafter_copies_draft_the_same_tokens() -> None:
    servers = replace(CONFIG, sp=1, drafter_copies=2).servers(seed=0)
    assert [(server.name, server.role) for server in servers[1:]] == [
        ("drafter", "drafter"),
        ("drafter-copy-2", "drafter"),
    ]
    one, many = (replace(CONFIG, drafter_copies=copies).run("dsi", 0) for copies in (1, 3))
    assert replace(one.completion, overlap=None) == replace(many.completion, overlap=None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_simulation_on_one_machine_has_no_network_delay(algorithm: str) -> None:
    here = replace(CONFIG, nodes=1).with_latency(network_ms=7, network_jitter=0.5)
    assert here.run(algorithm, seed=2).completion == CONFIG.run(algorithm, seed=2).completion


def test_simulation_on_many_machines_delays_all_but_the_drafter() -> None:
    config = SimulationConfig(LatencyModel(20, 2, network_ms=Fraction(1, 3)), 0.0, sp=4, tokens=40, nodes=5)
    assert config.run("nonsi", seed=0).completion.elapsed == 40 * (20 + Fraction(2, 3))
    si = replace(config, acceptance=1.0).with_spec(lookahead=3).run("si", seed=0)
    assert si.completion.elapsed == 10 * (3 * 2 + 20 + Fraction(2, 3))


def test_simulation_without_nodes_delays_all_messages() -> None:
    assert CONFIG.with_latency(network_ms=3).run("nonsi", 0).ms == 40 * (20 + 2 * 3)
    assert replace(CONFIG, nodes=2).with_latency(network_ms=3).run("nonsi", 0).ms == 40 * 20  # by the nearest target


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_simulation_of_many_requests_is_lossless(algorithm: str) -> None:
    config = replace(CONFIG, requests=5, drafter_copies=2)
    texts = [done.tokens for done in config.run(algorithm, seed=1).completions]
    assert texts == [done.tokens for done in config.run("nonsi", seed=1).completions]
    assert len(set(texts)) == 5


def test_simulation_of_many_requests_shares_the_targets() -> None:
    run = replace(CONFIG, requests=8, sp=4).run("nonsi", seed=0)
    assert run.all_ms == 8 / 4 * 40 * 20
    assert run.ms == pytest.approx(run.all_ms, rel=0.02)


def test_simulation_lookahead_of_many_requests_fits_the_drafters() -> None:
    found = [replace(CONFIG, requests=9, drafter_copies=n).lookahead_for("dsi") for n in (1, 2, 9)]
    assert found == [2, 5, 6]  # 20 / (4 * 2), twice that, and at most SI's own
    assert replace(CONFIG, requests=9).with_spec(lookahead=3).lookahead_for("dsi") == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("requests", [1, 4])
def test_simulation_failures_cost_time_and_change_no_text(algorithm: str, requests: int) -> None:
    config = replace(CONFIG, sp=2, tokens=200, requests=requests)
    frail = replace(config, failures_per_hour=5000, repair_s=1, detection_ms=30, nodes=2).with_latency(network_ms=1)
    sound, failing = config.run(algorithm, seed=3), frail.run(algorithm, seed=3)
    assert [done.tokens for done in failing.completions] == [done.tokens for done in sound.completions]
    assert failing.failures > 3
    assert failing.ms > sound.ms


def test_simulation_outages_follow_rate_and_repair_time() -> None:
    config = replace(CONFIG, failures_per_hour=100, repair_s=5, detection_ms=2)
    outages = list(islice(config.outages("target-1", seed=0), 2000))
    assert {outage.back - outage.down for outage in outages} == {5000}
    up = [later.down - earlier.back for earlier, later in pairwise(outages)]
    assert fmean(up) == pytest.approx(36_000, rel=0.1)
    assert next(config.outages("target-2", seed=0)) != outages[0]
