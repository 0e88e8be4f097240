"""What a profile says of forwards and guesses, as the planner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsi.experiments.profile import Profile
from dsi.planning.latency import Curve, monotone


def steps_ms(profile: Profile, source: object) -> Curve:
    """A target's forwards by their new tokens; at least the one of a single token."""
    one = profile.number("target_ms", source)
    points = profile.parts.get("latency", {}).get("curve") or []
    try:
        known = {int(point["new_tokens"]): float(point["ms"]) for point in points}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{source}: latency.curve must be a list of new_tokens and ms") from None
    return monotone(known or {1: one})


def rates(profile: Profile, source: object) -> dict[str, float]:
    """How often guesses are accepted: by rule at the highest temperature, or else as counted."""
    results: Sequence[Mapping[str, Any]] = profile.parts.get("rules", {}).get("results") or []
    warm = max((each["temperature"] for each in results), default=0)
    found = {
        each["rule"]: float(each["places"]["mean"])
        for each in results
        if warm and each["temperature"] == warm and each.get("places")
    }
    return found or {"match": profile.number("acceptance", source)}
