from dataclasses import replace

import pytest

from dsi.core.policies import check_algorithm
from dsi.measure.settings import Setting

SETTING = Setting(20.0, 2.0, 0.8, sp=4, tokens=40)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_ms": 0}, "target latency 0 ms"),
        ({"drafter_ms": -2.5}, r"drafter latency -2\.5 ms"),
        ({"acceptance": 1.2}, r"acceptance 1\.2: must be between 0 and 1"),
        ({"acceptance": float("nan")}, "acceptance nan"),
        ({"sp": 0}, "SP degree 0: must be between 1 and 1000"),
        ({"lookahead": 0}, "lookahead 0: must be at least 1"),
        ({"tokens": 0}, "tokens 0"),
        ({"drafters": 0}, "drafters 0"),
        ({"patience": -1}, "patience -1"),
        ({"horizon": 0}, "horizon 0"),
        ({"pieces": -1}, "pieces -1"),
        ({"target_ttft_ms": 10}, r"target time to first token in ms 10: must be between 20 and 1e\+09"),
        ({"jitter": 1}, "jitter 1"),
        ({"network_ms": -1}, "network delay in ms -1"),
        ({"network_ms": float("inf")}, "network delay in ms inf"),
        ({"contention": float("nan")}, "contention nan"),
        ({"target_ms": 1e300}, "target latency in ms 1e\\+300: must be between 1e-06 and 1e\\+09"),
    ],
)
def test_impossible_settings_are_refused_with_their_numbers(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(SETTING, **changes)  # type: ignore[arg-type]


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="algorithm 'medusa': must be one of nonsi, si, pearl, dsi"):
        check_algorithm("medusa")


def test_servers_are_targets_then_drafters() -> None:
    names = [server.name for server in replace(SETTING, sp=2, drafters=3).servers(seed=0)]
    assert names == ["target-1", "target-2", "drafter", "drafter-2", "drafter-3"]


def test_what_threads_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="only virtual time has them"):
        replace(SETTING, network_ms=3).waited(seed=0)
