"""The measurements of a pair on a dataset, in one JSON file that the planner and the simulator read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from dsi.planning.latency import Curve, LatencyModel, monotone

NAMES = ("target", "drafter", "dataset")
PARTS = ("latency", "acceptance", "rules")  # the last is what `dsi measure acceptance --rule` gives
# The options of other commands, and where a profile has them.
NUMBERS = {
    "target_ms": ("latency", "target", "tpot_ms", "mean"),
    "drafter_ms": ("latency", "drafter", "tpot_ms", "mean"),
    "target_ttft_ms": ("latency", "target", "ttft_ms", "mean"),
    "drafter_ttft_ms": ("latency", "drafter", "ttft_ms", "mean"),
    "per_token_ms": ("latency", "per_token_ms"),
    "acceptance": ("acceptance", "rate"),
}


@dataclass(frozen=True)
class Profile:
    target: str
    drafter: str
    dataset: str
    parts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError:
            raise ValueError(f"{path}: is not JSON, so it is no profile") from None
        for name in NAMES:
            if not isinstance(document, dict) or not isinstance(document.get(name), str):
                raise ValueError(f"{path}: has no field {name}, so it is no profile")
        parts = {name: document[name] for name in PARTS if name in document}
        return cls(document["target"], document["drafter"], document["dataset"], parts)

    def save(self, path: Path) -> None:
        """Write a new file and replace the old one with it, so that no reader sees half of it."""
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(self.json(), indent=2, allow_nan=False) + "\n")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)

    def json(self) -> dict[str, Any]:
        return {"label": "measured", **{name: getattr(self, name) for name in NAMES}, **self.parts}

    def number(self, name: str, source: object = "the profile") -> float:
        """Return the value of a command's option of this name."""
        value: Any = self.parts
        for key in NUMBERS[name]:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            where, command = ".".join(NUMBERS[name]), f"dsi measure {NUMBERS[name][0]} --out"
            raise ValueError(f"{source}: has no number {where}, which `{command}` would give")
        return value

    def by_width(self, source: object = "the profile") -> Curve:
        """Return target forwards by their new tokens; at least the one of a single token."""
        one = self.number("target_ms", source)
        points = self.parts.get("latency", {}).get("curve") or []
        try:
            measured = {int(point["new_tokens"]): float(point["ms"]) for point in points}
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{source}: latency.curve must be a list of new_tokens and ms") from None
        return monotone(measured or {1: one})

    def acceptance_by_rule(self, source: object = "the profile") -> dict[str, float]:
        """Return the acceptance rates of the rules at the highest temperature, or else the greedy one."""
        results = self.parts.get("rules", {}).get("results") or []
        highest = max((result["temperature"] for result in results), default=0)
        rates = {
            result["rule"]: float(result["places"]["mean"])
            for result in results
            if highest and result["temperature"] == highest and result.get("places")
        }
        return rates or {"match": self.number("acceptance", source)}

    def chances(self) -> tuple[float, ...]:
        """Return how often the drafter's first, second, ... greedy choice is the target's token; () if not counted."""
        acceptance = self.parts.get("acceptance")
        return tuple(acceptance.get("chances") or ()) if isinstance(acceptance, Mapping) else ()

    def latency(self, source: Path | str = "profile", **fields: Any) -> LatencyModel:
        """Return the latencies of the pair; a prefill measured as faster than a later forward takes as long."""
        ms: dict[str, Any] = {name: self.number(name, source) for name in NUMBERS if name.endswith("_ms")}
        for role in ("target", "drafter"):
            ms[f"{role}_ttft_ms"] = max(ms[f"{role}_ttft_ms"], ms[f"{role}_ms"])
        return LatencyModel(**ms, **fields)

    def with_part(self, name: str, figures: Mapping[str, Any]) -> Profile:
        return replace(self, parts={**self.parts, name: figures})

    def beside(self, path: Path) -> Profile:
        """Return the profile that the file holds already, which must be of the same pair and dataset."""
        if not path.exists():
            return self
        existing = Profile.load(path)
        if existing.about != self.about:
            raise ValueError(f"{path}: is a profile of {existing.about}, not of {self.about}; give another file")
        return existing

    @property
    def about(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name in NAMES)
