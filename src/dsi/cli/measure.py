"""The commands that measure real models, each alone on one server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsi.cli import output as show
from dsi.engine.config import EngineConfig
from dsi.models.names import full_name

if TYPE_CHECKING:
    from dsi.engine.build_processes import ModelPair
    from dsi.engine.prompts import PromptSample
    from dsi.experiments.acceptance import Acceptance
    from dsi.experiments.by_rule import Accepted, Figure
    from dsi.experiments.latency import PairLatencies
    from dsi.experiments.profile import Profile

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a pair of models: what the simulator and the planner want to know.",
    epilog="Example: dsi measure latency --out profile.json, then dsi plan --profile profile.json --gpus 8",
)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of runs that the table shows
MEANS = ("target", "drafter", "dtype", "threads")
RARE = 0.005  # share of runs below which a length is not shown
TEMPERATURES, BLOCK = "0,0.7,1", 5  # where rules are compared

Target = Annotated[str, typer.Option(help="A model folder, a name on the hub or in the paper, or builtin.")]
Drafter = Annotated[str, typer.Option(help="A smaller model of the same vocabulary, likewise.")]
Dataset = Annotated[
    str,
    typer.Option(
        help="builtin; from the hub humaneval, mbpp, cnn-dm, alpaca or spec-bench; or a file that ends in "
        ".jsonl or .jsonl.gz."
    ),
]
Field = Annotated[str | None, typer.Option(help="The field of the prompt in a file; without it, prompt.")]
Template = Annotated[str | None, typer.Option(help="Make the prompts of a file as the paper does for this dataset.")]
Count = Annotated[int, typer.Option(help="Prompts, drawn at random.")]
Seed = Annotated[int, typer.Option(help="Same seed, same prompts.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads of each model; without it, as on a server of `dsi generate`.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Write a profile (.json), or add to it, for --profile of plan and simulate."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Shape = Annotated[
    str | None, typer.Option(help="Instead: a model of this shape, as the paper names it, or llama-1.1b.")
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="With --shape: its weights are random, and its times real.")
]
Rule = Annotated[
    list[str] | None,
    typer.Option(help="Instead: compare match, reject, block or specinfer; several separated by commas."),
]
Temperatures = Annotated[
    str | None, typer.Option(help=f"With --rule: several separated by commas; without it, {TEMPERATURES}.")
]
Lookahead = Annotated[int | None, typer.Option(help=f"With --rule: guesses in a block; without it, {BLOCK}.")]
Device = Annotated[str, typer.Option(help="With --shape: cpu, or cuda:0.")]


@app.command(epilog="Example: dsi measure latency --count 10 --out profile.json")
def latency(
    target: Target = "builtin",
    drafter: Drafter = "builtin",
    dataset: Dataset = "builtin",
    field: Field = None,
    template: Template = None,
    count: Count = 50,
    tokens: Annotated[int, typer.Option(help="Tokens written after each prompt.")] = 20,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    threads: Threads = None,
    shape: Shape = None,
    random_weights: RandomWeights = False,
    device: Device = "cpu",
    out: Out = None,
    json: Json = False,
) -> None:
    """Time to first token and per token of each model alone, and forwards by their number of new tokens."""
    if shape is not None:
        _measure_shape(shape, random_weights, device, dtype, json)
        return
    bench = _bench(locals(), count=1, tokens=2)
    from dsi.experiments.latency import latencies

    pair, chosen = bench.pair, bench.chosen
    with show.progress("texts", 2 * len(chosen.prompts)) as advance:
        found = latencies(pair.target.fresh, pair.drafter.fresh, chosen.prompts, tokens, pair.context, advance)
    if not json:
        _print_latencies(found)
        print(f"measured: {bench.said}, each model alone; spread is one standard deviation")
    bench.keep("latency", found.json())


@app.command(epilog="Example: dsi measure acceptance --count 10 --tokens 64 --out profile.json")
def acceptance(
    target: Target = "builtin",
    drafter: Drafter = "builtin",
    dataset: Dataset = "builtin",
    field: Field = None,
    template: Template = None,
    count: Count = 50,
    tokens: Annotated[int, typer.Option(help="Tokens written after each prompt, at most.")] = 256,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    threads: Threads = None,
    rule: Rule = None,
    temperature: Temperatures = None,
    lookahead: Lookahead = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """How often the drafter is right: the paper's estimate, a count, and whether luck has a memory.

    With --rule: how many guesses each rule accepts, beside what theory promises of the same places.
    """
    if rule is not None:
        _measure_rules(locals())
        return
    for name, value in (("temperature", temperature), ("lookahead", lookahead)):
        if value is not None:
            raise ValueError(f"{name} {value}: needs a --rule; without one the texts are greedy")
    bench = _bench(locals(), count=2, tokens=1)
    from dsi.experiments.acceptance import acceptance as measured

    pair, chosen = bench.pair, bench.chosen
    with show.progress("prompts", len(chosen.prompts)) as advance:
        found = measured(
            pair.target.fresh, pair.drafter.fresh, chosen.prompts, tokens, pair.tokenizer.eos_token_ids, advance
        )
    if not json:
        _print_acceptance(found)
        print(f"measured: {bench.said} at most, greedy; the law is that of independent luck at this rate")
    bench.keep("acceptance", found.json())


def _measure_rules(options: dict[str, Any]) -> None:
    from dsi.experiments.by_rule import check, settings, summary, trials

    rules = [name.strip() for each in options["rule"] for name in each.split(",")]
    warmths = _numbers("temperature", options["temperature"] or TEMPERATURES)
    lookahead = BLOCK if options["lookahead"] is None else options["lookahead"]
    settings(rules, warmths)
    check(options["count"], options["tokens"], lookahead)
    bench = _bench(options, count=2, tokens=1)
    pair, chosen = bench.pair, bench.chosen
    with show.progress("texts", len(chosen.prompts) * len(set(warmths))) as advance:
        found = trials(
            lambda: pair.target.fresh().backend,
            lambda: pair.drafter.fresh().backend,
            chosen.prompts,
            options["tokens"],
            rules,
            warmths,
            lookahead,
            pair.tokenizer.eos_token_ids,
            options["seed"],
            advance,
        )
    results = [summary(*which, each) for which, each in found.items()]
    if not options["json"]:
        _print_rules(results, lookahead)
        print(f"measured: {bench.said} at most, written by the target alone; promised: from the same rows")
    figures = {"lookahead": lookahead, "results": [each.json() for each in results]}
    bench.keep("rules", figures)


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
            f"{each.temperature:g}",
            each.rule + (f", {each.guesses} guesses" if each.guesses > 1 else ""),
            _with_interval(each.places),
            _share(each.promised),
            _share(each.ceiling),
            _with_interval(each.blocks),
            _share(each.block_promised),
        ]
        for each in results
    ]
    show.table(heads, rows)
    if any(each.temperature == 0 for each in results):
        print("at temperature 0 nothing is left to chance: all rules are one, and measured once")


def _with_interval(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"


@dataclass(frozen=True)
class Bench:
    """What a measurement works with, and where its figures go."""

    pair: ModelPair
    chosen: PromptSample
    profile: Profile
    options: dict[str, Any]

    @property
    def said(self) -> str:
        count, tokens = len(self.chosen.prompts), self.options["tokens"]
        return f"{count} prompts of {self.profile.dataset}, {tokens} tokens each"

    @property
    def circumstances(self) -> dict[str, Any]:
        how = {name: self.options[name] for name in ("field", "template", "tokens", "seed", "dtype")}
        how |= {"prompts": len(self.chosen.prompts), "skipped": self.chosen.skipped}
        return how | {f"{role}_threads": getattr(self.pair, role).threads for role in ("target", "drafter")}

    def keep(self, part: str, figures: dict[str, Any]) -> None:
        """Print before writing, so that a full disk costs no figures; write beside what is there by now."""
        figures = self.circumstances | figures
        if self.options["json"]:
            show.document(**self.profile.with_part(part, figures).json())
        out = self.options["out"]
        if out is not None:
            self.profile.beside(out).with_part(part, figures).save(out)
            print(f"wrote {out}", file=sys.stderr)


def _bench(options: dict[str, Any], **least: int) -> Bench:
    """Refuse what is impossible, quickest first; then load the models and draw the prompts."""
    from dsi.engine.prompts import sample_prompts
    from dsi.experiments import datasets as prompts

    for name, bound in least.items():
        if options[name] < bound:
            raise ValueError(f"{name} {options[name]}: must be at least {bound}")
    EngineConfig(**{name: options[name] for name in MEANS}).check_measurable()
    texts = prompts.read(options["dataset"], options["field"], options["template"])
    profile = _profile(options)
    pair = _load(options)
    count, seed, tokens = (options[name] for name in ("count", "seed", "tokens"))
    chosen = sample_prompts(texts, pair.tokenizer, count, seed, tokens, pair.context)
    _tell(chosen, count, tokens, pair.context)
    return Bench(pair, chosen, profile, options)


def _profile(options: dict[str, Any]) -> Profile:
    """A file goes by its name alone: it is the same prompts wherever it lies."""
    from dsi.experiments.profile import Profile

    target, drafter = full_name(options["target"]), full_name(options["drafter"])
    profile = Profile(target, drafter, Path(options["dataset"]).name)
    if options["out"] is not None:
        show.writable(options["out"], (".json",))
        profile.beside(options["out"])
    return profile


def _load(options: dict[str, Any]) -> ModelPair:
    from rich.console import Console

    with Console(stderr=True).status(f"loading {options['target']} and {options['drafter']}"):
        from dsi.engine.build_processes import load_model_pair

        return load_model_pair(EngineConfig(**{name: options[name] for name in MEANS}))


def _tell(chosen: PromptSample, count: int, tokens: int, context: int) -> None:
    if chosen.skipped:
        which = f"{chosen.skipped} prompt{'s' * (chosen.skipped > 1)}"
        room = f"room for {tokens} tokens in the models' context of {context}"
        print(f"dsi: skipped {which} without {room}", file=sys.stderr)
    if len(chosen.prompts) < count:
        print(f"dsi: {len(chosen.prompts)} prompts instead of {count}: there are no more", file=sys.stderr)


def _print_latencies(found: PairLatencies) -> None:
    rows = [
        [
            name,
            f"{timing.ttft_ms.mean:.2f} ± {timing.ttft_ms.stdev:.2f}",
            f"{timing.tpot_ms.mean:.2f} ± {timing.tpot_ms.stdev:.2f}",
            f"{timing.ratio:.2f}",
        ]
        for name, timing in (("target", found.target), ("drafter", found.drafter))
    ]
    show.table(["", "TTFT, ms", "TPOT, ms", "TTFT/TPOT"], rows)
    print(f"the drafter takes {found.drafter_share:.1%} of the target's time per token\n")
    one = found.curve[1]
    curve = [[str(width), f"{ms:.2f}", f"{ms / one:.2f}"] for width, ms in found.curve.items()]
    show.table(["new tokens", "target forward, ms", "over one token's"], curve)
    print(f"each new token more adds {found.per_token_ms:.3f} ms (slope of the curve)\n")


def _print_acceptance(found: Acceptance) -> None:
    rows = [
        ["counted, at every place of the target's texts", f"{found.rate:.3f}"],
        ["  95% interval", f"{found.low:.3f} to {found.high:.3f}"],
        ["  after an acceptance", _share(found.after_acceptance.rate)],
        ["  after a rejection", _share(found.after_rejection.rate)],
        ["the paper's estimate, 1 - 1 / (1 + mean match)", f"{found.estimate:.3f}"],
        ["  95% interval", "{:.3f} to {:.3f}".format(*found.estimate_interval)],
        ["  mean match of the two texts, tokens", f"{found.mean_match:.1f}"],
        ["  texts equal to the very end, so cut off there", f"{found.whole} of {len(found.matches)}"],
        ["  the estimate without taking them for rejections", f"{found.corrected:.3f}"],
        ["texts that the target ended early", f"{found.ended} of {len(found.matches)}"],
        ["places counted", str(found.places)],
    ]
    show.table(["acceptance", ""], rows)
    law = found.geometric
    steps = [step for step in law.steps if step.length in LENGTHS and max(step.survival, step.law) >= RARE]
    print()
    show.table(
        ["accepted in a row, at least", "observed", "geometric law"],
        [[str(step.length), f"{step.survival:.3f}", f"{step.law:.3f}"] for step in steps],
    )
    print(f"{law.verdict} (largest gap {law.distance:.3f}; {_chi_square(found)})\n")


def _measure_shape(shape: str, random_weights: bool, device: str, dtype: str, json: bool) -> None:
    from dsi.engine.devices import Placement, check_available, parse_devices
    from dsi.engine.profile_cuda import forwards_ms

    if not random_weights:
        raise ValueError(f"shape {shape!r}: has no weights of its own; say --random-weights")
    [place] = parse_devices(device)
    check_available(Placement((place,), place))
    from dsi.engine.build_cuda import random_cuda_model

    model = random_cuda_model(shape, dtype, device)
    found = forwards_ms(model)
    if json:
        figures = {"label": "measured, random weights", "shape": shape, "device": device, "dtype": dtype}
        show.document(**figures, ms={str(width): ms for width, ms in found.items()})
        return
    rows = [[str(width), f"{ms:.2f}", f"{ms / found[1]:.2f}"] for width, ms in found.items()]
    show.table(["new tokens", "forward, ms", "over one token's"], rows)
    print(f"measured with random weights: {shape}, {dtype}, on {device}; {model.eager_reason or 'CUDA graphs'}")


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _chi_square(found: Acceptance) -> str:
    law = found.geometric
    return f"chi-square {law.chi_square:.1f} with {law.freedom} degrees of freedom, p = {law.p_value:.2g}"
