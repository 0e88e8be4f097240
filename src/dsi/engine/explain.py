"""Says in one line which configuration generated a text, and why."""

from __future__ import annotations

from dsi.core.request import Completion
from dsi.core.spec import AUTO, SpecConfig
from dsi.engine.deployment import TYPICAL_ACCEPTANCE, Deployment


def explain(deployment: Deployment, spec: SpecConfig, completion: Completion) -> str:
    if spec.algorithm == AUTO:
        return f"auto: {explain_auto(completion)}"
    if not spec.speculates:
        return "nonsi: no speculation, as asked for"
    resolved = deployment.resolve(spec)
    return (
        f"{spec.algorithm}: lookahead {resolved.lookahead} ({_lookahead_reason(deployment, spec)})"
        f"{_min_draft(spec, resolved)}"
    )


def explain_auto(completion: Completion) -> str:
    """What `auto` ended in, by which estimate, and how much it generated without speculation."""
    if not completion.decisions:
        return "its first configuration throughout, as the text depends on the draft tokens"
    decision = completion.decisions[-1][1]
    algorithm = "" if decision.spec.takes_turns else f"{decision.spec.algorithm}, "
    changes = len(completion.decisions) - 1
    return (
        f"ended in {algorithm}{decision.spec} (acceptance estimated at {decision.acceptance:.2f}, "
        f"{changes} change{'s' * (changes != 1)} of configuration){_unspeculated(completion)}"
    )


def _unspeculated(completion: Completion) -> str:
    """What `auto` generated without speculation, and what first made it stop."""
    if not completion.unspeculated:
        return ""
    cause = next(decision.cause for _, decision in completion.decisions if not decision.spec.speculates)
    return f", {completion.unspeculated} tokens without speculation ({cause})"


def _lookahead_reason(deployment: Deployment, spec: SpecConfig) -> str:
    if spec.lookahead is not None:
        return "as asked for"
    if spec.algorithm in deployment.plans:
        return "the fastest in simulation with measured latencies"
    latency = deployment.latency.under(spec.algorithm)
    measured = f"target {float(latency.target_ms):.1f} ms, drafter {float(latency.drafter_ms):.1f} ms"
    if spec.algorithm == "si":
        return f"the fastest at acceptance {TYPICAL_ACCEPTANCE}: {measured}"
    if spec.algorithm == "pearl":
        return f"draft tokens during one target forward: {measured}"
    return f"Eq. (1): {measured}, SP {deployment.sp}"


def _min_draft(spec: SpecConfig, resolved: SpecConfig) -> str:
    if spec.algorithm != "dsi":
        return ""
    reason = "as asked for" if spec.min_draft is not None else "the fastest in simulation"
    return f", min draft {resolved.min_draft} ({reason})"
