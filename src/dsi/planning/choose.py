"""Which algorithm, how many targets, how far ahead: foretold with what was measured, the best rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from dsi.core.spec import default_max_lead
from dsi.planning.equation_1 import best_si_lookahead, minimal_lookahead
from dsi.planning.forecast import expected_ms
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SEEDS = range(1004, 1016)  # the luck of the finals
FINALISTS = 6  # of each algorithm
PATIENCES = (0, 2)
WAITS = (0.5, 0.75)  # patiences besides, as shares of the lookahead
SHARES = (0.3, 0.6, 1)  # of the lookahead that Eq. (1) asks for
BLOCKS = (3, 4, 6, 8, 12)  # lookaheads that are tried besides
DEGREES = (1, 2, 3, 4, 5, 7, 11, 15)  # numbers of targets that are tried

Case = tuple[str, SimulationConfig]  # an algorithm and its setting
Map = Callable[[Callable[[Case], float], Iterable[Case]], Iterable[float]]  # as the builtin, or a pool's


@dataclass(frozen=True)
class Choice:
    """`ms` is what a token is expected to take."""

    algorithm: str
    sp: int
    lookahead: int
    patience: int
    ms: float

    @property
    def horizon(self) -> int:
        """One block for each target and one more: further ahead, a drafter takes more than it gives."""
        return default_max_lead(self.sp, self.lookahead, self.patience)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def choose(
    latency: LatencyModel,
    acceptance: float,
    most: int,
    tokens: int = 80,
    map: Map = map,
    degrees: Iterable[int] = DEGREES,
) -> list[Choice]:
    """The best of non-SI, SI and DSI with up to `most` targets, the fastest of them first.

    A slower algorithm is never chosen: where DSI loses, SI or non-SI comes first. All are foretold, and the
    first few rehearsed with luck.
    """
    cases = list(candidates(latency, acceptance, [sp for sp in degrees if sp <= most], tokens))
    ranked = sorted(zip(map(foretold, cases), cases), key=lambda pair: pair[0])
    finals = [
        case for name in ("nonsi", "si", "dsi") for case in [case for _, case in ranked if case[0] == name][:FINALISTS]
    ]
    best: dict[str, Choice] = {}
    for (algorithm, setting), ms in zip(finals, map(rehearsed, finals)):
        choice = Choice(algorithm, setting.sp, setting.lookahead or 1, setting.patience, ms)
        best[algorithm] = min(best.get(algorithm, choice), choice, key=lambda each: each.ms)
    return sorted(best.values(), key=lambda each: each.ms)


def candidates(latency: LatencyModel, acceptance: float, degrees: Iterable[int], tokens: int) -> Iterator[Case]:
    alone = as_measured(latency, acceptance, tokens, 1)
    yield "nonsi", replace(alone, lookahead=1)
    for lookahead in si_blocks(latency, acceptance):
        yield "si", replace(alone, lookahead=lookahead).with_latency(drafter_ms=latency.drafter_ms)
    for sp in degrees:
        setting = as_measured(latency, acceptance, tokens, sp)
        least = minimal_lookahead(setting.latency.target_ms, setting.latency.drafter_ms, sp)
        for lookahead in sorted({max(2, round(least * share)) for share in SHARES} | {*BLOCKS}):
            for patience in sorted({*PATIENCES, *(round(lookahead * share) for share in WAITS)}):
                chosen = as_chosen(setting, Choice("dsi", sp, lookahead, patience, 0))
                yield "dsi", chosen


def si_blocks(latency: LatencyModel, acceptance: float) -> list[int]:
    """Blocks around the best of unpadded forwards, and those that just fill a padded one."""
    block = best_si_lookahead(latency.target_ms, latency.drafter_ms, acceptance)
    full = {width - 1 for width, _ in latency.by_width if max(2, block / 2) < width < block * 2}
    return sorted({max(1, round(block * share)) for share in (0.6, 0.8, 1, 1.2)} | full)


def as_measured(latency: LatencyModel, acceptance: float, tokens: int, sp: int) -> SimulationConfig:
    """With so many targets, which slow one another down, and the drafter too."""
    return SimulationConfig(latency.with_targets(sp), acceptance, sp, tokens, eager=False)


def as_chosen(setting: SimulationConfig, choice: Choice) -> SimulationConfig:
    return replace(setting, lookahead=choice.lookahead, patience=choice.patience, horizon=choice.horizon)


def foretold(case: Case) -> float:
    """Milliseconds for each token."""
    algorithm, setting = case
    return expected_ms(setting, algorithm)


def rehearsed(case: Case) -> float:
    """The same, on average over some texts."""
    algorithm, setting = case
    return fmean(setting.run(algorithm, seed).ms for seed in SEEDS) / setting.tokens
