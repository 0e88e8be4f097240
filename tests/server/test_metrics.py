"""What is counted of decisions, from a text whose decisions are given."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsi.core.generation import Tally
from dsi.core.spec import Decision, SpecConfig
from dsi.server.metrics import Metrics
from dsi.server.service import ApiRequest

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


def counted(algorithm: str, crowded: bool) -> dict[str, dict[str, float]]:
    fleet = SimpleNamespace(servers=list, busy={}, deaths={})
    desk: Any = SimpleNamespace(running=0, waiting=0, engine=SimpleNamespace(loaded=SimpleNamespace(fleet=fleet)))
    metrics = Metrics(desk)
    turns = [(0.1 * i, decision) for i, decision in enumerate(DECISIONS)]
    ticket: Any = SimpleNamespace(tally=Tally(), origins=[], decisions=turns, crowded=crowded)
    choice: Any = SimpleNamespace(ticket=ticket, prompt=(), words=())
    order = ApiRequest("cmpl-1", False, "m", [choice], algorithm, None, "match", 1.0, False, False, False, echo=False)
    metrics.ended(order, "ok")
    found: dict[str, dict[str, float]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name in ("dsi:decisions_total", "dsi:fallback_total"):
                found.setdefault(sample.name, {})[sample.labels["cause"]] = sample.value
    return found


@pytest.mark.parametrize("crowded", [False, True])
def test_each_decision_counts_and_each_that_gives_up_speculation_is_a_fallback(crowded: bool) -> None:
    found = counted("auto", crowded)
    assert found["dsi:decisions_total"] == {"start": 1, "acceptance": 4, "latency": 2}
    crowd = {"crowd": 1.0} if crowded else {}
    assert found["dsi:fallback_total"] == {"acceptance": 2, "latency": 1, **crowd}
