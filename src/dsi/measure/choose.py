"""Which algorithm, how many targets, how far ahead: rehearsed in virtual time with what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from dsi.measure.concurrent import Costs
from dsi.measure.settings import Setting
from dsi.planner import best_si_lookahead, minimal_lookahead

SEEDS = range(3)
PATIENCES = (0, 2, 4)


@dataclass(frozen=True)
class Choice:
    """`ms` is what a token is expected to take."""

    algorithm: str
    sp: int
    lookahead: int
    patience: int
    ms: float

    def json(self) -> dict[str, Any]:
        return asdict(self)


def choose(costs: Costs, acceptance: float, most: int, tokens: int = 80) -> list[Choice]:
    """The best of non-SI, SI and DSI with up to `most` targets, the fastest of them first.

    A slower algorithm is never chosen: where DSI loses, SI or non-SI comes first.
    """
    setting = as_measured(costs, acceptance, tokens)
    found = [rehearsed(replace(setting, lookahead=1), "nonsi")]
    found.append(min((rehearsed(each, "si") for each in si_settings(setting)), key=_ms))
    found.append(min((best_dsi(beside(costs, setting, sp)) for sp in degrees(most)), key=_ms))
    return sorted(found, key=_ms)


def as_measured(costs: Costs, acceptance: float, tokens: int) -> Setting:
    return Setting(
        costs.target_ms,
        costs.drafter_ms,
        acceptance,
        1,
        tokens,
        steps_ms=tuple(costs.by_width.items()),
        contention=costs.contention,
        pieces=costs.pieces,
        eager=False,
    )


def beside(costs: Costs, setting: Setting, sp: int) -> Setting:
    """With so many targets, which slow the drafter down as well."""
    return replace(setting, sp=sp, drafter_ms=costs.drafter_beside(sp))


def degrees(most: int) -> Iterator[int]:
    """Few targets crowd each other less: each small number, then every other."""
    yield from (sp for sp in (1, 2, 3, 4, 6, 7, 11, 15) if sp <= most)


def si_settings(setting: Setting) -> Iterator[Setting]:
    """Blocks around the best of unpadded forwards, and those that just fill a padded one."""
    block = best_si_lookahead(setting.target_ms, setting.drafter_ms, setting.acceptance)
    full = {width - 1 for width, _ in setting.steps_ms if block / 2 < width < block * 2}
    for lookahead in sorted({max(1, block + shift) for shift in (-4, -2, -1, 0, 1, 2)} | full):
        yield replace(setting, lookahead=max(1, lookahead))


def best_dsi(setting: Setting) -> Choice:
    """Lookahead first, then patience with that lookahead."""
    least = minimal_lookahead(setting.target_ms, setting.drafter_ms, setting.sp)
    blocks = sorted({max(2, round(least * share)) for share in (0.35, 0.6, 1)} | {4, 8, 15})
    here = replace(setting, patience=2)
    first = min((rehearsed(replace(here, lookahead=k), "dsi") for k in blocks), key=_ms)
    here = replace(here, lookahead=first.lookahead)
    others = (rehearsed(replace(here, patience=n), "dsi") for n in PATIENCES if n != here.patience)
    return min((first, *others), key=_ms)


def rehearsed(setting: Setting, algorithm: str, seeds: Iterable[int] = SEEDS) -> Choice:
    """A drafter may run ahead by one block for each target and one more, as it does in earnest."""
    lookahead = setting.lookahead or 1
    setting = replace(setting, horizon=max(setting.patience + 1, (setting.sp + 1) * lookahead))
    ms = fmean(setting.run(algorithm, seed).ms for seed in seeds) / setting.tokens
    return Choice(algorithm, setting.sp, lookahead, setting.patience, ms)


def _ms(choice: Choice) -> float:
    return choice.ms
