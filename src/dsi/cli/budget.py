"""`dsi compare --budget`: the same processors for every algorithm, measured here or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsi.cli import output as show
from dsi.cli.engine import load_engine, sampling_arguments
from dsi.core.fields import option
from dsi.core.messages import Sampling
from dsi.core.spec import SpecConfig
from dsi.engine.config import FLOAT32, EngineConfig

if TYPE_CHECKING:
    from dsi.engine.engine import Engine
    from dsi.experiments.budget import Configuration, Table
    from dsi.planning.simulation import SimulationConfig

Classes = Mapping[str, Sequence[str]]  # prompts by class
ARRANGED = (  # options of which each algorithm gets its own values
    "sp",
    "target_mp",
    "lookahead",
    "min_draft",
    "threads",
    "target_devices",
    "drafter_device",
    "fleet",
    "target_resources",
    "drafter_resources",
)
BUDGET_ONLY = ("cores", "gpus", "profile", "parallel_fraction", "out")
MODEL_OPTIONS = ("target", "drafter", "vocab", "prompts", "temperature", "top_p", "top_k", "rule", "dtype")
CANCEL_POINTS = 5  # of a target's forward on a GPU: every few layers
RUNS_PER_REPEAT = 4  # where a profile stands for the prompts


@dataclass(frozen=True)
class BudgetOptions:
    cores: int | None = option(
        "With --budget: so many cores, simulated if there are fewer; without it, all of them.", None
    )
    gpus: int | None = option("With --budget: so many GPUs instead, simulated from a --profile.", None)
    profile: Path | None = option("With --gpus: a file of `dsi measure`, which has what one GPU takes.", None)
    parallel_fraction: float | None = option(
        "Where --budget simulates: the share of a target forward, 0 to 1, that is divided among its processors; "
        "0.8 without it.",
        None,
    )
    out: tuple[Path, ...] = option("With --budget: also write a picture (.svg, .png); repeatable.", ())


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse options that would be without effect, of those that the user gave."""
    if not given.get("budget"):
        _refuse(given, BUDGET_ONLY, "is for --budget")
        return
    _refuse(given, ARRANGED, "not with --budget, which arranges the processors for each algorithm")
    if ("gpus" in given) != ("profile" in given):
        name = "gpus" if "gpus" in given else "profile"
        raise ValueError(f"--{name} {given[name]}: --gpus and --profile go together")
    if "gpus" in given:
        _refuse(given, ("cores",), "not with --gpus")
        _refuse(given, MODEL_OPTIONS, "not with --profile, from which all is simulated")


def _refuse(given: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    for name in names:
        if name in given:
            value = given[name]
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            raise ValueError(f"--{name.replace('_', '-')} {shown}: {reason}")


@dataclass(frozen=True)
class BudgetComparison:
    """A comparison with the same number of processors for every algorithm."""

    config: EngineConfig
    sampling: Sampling
    max_new_tokens: int
    repeats: int
    algorithms: str
    si_lookaheads: Sequence[int]
    options: BudgetOptions
    json: bool

    def run(self, classes: Callable[[], Classes]) -> None:
        for path in self.options.out:
            show.writable(path, show.PICTURES)
        if self.options.profile is None:
            self._on_cores(classes())
        else:
            self._on_gpus(self.options.profile)

    def _on_cores(self, classes: Classes) -> None:
        """Measure, or simulate where this machine has too few cores."""
        from dsi.experiments import budget
        from dsi.experiments.divergence import check_equal

        here, asked = budget.cores_here(), self.options.cores
        cores = here if asked is None else budget.check_processors("cores", asked, 1)
        budget.check_one_text(self.sampling.rule, self.sampling.temperature)
        if self.max_new_tokens < 1:
            raise ValueError(f"max new tokens {self.max_new_tokens}: must be at least 1")
        configs = self._configurations(cores)
        if cores > here:
            self._simulate_cores(cores, configs, classes)
            return
        if self.options.parallel_fraction is not None:
            count = budget.plural(cores, "core")
            raise ValueError(
                f"--parallel-fraction {self.options.parallel_fraction}: {count} of {here} here, so all is measured"
            )
        texts = sum(map(len, classes.values())) * self.repeats
        with (
            budget.engines(self._load, configs) as running,
            show.progress("texts", len(configs) * texts) as advance,
        ):
            exact = all(engine.deployment.exact for engine in running.values())
            tables = budget.measured(running, classes, self.repeats, self._arguments, advance)
        divergences = [found for table in tables for found in table.divergences]
        about = f"{_runs(tables)} on {budget.plural(cores, 'core')}, {show.equality(divergences)}"
        self._report(tables, about, cores=cores, equal=not divergences)
        if exact or self.config.dtype == FLOAT32:
            check_equal(divergences)

    def _simulate_cores(self, cores: int, configs: Sequence[Configuration], classes: Classes) -> None:
        """Measure latencies and acceptance rates here, and simulate more cores than there are."""
        from dsi.experiments import budget

        fraction = self._parallel_fraction()
        prompts = sum(map(len, classes.values()))
        with self._load("dsi", sp=1) as engine, show.progress("texts", prompts) as advance:
            rates = budget.counted(engine, classes, self._arguments, advance)
            # Forwards on one core, from which those on several are scaled.
            simulation = engine.deployment.simulation(1, self.max_new_tokens).with_latency(alone=None)
        simulations = {name: replace(simulation, acceptance=rate) for name, rate in rates.items()}
        count = max(map(len, classes.values())) * self.repeats
        origin = f"of the {budget.cores_here()} here" if budget.cores_here() > 1 else "here"
        self._simulate(simulations, cores, "core", configs, fraction, count, f"as measured on one {origin}")

    def _on_gpus(self, path: Path) -> None:
        """Simulate GPUs by the latencies of one in a profile."""
        from dsi.experiments import budget
        from dsi.experiments.profile import Profile
        from dsi.planning.simulation import SimulationConfig

        profile = Profile.load(path)
        latency = profile.latency(path, cancel_points=CANCEL_POINTS, drafter_cancel_points=1)
        acceptance = profile.number("acceptance", path)
        simulation = SimulationConfig(latency, acceptance, sp=1, tokens=self.max_new_tokens, thread_pool=False)
        gpus = budget.check_processors("gpus", self.options.gpus or 0, 2)
        count = RUNS_PER_REPEAT * self.repeats
        simulations, configs = {profile.dataset: simulation}, self._configurations(gpus)
        self._simulate(simulations, gpus, "GPU", configs, self._parallel_fraction(), count, f"from {path}")

    def _simulate(
        self,
        simulations: Mapping[str, SimulationConfig],
        total: int,
        unit: str,
        configs: Sequence[Configuration],
        fraction: float,
        count: int,
        origin: str,
    ) -> None:
        from dsi.experiments import budget

        seeds = range(self.sampling.seed, self.sampling.seed + count)
        with show.progress("configurations", len(simulations) * len(configs)) as advance:
            tables = budget.simulated(simulations, configs, fraction, seeds, unit, advance)
        latency = next(iter(simulations.values())).latency
        about = (
            f"{_runs(tables)} on {budget.plural(total, unit)}; a target forward {latency.target_ms:.2f} ms and a "
            f"drafter's {latency.drafter_ms:.2f} ms on one {unit}, {origin}; {fraction:.0%} of a target forward is "
            f"divided among its {unit}s"
        )
        figures = {"target_ms": latency.target_ms, "drafter_ms": latency.drafter_ms, "parallel_fraction": fraction}
        self._report(tables, about, **{f"{unit.lower()}s": total}, **figures, scales=fraction)

    def _load(self, algorithm: str, **changes: Any) -> Engine:
        return load_engine(replace(self.config, **changes), SpecConfig(algorithm))

    def _configurations(self, processors: int) -> list[Configuration]:
        from dsi.experiments import budget

        return budget.configurations(budget.check_algorithms(self.algorithms), processors, self.si_lookaheads)

    def _parallel_fraction(self) -> float:
        from dsi.experiments import budget
        from dsi.planning.equation_1 import PARALLEL_FRACTION

        fraction = self.options.parallel_fraction
        return PARALLEL_FRACTION if fraction is None else budget.check_share(fraction)

    @property
    def _arguments(self) -> dict[str, Any]:
        """What `Engine.generate` takes besides the prompt."""
        return {"max_new_tokens": self.max_new_tokens, **sampling_arguments(self.sampling)}

    def _report(self, tables: list[Table], about: str, **figures: Any) -> None:
        for path in self.options.out:
            from dsi.plot import budget as chart, style

            heading = f"The same processors for every algorithm: {about.partition(';')[0]}"
            style.save(chart.figure(tables, heading), path)
        show.budget(tables, about, self.json, self.options.out, **figures)


def _runs(tables: Sequence[Table]) -> str:
    return f"{tables[0].entries[0].runs} texts of each class and configuration"
