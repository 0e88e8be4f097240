"""Why a text was generated as it was."""

from dataclasses import replace
from typing import Any

from dsi.core.generation import Tally
from dsi.core.request import Completion
from dsi.core.spec import Decision, SpecConfig
from dsi.engine.deployment import Deployment
from dsi.engine.explain import explain
from dsi.planning.latency import LatencyModel
from dsi.planning.search import DeploymentPlan

AHEAD, PLAIN = SpecConfig("dsi", 4, 1, max_targets=2), SpecConfig("nonsi")
NOTHING: Any = None
DEPLOYMENT = Deployment(NOTHING, NOTHING, 0, 2, LatencyModel(20, 2))
TEXT = Completion((1, 2, 3), "length", (1, 2, 3), Tally())


def after(*decisions: Decision) -> Completion:
    return replace(TEXT, decisions=tuple((decision.tokens, decision) for decision in decisions))


def test_explain_reports_what_auto_ended_in() -> None:
    ahead, plain = Decision(0, AHEAD, "start", 0.7), Decision(1, PLAIN, "acceptance", 0.1)
    again = Decision(2, AHEAD, "latency", 0.5)
    auto = SpecConfig("auto")
    assert explain(DEPLOYMENT, auto, after(ahead)) == (
        "auto: ended in dsi, SP 2, lookahead 4, min draft 1 (acceptance estimated at 0.70, 0 changes of configuration)"
    )
    assert explain(DEPLOYMENT, auto, after(ahead, plain)) == (
        "auto: ended in no speculation (acceptance estimated at 0.10, 1 change of configuration), "
        "2 tokens without speculation (acceptance)"
    )
    assert ", 1 tokens without speculation (acceptance)" in explain(DEPLOYMENT, auto, after(ahead, plain, again))
    assert "its first configuration throughout" in explain(DEPLOYMENT, auto, TEXT)


def test_explain_reports_where_a_lookahead_came_from() -> None:
    measured = "target 20.0 ms, drafter 2.0 ms"
    for spec, reason in (
        (SpecConfig("si", 3), "si: lookahead 3 (as asked for)"),
        (SpecConfig("si"), f"si: lookahead 6 (the fastest at acceptance 0.8: {measured})"),
        (SpecConfig("pearl"), f"pearl: lookahead 10 (draft tokens during one target forward: {measured})"),
        (SpecConfig("dsi", min_draft=2), f"dsi: lookahead 5 (Eq. (1): {measured}, SP 2), min draft 2 (as asked for)"),
        (SpecConfig("nonsi"), "nonsi: no speculation, as asked for"),
    ):
        assert explain(DEPLOYMENT, spec, TEXT) == reason


def test_explain_reports_a_lookahead_by_plan() -> None:
    plan = DeploymentPlan(SpecConfig("si", 6))
    planned = replace(DEPLOYMENT, plans={"si": plan})
    assert explain(planned, SpecConfig("si"), TEXT) == (
        "si: lookahead 6 (the fastest in simulation with measured latencies)"
    )
