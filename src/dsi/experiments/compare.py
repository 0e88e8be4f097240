"""The same prompts under every algorithm: interleaved, repeated, and checked to give the same texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from dsi.core.progress import Progress, no_progress
from dsi.core.request import Completion
from dsi.core.spec import check_algorithm
from dsi.core.stats import mean
from dsi.planning.simulation import TITLES

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
CLASSES = {  # what the built-in pair was made for, and what it was not
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
Contender = tuple[str, int | None]  # an algorithm, and the lookahead it is tried with; None: its own


@dataclass(frozen=True)
class Row:
    """One algorithm over all prompts and repeats; rates are tokens per second, counts and times per text."""

    algorithm: str
    lookahead: int | None
    rates: tuple[float, ...]
    forwards: float
    wasted: float
    overlap: dict[str, Any]  # what the overlap did, in the mean
    unspeculated: float  # tokens that `auto` wrote without speculation

    @property
    def name(self) -> str:
        return TITLES[self.algorithm] + (f" ({self.lookahead})" if self.lookahead else "")

    @property
    def runs(self) -> int:
        return len(self.rates)

    @property
    def tokens_per_second(self) -> float:
        return median(self.rates)

    @property
    def low(self) -> float:
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        return self._quartiles()[2]

    def _quartiles(self) -> list[float]:
        return quantiles(self.rates, n=4) if len(self.rates) > 1 else [*self.rates] * 3

    def over(self, other: Row) -> float:
        """How many times as fast: the median of the ratios of runs that were side by side."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates))

    def json(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "low": self.low,
            "high": self.high,
        }


def contenders(algorithms: Sequence[str], si_lookaheads: Sequence[int]) -> list[Contender]:
    """SI is tried with several blocks, so that it is compared at its best."""
    found: list[Contender] = []
    for name in [check_algorithm(name, auto=True) for name in algorithms]:
        found += [(name, block) for block in si_lookaheads] if name == "si" else [(name, None)]
    return found


def compare(
    engine: Engine,
    names: Sequence[Contender],
    prompts: Sequence[str],
    repeats: int,
    options: dict[str, Any],
    progress: Progress = no_progress,
) -> list[Row]:
    """A row for each algorithm; of several lookaheads the fastest. Different texts are an error.

    By the rules that need the guess each algorithm writes a text of its own, every time the same.
    """
    one_text = options.get("rule", "match") == "match" or not options.get("temperature")
    done: dict[Contender, list[Completion]] = {name: [] for name in names}
    for _ in range(repeats):
        for prompt in prompts:
            for algorithm, lookahead in names:
                text = engine.generate(prompt, algorithm=algorithm, lookahead=lookahead, **options)
                done[algorithm, lookahead].append(text)
                progress()
            check_equal(prompt, [texts[-1] for texts in done.values()] if one_text else ())
    for texts in done.values():
        for i, prompt in enumerate(prompts):
            check_equal(prompt, texts[i :: len(prompts)])
    rows = [row(name, texts) for name, texts in done.items()]
    best = {name: max((r for r in rows if r.algorithm == name), key=lambda r: r.tokens_per_second) for name, _ in names}
    return list(best.values())


def check_equal(prompt: str, texts: Iterable[Completion]) -> None:
    if len({text.tokens for text in texts}) > 1:
        raise ValueError(f"prompt {prompt!r}: different texts were written")


def row(name: Contender, texts: Sequence[Completion]) -> Row:
    return Row(
        *name,
        rates=tuple(len(text.tokens) / text.elapsed for text in texts),
        forwards=sum(text.tally.forwards for text in texts) / len(texts),
        wasted=sum(text.tally.wasted for text in texts) / len(texts),
        overlap=mean([text.overlap for text in texts if text.overlap]),
        unspeculated=sum(text.unspeculated for text in texts) / len(texts),
    )
