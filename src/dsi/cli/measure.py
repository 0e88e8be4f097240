"""`dsi measure`: latencies and acceptance rates of a pair of models, each alone on one server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsi.cli import output as show
from dsi.cli.options import Fields, Json, options
from dsi.core.fields import option
from dsi.engine.config import EngineConfig
from dsi.models.names import BUILTIN, full_name

if TYPE_CHECKING:
    from dsi.engine.build_processes import ModelPair
    from dsi.engine.prompts import PromptSample
    from dsi.experiments.acceptance import Acceptance, Estimate
    from dsi.experiments.by_rule import Accepted
    from dsi.experiments.latency import PairLatencies
    from dsi.experiments.profile import Profile

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a pair of models: what the simulator and the planner want to know.",
    epilog="Example: dsi measure latency --out profile.json, then dsi plan --profile profile.json --gpus 8",
)
RUN_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # that the table shows
RARE = 0.005  # share of runs below which a length is not shown
TEMPERATURES, LOOKAHEAD = "0,0.7,1", 5  # where rules are compared


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are measured, and how many tokens after each."""

    dataset: str = option(
        "builtin; from the hub humaneval, mbpp, cnn-dm, alpaca or spec-bench; or a file that ends in .jsonl or "
        ".jsonl.gz.",
        "builtin",
    )
    field: str | None = option("The field of the prompt in a file; without it, prompt.", None)
    template: str | None = option("Make the prompts of a file as the paper does for this dataset.", None)
    count: int = option("Prompts, drawn at random.", 50)
    tokens: int = option("Tokens generated after each prompt, at most.", 256)
    seed: int = option("Same seed, same prompts.", 0)

    def check(self, min_count: int, min_tokens: int) -> None:
        for name, number, least in (("count", self.count, min_count), ("tokens", self.tokens, min_tokens)):
            if number < least:
                raise ValueError(f"{name} {number}: must be at least {least}")


PAIR = Fields(
    only=("target", "drafter", "dtype", "threads"),
    help={
        "drafter": "A smaller model of the same vocabulary, likewise.",
        "threads": "Threads of each model; without it, as on a server of `dsi generate`.",
    },
)
Pair = Annotated[EngineConfig, PAIR]
Out = Annotated[
    Path | None,
    typer.Option(help="Write a profile (.json), or add to it, for --profile of plan and simulate."),
]


@app.command(epilog="Example: dsi measure latency --count 10 --out profile.json")
@options
def latency(
    *,
    config: Pair,
    prompts: Annotated[PromptOptions, Fields(defaults={"tokens": 20})],
    shape: Annotated[
        str | None, typer.Option(help="Instead: a model of this shape, as the paper names it, or llama-1.1b.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="With --shape: its weights are random, and its times real.")
    ] = False,
    device: Annotated[str, typer.Option(help="With --shape: cpu, or cuda:0.")] = "cpu",
    out: Out = None,
    json: Json = False,
) -> None:
    """Time to first token and per token of each model alone, and forwards by their number of new tokens."""
    if shape is not None:
        _measure_shape(shape, random_weights, device, config.dtype, json)
        return
    prompts.check(min_count=1, min_tokens=2)
    run = Measurement.prepare(config, prompts, out, json)
    from dsi.experiments.latency import latencies

    pair, tokens = run.pair, prompts.tokens
    with show.progress("texts", 2 * len(run.sample.prompts)) as advance:
        measured = latencies(pair.target.fresh, pair.drafter.fresh, run.sample.prompts, tokens, pair.context, advance)
    if not json:
        _print_latencies(measured)
        print(f"measured: {run.title}, each model alone; spread is one standard deviation")
    run.save("latency", measured.json())


@app.command(epilog="Example: dsi measure acceptance --count 10 --tokens 64 --out profile.json")
@options
def acceptance(
    *,
    config: Pair,
    prompts: PromptOptions,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Instead: compare match, reject, block or specinfer; several separated by commas."),
    ] = None,
    temperature: Annotated[
        str | None, typer.Option(help=f"With --rule: several separated by commas; without it, {TEMPERATURES}.")
    ] = None,
    lookahead: Annotated[
        int | None, typer.Option(help=f"With --rule: draft tokens in a block; without it, {LOOKAHEAD}.")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """How often draft tokens are right: the paper's estimate, a count, and whether errors are independent.

    With --rule: how many draft tokens each rule accepts, beside what theory promises at the same positions.
    """
    if rule is not None:
        rules = [name.strip() for names in rule for name in names.split(",")]
        temperatures = _numbers("temperature", temperature or TEMPERATURES)
        _compare_rules(config, prompts, rules, temperatures, LOOKAHEAD if lookahead is None else lookahead, out, json)
        return
    for name, value in (("temperature", temperature), ("lookahead", lookahead)):
        if value is not None:
            raise ValueError(f"{name} {value}: needs a --rule; without one the texts are greedy")
    prompts.check(min_count=2, min_tokens=1)
    run = Measurement.prepare(config, prompts, out, json)
    from dsi.experiments.acceptance import acceptance as measure

    pair, ends = run.pair, run.pair.tokenizer.eos_token_ids
    with show.progress("prompts", len(run.sample.prompts)) as advance:
        measured = measure(pair.target.fresh, pair.drafter.fresh, run.sample.prompts, prompts.tokens, ends, advance)
    if not json:
        _print_acceptance(measured)
        print(f"measured: {run.title} at most, greedy; the law is that of independent errors at this rate")
    run.save("acceptance", measured.json())


def _compare_rules(
    config: EngineConfig,
    prompts: PromptOptions,
    rules: list[str],
    temperatures: list[float],
    lookahead: int,
    out: Path | None,
    json: bool,
) -> None:
    from dsi.experiments.by_rule import check, settings, summary, trials

    settings(rules, temperatures)
    check(prompts.count, prompts.tokens, lookahead)
    prompts.check(min_count=2, min_tokens=1)
    run = Measurement.prepare(config, prompts, out, json)
    with show.progress("texts", len(run.sample.prompts) * len(set(temperatures))) as advance:
        accepted = trials(
            lambda: run.pair.target.fresh().backend,
            lambda: run.pair.drafter.fresh().backend,
            run.sample.prompts,
            prompts.tokens,
            rules,
            temperatures,
            lookahead,
            run.pair.tokenizer.eos_token_ids,
            prompts.seed,
            advance,
        )
    results = [summary(*setting, blocks) for setting, blocks in accepted.items()]
    if not json:
        _print_rules(results, lookahead)
        print(f"measured: {run.title} at most, written by the target alone; promised: from the same logits")
    run.save("rules", {"lookahead": lookahead, "results": [result.json() for result in results]})


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: must be numbers separated by commas") from None


def _print_rules(results: list[Accepted], lookahead: int) -> None:
    heads = ["temperature", "rule", "accepted per place (95%)", "promised", "1 - TV"]
    heads += [f"per block of {lookahead} (95%)", "promised"]
    rows = [
        [
            f"{result.temperature:g}",
            result.rule + (f", {result.guesses} guesses" if result.guesses > 1 else ""),
            _with_interval(result.places),
            _share(result.promised),
            _share(result.ceiling),
            _with_interval(result.blocks),
            _share(result.block_promised),
        ]
        for result in results
    ]
    show.table(heads, rows)
    _print_ranks([result for result in results if result.chances])
    if any(result.temperature == 0 for result in results):
        print("at temperature 0 nothing is left to chance: all rules are one, and measured once")


def _print_ranks(results: list[Accepted]) -> None:
    if results:
        print("\nthe target's token is the drafter's")
        rows = [
            [
                f"{result.temperature:g}",
                *(f"{chance:.3f} ({n})" for chance, n in zip(result.chances, result.rank_counts)),
            ]
            for result in results
        ]
        show.table(["temperature", "first choice", "second", "third"], rows)


def _by_rank(counts: Sequence[int], places: int) -> str:
    return ", ".join(f"{count / places:.3f} ({count})" for count in counts)


def _with_interval(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


@dataclass(frozen=True)
class Measurement:
    """The models and prompts of a measurement, and where its figures go."""

    config: EngineConfig
    prompts: PromptOptions
    out: Path | None
    json: bool
    profile: Profile
    pair: ModelPair
    sample: PromptSample

    @classmethod
    def prepare(cls, config: EngineConfig, prompts: PromptOptions, out: Path | None, json: bool) -> Measurement:
        """Refuse what is impossible, quickest first; then load the models and draw the prompts."""
        from dsi.experiments.datasets import read

        if len(config.drafter) > 1:
            raise ValueError(f"drafter {' '.join(config.drafter)}: one at a time is measured")
        config.check_measurable()
        texts = read(prompts.dataset, prompts.field, prompts.template)
        profile = _profile(config, prompts.dataset, out)
        loading = f"loading {config.target} and {config.drafter[0]}"
        with show.working(loading, quiet=config.target == BUILTIN) as status:
            from dsi.engine.build_processes import load_model_pair
            from dsi.engine.prompts import sample_prompts

            pair = load_model_pair(config, status)
        sample = sample_prompts(texts, pair.tokenizer, prompts.count, prompts.seed, prompts.tokens, pair.context)
        _report_skipped(sample, prompts, pair.context)
        return cls(config, prompts, out, json, profile, pair, sample)

    @property
    def title(self) -> str:
        count, tokens = len(self.sample.prompts), self.prompts.tokens
        return f"{count} prompts of {self.profile.dataset}, {tokens} tokens each"

    @property
    def circumstances(self) -> dict[str, Any]:
        prompts = asdict(self.prompts)
        how = {name: prompts[name] for name in ("field", "template", "tokens", "seed")} | {"dtype": self.config.dtype}
        how |= {"prompts": len(self.sample.prompts), "skipped": self.sample.skipped}
        return how | {f"{role}_threads": getattr(self.pair, role).threads for role in ("target", "drafter")}

    def save(self, part: str, figures: dict[str, Any]) -> None:
        """Print before writing, so that a full disk costs no figures; add to what the file holds by now."""
        figures = self.circumstances | figures
        if self.json:
            show.document(**self.profile.with_part(part, figures).json())
        if self.out is not None:
            self.profile.beside(self.out).with_part(part, figures).save(self.out)
            print(f"wrote {self.out}", file=sys.stderr)


def _profile(config: EngineConfig, dataset: str, out: Path | None) -> Profile:
    """The profile that is written; a file of prompts goes by its name alone, wherever it is."""
    from dsi.experiments.profile import Profile

    profile = Profile(full_name(config.target), full_name(config.drafter[0]), Path(dataset).name)
    if out is not None:
        show.writable(out, (".json",))
        profile.beside(out)
    return profile


def _report_skipped(sample: PromptSample, prompts: PromptOptions, context: int) -> None:
    if sample.skipped:
        count = f"{sample.skipped} prompt{'s' * (sample.skipped > 1)}"
        room = f"room for {prompts.tokens} tokens in the models' context of {context}"
        print(f"dsi: skipped {count} without {room}", file=sys.stderr)
    if len(sample.prompts) < prompts.count:
        print(f"dsi: {len(sample.prompts)} prompts instead of {prompts.count}: there are no more", file=sys.stderr)


def _print_latencies(measured: PairLatencies) -> None:
    rows = [
        [
            name,
            f"{timing.ttft_ms.mean:.2f} ± {timing.ttft_ms.stdev:.2f}",
            f"{timing.tpot_ms.mean:.2f} ± {timing.tpot_ms.stdev:.2f}",
            f"{timing.ratio:.2f}",
        ]
        for name, timing in (("target", measured.target), ("drafter", measured.drafter))
    ]
    show.table(["", "TTFT, ms", "TPOT, ms", "TTFT/TPOT"], rows)
    print(f"the drafter takes {measured.drafter_share:.1%} of the target's time per token\n")
    one = measured.curve[1]
    curve = [[str(width), f"{ms:.2f}", f"{ms / one:.2f}"] for width, ms in measured.curve.items()]
    show.table(["new tokens", "target forward, ms", "over one token's"], curve)
    print(f"each new token more adds {measured.per_token_ms:.3f} ms (slope of the curve)\n")


def _print_acceptance(measured: Acceptance) -> None:
    rows = [
        ["counted, at every place of the target's texts", f"{measured.rate:.3f}"],
        ["  95% interval", f"{measured.low:.3f} to {measured.high:.3f}"],
        ["  after an acceptance", _share(measured.after_acceptance.rate)],
        ["  after a rejection", _share(measured.after_rejection.rate)],
        ["  the drafter's first, second, third choice", _by_rank(measured.rank_counts, measured.places)],
        ["the paper's estimate, 1 - 1 / (1 + mean match)", f"{measured.estimate:.3f}"],
        ["  95% interval", "{:.3f} to {:.3f}".format(*measured.estimate_interval)],
        ["  mean match of the two texts, tokens", f"{measured.mean_match:.1f}"],
        ["  texts equal to the very end, so cut off there", f"{measured.whole} of {len(measured.matches)}"],
        ["  the estimate without taking them for rejections", f"{measured.corrected:.3f}"],
        ["texts that the target ended early", f"{measured.ended} of {len(measured.matches)}"],
        ["places counted", str(measured.places)],
    ]
    show.table(["acceptance", ""], rows)
    law = measured.geometric
    steps = [step for step in law.steps if step.length in RUN_LENGTHS and max(step.survival, step.law) >= RARE]
    print()
    show.table(
        ["accepted in a row, at least", "observed", "geometric law"],
        [[str(step.length), f"{step.survival:.3f}", f"{step.law:.3f}"] for step in steps],
    )
    print(f"{law.verdict} (largest gap {law.distance:.3f}; {_chi_square(measured)})\n")


def _measure_shape(shape: str, random_weights: bool, device: str, dtype: str, json: bool) -> None:
    from dsi.engine.devices import Placement, check_available, parse_devices
    from dsi.engine.profile_cuda import forwards_ms

    if not random_weights:
        raise ValueError(f"shape {shape!r}: has no weights of its own; say --random-weights")
    [place] = parse_devices(device)
    check_available(Placement((place,), place))
    from dsi.engine.build_cuda import random_cuda_model

    model = random_cuda_model(shape, dtype, device)
    measured = forwards_ms(model)
    if json:
        figures = {"label": "measured, random weights", "shape": shape, "device": device, "dtype": dtype}
        show.document(**figures, ms={str(width): ms for width, ms in measured.items()})
        return
    rows = [[str(width), f"{ms:.2f}", f"{ms / measured[1]:.2f}"] for width, ms in measured.items()]
    show.table(["new tokens", "forward, ms", "over one token's"], rows)
    print(f"measured with random weights: {shape}, {dtype}, on {device}; {model.eager_reason or 'CUDA graphs'}")


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _chi_square(measured: Acceptance) -> str:
    law = measured.geometric
    return f"chi-square {law.chi_square:.1f} with {law.freedom} degrees of freedom, p = {law.p_value:.2g}"
