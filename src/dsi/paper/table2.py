"""Table 2 of the paper: speedups of DSI over SI for ten pairs, published and computed here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsi.core.progress import Progress, no_progress
from dsi.core.spec import SpecConfig
from dsi.experiments.simulate import Result, simulate
from dsi.paper import forward_counts
from dsi.planning import theory
from dsi.planning.equation_1 import minimal_lookahead, servers_needed
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

TOKENS, SP, PROCESSORS = 50, 7, 8
LOOKAHEADS = (1, 5, 10)


@dataclass(frozen=True)
class Pair:
    """The published numbers of one target, drafter and dataset: Tables 2 and 3."""

    target: str
    drafter: str
    dataset: str
    target_ms: float
    drafter_ms: float
    acceptance: float
    target_ttft_ratio: float | None  # of the time to the first token to the time per token
    drafter_ttft_ratio: float | None
    published: float  # DSI's speed over SI's

    @property
    def name(self) -> str:
        return f"{self.target} + {self.drafter.partition('-')[2]}, {self.dataset}"

    @property
    def latency(self) -> LatencyModel:
        return LatencyModel(
            self.target_ms,
            self.drafter_ms,
            self.target_ms * (self.target_ttft_ratio or 1),
            self.drafter_ms * (self.drafter_ttft_ratio or 1),
        )

    @property
    def allowed(self) -> list[int]:
        """The lookaheads that Eq. (1) allows DSI."""
        return [k for k in LOOKAHEADS if servers_needed(self.target_ms, self.drafter_ms, k) <= SP]

    def simulation(self, lookahead: int, drafters: int = 1, sp: int = SP) -> SimulationConfig:
        return SimulationConfig(
            self.latency, self.acceptance, sp, TOKENS, drafters=drafters, spec=SpecConfig(lookahead=lookahead)
        )


PAIRS = (
    Pair("Starcoder-15B", "Starcoder-168M", "HumanEval", 20.6, 6.8, 0.93, 1.35, 1.19, 1.92),
    Pair("Starcoder-15B", "Starcoder-168M", "MBPP", 21.0, 6.8, 0.90, 1.54, 1.20, 1.66),
    Pair("Phi3-14B", "Phi3-4B", "Alpaca", 49.6, 33.4, 0.87, None, None, 1.60),
    Pair("Phi3-14B", "Phi3-4B", "HumanEval", 52.1, 34.0, 0.95, 1.29, 1.23, 1.41),
    Pair("Phi3-14B", "Phi3-4B", "CNN-DM", 52.4, 34.6, 0.93, 4.77, 3.88, 1.39),
    Pair("Phi3-14B", "Phi3-4B", "MBPP", 52.2, 34.3, 0.94, 1.43, 1.27, 1.37),
    Pair("Vicuna-13B", "Vicuna-68M", "CNN-DM", 37.7, 2.5, 0.63, 5.36, 1.04, 1.47),
    Pair("Vicuna-13B", "Vicuna-68M", "Alpaca", 33.3, 2.5, 0.58, 1.15, 1.05, 1.41),
    Pair("Vicuna-7B", "Vicuna-68M", "CNN-DM", 29.4, 2.5, 0.67, 4.53, 1.06, 1.29),
    Pair("Vicuna-7B", "Vicuna-68M", "Alpaca", 26.0, 2.5, 0.59, 1.19, 1.06, 1.70),
)


@dataclass(frozen=True)
class Waited:
    """On real threads: the speedup of DSI over SI, and the overhead over virtual time."""

    speedup: float
    overhead_si: float
    overhead_dsi: float


@dataclass(frozen=True)
class Line:
    """The speedup of DSI over SI, each with the best of the lookaheads it may use."""

    pair: Pair
    exact: float  # the ratio of the expected times
    simulated: float  # of the mean times in virtual time
    exact_without_ttft: float
    simulated_paper_accounting: float
    paper_accounting_without_extra: float  # the forward after each rejection left out
    best_lookahead_si: int
    best_lookahead_dsi: int
    minimal_lookahead: int
    exact_minimal_lookahead: float
    simulated_drafters: dict[int, float]  # by the number of drafters, on eight processors in all
    si_ms: float
    dsi_ms: float
    nonsi_ms: float
    waited: Waited | None

    @property
    def published(self) -> float:
        return self.pair.published

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"published": self.published}


def table2(repeats: int = 100, real_time_repeats: int = 0, progress: Progress = no_progress) -> list[Line]:
    """All pairs, also on real threads if that is to be repeated."""
    if repeats < 2 or real_time_repeats < 0:
        raise ValueError(f"repeats {repeats}, on threads {real_time_repeats}: must be at least 2, and at least 0")
    lines = []
    for pair in PAIRS:
        lines.append(line(pair, repeats, real_time_repeats))
        progress()
    return lines


def line(pair: Pair, repeats: int, real_time_repeats: int = 0) -> Line:
    si, dsi = best_si(pair, pair.latency), best_dsi(pair, pair.latency)
    without_ttft = LatencyModel(pair.target_ms, pair.drafter_ms)
    least = minimal_lookahead(pair.target_ms, pair.drafter_ms, SP)
    minimal_ms = float(theory.dsi(TOKENS, pair.latency, pair.acceptance, least, SP))
    ran_si = simulate(pair.simulation(si[1]), "si", repeats)
    ran_dsi = simulate(pair.simulation(dsi[1]), "dsi", repeats)
    return Line(
        pair=pair,
        exact=si[0] / dsi[0],
        simulated=ran_si.mean_ms / ran_dsi.mean_ms,
        exact_without_ttft=best_si(pair, without_ttft)[0] / best_dsi(pair, without_ttft)[0],
        simulated_paper_accounting=paper_accounting(pair, extra=True),
        paper_accounting_without_extra=paper_accounting(pair, extra=False),
        best_lookahead_si=si[1],
        best_lookahead_dsi=dsi[1],
        minimal_lookahead=least,
        exact_minimal_lookahead=si[0] / minimal_ms,
        simulated_drafters={n: ran_si.mean_ms / with_drafters(pair, n, repeats) for n in (2, 3)},
        si_ms=si[0],
        dsi_ms=dsi[0],
        nonsi_ms=theory.nonsi(TOKENS, pair.latency),
        waited=on_threads(pair, ran_si, ran_dsi, real_time_repeats) if real_time_repeats else None,
    )


def best_si(pair: Pair, latency: LatencyModel) -> tuple[float, int]:
    """The least expected time, and the lookahead that has it."""
    return min((float(theory.si(TOKENS, latency, pair.acceptance, k)), k) for k in LOOKAHEADS)


def best_dsi(pair: Pair, latency: LatencyModel) -> tuple[float, int]:
    return min((float(theory.dsi(TOKENS, latency, pair.acceptance, k, SP)), k) for k in pair.allowed)


def paper_accounting(pair: Pair, extra: bool) -> float:
    si = min(forward_counts.si(TOKENS, pair.latency, pair.acceptance, k, extra) for k in LOOKAHEADS)
    return si / min(forward_counts.dsi(TOKENS, pair.latency, pair.acceptance, k) for k in pair.allowed)


def with_drafters(pair: Pair, drafters: int, repeats: int) -> float:
    """Drafters err independently and take a processor each from the targets; the least lookahead of Eq. (1)."""
    sp = PROCESSORS - drafters
    lookahead = minimal_lookahead(pair.target_ms, pair.drafter_ms, sp)
    return simulate(pair.simulation(lookahead, drafters, sp), "dsi", repeats).mean_ms


def on_threads(pair: Pair, si: Result, dsi: Result, repeats: int) -> Waited:
    """The same seeds as in virtual time, SI and DSI interleaved, so that the load of the machine affects both."""
    times: dict[str, list[float]] = {"si": [], "dsi": []}
    virtual: dict[str, list[float]] = {"si": [], "dsi": []}
    for seed in range(repeats):
        for result in (si, dsi):
            config = pair.simulation(result.lookahead or 1)
            times[result.algorithm].append(config.run(result.algorithm, seed, real_time=True).ms)
            virtual[result.algorithm].append(config.run(result.algorithm, seed).ms)
    real, ideal = ({name: sum(ms) for name, ms in kind.items()} for kind in (times, virtual))
    return Waited(real["si"] / real["dsi"], real["si"] / ideal["si"] - 1, real["dsi"] / ideal["dsi"] - 1)
