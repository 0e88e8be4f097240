"""Table 3 of the paper: the time to the first token over the time per token, beside measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsi.experiments.profile import Profile
from dsi.paper.table2 import PAIRS


@dataclass(frozen=True)
class Ratio:
    model: str
    dataset: str
    ratio: float | None  # None: not published
    label: str  # published or measured


def table3(profiles: Iterable[Path] = ()) -> list[Ratio]:
    """What is published, then what `dsi measure latency --out` has found."""
    measured = [(Profile.load(path), path) for path in profiles]
    return list(_published()) + [ratio for profile, path in measured for ratio in _measured(profile, path)]


def _published() -> Iterator[Ratio]:
    for pair in PAIRS:
        yield Ratio(pair.target, pair.dataset, pair.target_ttft_ratio, "published")
        yield Ratio(pair.drafter, pair.dataset, pair.drafter_ttft_ratio, "published")


def _measured(profile: Profile, path: Path) -> Iterator[Ratio]:
    for role in ("target", "drafter"):
        first, later = (profile.number(f"{role}_{what}", path) for what in ("ttft_ms", "ms"))
        yield Ratio(f"{getattr(profile, role)} ({role})", profile.dataset, first / later, "measured")
