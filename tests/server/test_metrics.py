"""Metrics of decisions, from a job whose decisions are given."""

import pytest

from dsi.core.generation import Tally
from dsi.core.request import Completion
from dsi.core.spec import Decision, SpecConfig
from dsi.server.engine_thread import JobStats
from dsi.server.metrics import Metrics

AHEAD, PLAIN = SpecConfig("dsi", 4, 1, max_targets=2), SpecConfig("nonsi")
DECISIONS = (
    Decision(0, PLAIN, "start", 0.2),
    Decision(8, AHEAD, "acceptance", 0.6),
    Decision(9, PLAIN, "acceptance", 0.2),
    Decision(20, AHEAD, "latency", 0.6),
    Decision(30, PLAIN, "latency", 0.5),
    Decision(50, AHEAD, "acceptance", 0.9),
    Decision(60, PLAIN, "acceptance", 0.1),
)


def counts(algorithm: str, shared: bool) -> dict[str, dict[str, float]]:
    """Decisions and fallbacks by cause."""
    metrics = Metrics()
    decisions = tuple((0.1 * i, decision) for i, decision in enumerate(DECISIONS))
    completion = Completion((), "length", (), Tally(), decisions=decisions)
    metrics.count_speculation(algorithm, [JobStats(completion, [], 0.0, 0.0, shared, [])])
    by_name: dict[str, dict[str, float]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name in ("dsi:decisions_total", "dsi:fallback_total"):
                by_name.setdefault(sample.name, {})[sample.labels["cause"]] = sample.value
    return by_name


@pytest.mark.parametrize("shared", [False, True])
def test_metrics_count_decisions_and_those_that_give_up_speculation_as_fallbacks(shared: bool) -> None:
    by_name = counts("auto", shared)
    assert by_name["dsi:decisions_total"] == {"start": 1, "acceptance": 4, "latency": 2}
    crowd = {"crowd": 1.0} if shared else {}
    assert by_name["dsi:fallback_total"] == {"acceptance": 2, "latency": 1, **crowd}
