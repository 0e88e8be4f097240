"""Run the same prompts under every algorithm, interleaved and repeated, and report texts that are not equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from dsi.core.progress import Progress, no_progress
from dsi.core.request import Completion
from dsi.core.spec import SpecConfig
from dsi.core.stats import mean
from dsi.experiments.divergence import Divergence, divergence
from dsi.planning.simulation import SECOND, TITLES

if TYPE_CHECKING:
    from dsi.engine.engine import Engine

PROMPTS = (
    "Once upon a time",
    "Tom and his dog",
    "One day a dragon",
    "Lily had a red",
    "In the forest there lived",
    "Ben wanted to",
)
CLASSES = {  # what the built-in pair was trained on, and what it was not
    "stories": PROMPTS[:4],
    "code": (
        "def fibonacci(n):\n    if n < 2:\n        return",
        "import os\n\nfor name in os.listdir(",
        "SELECT name, count(*) FROM orders WHERE",
        '{"id": 17, "tags": ["a", "b"], "size":',
    ),
    "history": (
        "The Roman Senate under Augustus",
        "In 49 BC Caesar crossed the Rubicon and",
        "The aqueducts of Rome carried",
        "Hannibal led his elephants across the Alps",
    ),
    "random words": (
        "zebra quantum left mug ordinal",
        "of seventeen blue the carburettor wept",
        "gravel piano under sixth yes mitochondria",
        "tax whale ladder minus apricot verb",
    ),
}


@dataclass(frozen=True)
class Row:
    """One algorithm over all prompts and repeats: rates in tokens per second, counts and times per text."""

    algorithm: str
    lookahead: int | None
    rates: tuple[float, ...]
    forwards: float
    wasted: float
    overlap: dict[str, Any]  # means of the statistics of the overlap
    unspeculated: float  # tokens that `auto` generated without speculation

    @property
    def name(self) -> str:
        return title(SpecConfig(self.algorithm, self.lookahead))

    @property
    def runs(self) -> int:
        return len(self.rates)

    @property
    def tokens_per_second(self) -> float:
        return median(self.rates)

    @property
    def low(self) -> float:
        return quartiles(self.rates)[0]

    @property
    def high(self) -> float:
        return quartiles(self.rates)[2]

    def over(self, other: Row) -> float:
        """Return how many times as fast it is: the median ratio of runs that were side by side."""
        return median(a / b for a, b in zip(self.rates, other.rates))

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Comparison:
    """A row per algorithm, and the prompts whose texts are not all equal."""

    rows: list[Row]
    divergences: list[Divergence]


def title(spec: SpecConfig) -> str:
    """Return the algorithm's title, with the lookahead where it is given."""
    return TITLES[spec.algorithm] + (f" ({spec.lookahead})" if spec.lookahead else "")


def quartiles(values: Sequence[float]) -> list[float]:
    return quantiles(values, n=4) if len(values) > 1 else [*values] * 3


def specs(algorithms: Iterable[str], si_lookaheads: Sequence[int]) -> list[SpecConfig]:
    """Return a configuration per algorithm; SI has several lookaheads, so that it is compared at its best."""
    return [
        SpecConfig(name, lookahead) for name in algorithms for lookahead in (si_lookaheads if name == "si" else (None,))
    ]


def compare(
    engine: Engine,
    configs: Sequence[SpecConfig],
    prompts: Sequence[str],
    repeats: int,
    options: dict[str, Any],
    progress: Progress = no_progress,
) -> Comparison:
    """Return a row per algorithm, with the fastest of its lookaheads, and where texts were not equal.

    Under rules that depend on the draft tokens each algorithm generates its own text, the same in every repeat.
    """
    one_text = options.get("rule", "match") == "match" or not options.get("temperature")
    done: dict[SpecConfig, list[Completion]] = {spec: [] for spec in configs}
    for _ in range(repeats):
        for prompt in prompts:
            for spec, texts in done.items():
                texts.append(engine.generate(prompt, algorithm=spec.algorithm, lookahead=spec.lookahead, **options))
                progress()
    rows = [row(spec, texts) for spec, texts in done.items()]
    fastest = {row.algorithm: row for row in sorted(rows, key=lambda row: row.tokens_per_second)}
    by_name = {title(spec): texts for spec, texts in done.items()}
    groups = [by_name] if one_text else [{name: texts} for name, texts in by_name.items()]
    return Comparison(
        [fastest[name] for name in dict.fromkeys(spec.algorithm for spec in configs)],
        [found for group in groups for found in _divergences(engine, prompts, group)],
    )


def _divergences(
    engine: Engine, prompts: Sequence[str], texts: Mapping[str, Sequence[Completion]]
) -> Iterator[Divergence]:
    """Compare texts that should be equal: of each name, those of all prompts, repeated."""
    for i, prompt in enumerate(prompts):
        own = {name: completions[i :: len(prompts)] for name, completions in texts.items()}
        if parted := divergence(engine, prompt, own):
            yield parted


def row(spec: SpecConfig, texts: Sequence[Completion], unit_ms: int = SECOND) -> Row:
    """Summarize the texts of one configuration, whose clock counts units of `unit_ms` milliseconds."""
    return Row(
        spec.algorithm,
        spec.lookahead,
        rates=tuple(len(text.tokens) * SECOND / unit_ms / float(text.elapsed) for text in texts),
        forwards=fmean(text.tally.forwards for text in texts),
        wasted=fmean(text.tally.wasted for text in texts),
        overlap=mean([text.overlap for text in texts if text.overlap], unit_ms),
        unspeculated=fmean(text.unspeculated for text in texts),
    )
