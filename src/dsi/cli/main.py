"""The commands: each parses, calls one function, and prints. Heavy imports wait until they are needed."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dsi.cli import budget as cli_budget
from dsi.cli import output as show
from dsi.cli import paper as cli_paper
from dsi.cli import plan as cli_plan
from dsi.cli import serve as cli_serve
from dsi.cli.engine_options import load_engine
from dsi.cli.measure import measure
from dsi.cli.options import (
    Acceptance,
    Algorithm,
    AutoLookahead,
    AutoPatience,
    Budget,
    BudgetOut,
    BudgetProfile,
    Contention,
    Cores,
    Degree,
    Drafter,
    DrafterCopies,
    DrafterDevice,
    DrafterMs,
    DrafterNeeds,
    Drafters,
    DrafterTtftMs,
    Dtype,
    Eager,
    FailuresPerHour,
    Fleet,
    Gpus,
    HangSeconds,
    Horizon,
    Jitter,
    Json,
    MaxNewTokens,
    MinP,
    NetworkJitter,
    NetworkMs,
    Nodes,
    NoticeMs,
    OneAlgorithm,
    OneCache,
    PerTokenMs,
    Pieces,
    Profile,
    RepairS,
    Requests,
    Rule,
    Scales,
    Seed,
    Sp,
    StartSeconds,
    Target,
    TargetDevices,
    TargetMp,
    TargetMs,
    TargetNeeds,
    TargetTtftMs,
    Temperature,
    Threads,
    Tokens,
    TopK,
    TopP,
    Vocab,
    Waited,
)

if TYPE_CHECKING:
    from dsi.experiments.records import Record
    from dsi.planning.simulation import SimulationConfig

STOPS = 5  # places where a target's forward on a GPU is taken to end if it is cancelled: a few layers each

app = typer.Typer(
    help="Distributed speculative inference: lossless decoding that never takes turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: dsi simulate --algorithm si,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4",
)
app.add_typer(cli_paper.app, name="paper")
app.add_typer(measure, name="measure")
app.command(epilog=cli_serve.EXAMPLE)(cli_serve.serve)
app.command(epilog=cli_plan.EXAMPLE)(cli_plan.plan)


def main() -> None:
    """A user's mistake is one sentence and exit status 2, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except Exception as error:
        _refuse(_sentence(error))
    sys.exit(code)


def _sentence(error: Exception) -> str:
    """What the options' parser says, or a fleet that cannot go on; anything else is ours to mend."""
    from dsi.fleets.loop import FleetError

    if isinstance(error, FleetError):
        return str(error)
    if not hasattr(error, "format_message"):
        raise error
    return str(error.format_message())


def _refuse(sentence: str) -> NoReturn:
    print("dsi: " + " ".join(sentence.split()), file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dsi import __version__

        print(f"dsi {__version__}")
        raise typer.Exit


@app.command(epilog="Example: dsi simulate --algorithm nonsi,si,dsi --lookahead 1,2,5,10 --json")
def simulate(
    context: typer.Context,
    algorithm: Algorithm = "nonsi,si,pearl,dsi",
    target_ms: TargetMs = 20.0,
    drafter_ms: DrafterMs = 2.0,
    acceptance: Acceptance = 0.8,
    lookahead: Annotated[
        str,
        typer.Option(
            help="Guesses per verification; several separated by commas: the best is taken. auto: by "
            "Eq. (1) for dsi, the best block for si, target over drafter latency for pearl."
        ),
    ] = "auto",
    sp: Sp = 7,
    tokens: Tokens = 100,
    repeats: Annotated[int, typer.Option(help="Runs, each with a seed of its own.")] = 30,
    seed: Seed = 0,
    drafters: Drafters = 1,
    drafter_copies: DrafterCopies = 1,
    requests: Requests = 1,
    patience: Annotated[
        str,
        typer.Option(
            help="dsi: guesses to have before a fresh root is watched; several separated by commas: the best."
        ),
    ] = "0",
    horizon: Horizon = float("inf"),
    branches: Annotated[int, typer.Option(help="dsi: guesses for each place; 2 has second guesses.")] = 1,
    second_hit: Annotated[
        float, typer.Option(help="How often a second guess is right where the first is wrong: 0 to 1.")
    ] = 0.0,
    sure: Annotated[
        float, typer.Option(help="How often there is no second guess where the first is right: 0 to 1.")
    ] = 0.0,
    spare: Annotated[int, typer.Option(help="dsi: targets, of the SP degree, that look past second guesses.")] = 0,
    pieces: Pieces = 0,
    target_ttft_ms: TargetTtftMs = None,
    drafter_ttft_ms: DrafterTtftMs = None,
    per_token_ms: PerTokenMs = 0.0,
    jitter: Jitter = 0.0,
    network_ms: NetworkMs = 0.0,
    network_jitter: NetworkJitter = 0.0,
    nodes: Nodes = None,
    failures_per_hour: FailuresPerHour = 0.0,
    repair_s: RepairS = 10.0,
    notice_ms: NoticeMs = 0.0,
    contention: Contention = 0.0,
    one_cache: OneCache = False,
    rule: Rule = "match",
    eager: Eager = True,
    waited: Waited = False,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Run toy models under one or more algorithms, in virtual time or on real threads."""
    from dsi.experiments.simulate import best, choices

    names = _algorithms(algorithm)
    blocks = [None] if lookahead == "auto" else _numbers("lookahead", lookahead, 1)
    waits = _numbers("patience", patience, 0)
    setting = _setting(_profiled(context, profile, locals()), lookahead=None, patience=0)
    runs = sum(len(choices(setting, name, blocks, waits)) * repeats for name in names)
    with show.progress("runs", runs) as advance:
        results = [best(setting, name, blocks, waits, repeats, seed, waited, advance) for name in names]
    show.simulations(results, json)


@app.command(epilog="Example: dsi timeline --algorithm si,dsi --acceptance 0.9 --out figure.svg --out trace.json")
def timeline(
    algorithm: Algorithm = "nonsi,si,dsi",
    target_ms: TargetMs = 7.0,
    drafter_ms: DrafterMs = 1.0,
    acceptance: Acceptance = 0.8,
    lookahead: Annotated[str, typer.Option(help="Guesses per verification, or auto (see simulate).")] = "auto",
    sp: Sp = 7,
    tokens: Tokens = 16,
    seed: Seed = 0,
    drafters: Drafters = 1,
    patience: Annotated[int, typer.Option(help="dsi: guesses to have before a fresh root is watched.")] = 0,
    horizon: Horizon = float("inf"),
    pieces: Pieces = 0,
    target_ttft_ms: TargetTtftMs = None,
    drafter_ttft_ms: DrafterTtftMs = None,
    per_token_ms: PerTokenMs = 0.0,
    jitter: Jitter = 0.0,
    network_ms: NetworkMs = 0.0,
    contention: Contention = 0.0,
    one_cache: OneCache = False,
    rule: Rule = "match",
    eager: Eager = True,
    waited: Waited = False,
    trace: Annotated[
        Path | None, typer.Option(help="Draw a trace instead: what `dsi serve` gives at /v1/traces/ID.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Also write a picture (.svg, .png) or a Chrome/Perfetto trace (.json); repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw who computed what, when: Figure 1 of the paper for any setting."""
    from dsi.experiments.records import record

    paths = [show.writable(path) for path in out or []]
    if trace is not None:
        records = _traced(trace)
    else:
        names = _algorithms(algorithm)
        setting = _setting(locals(), lookahead=_one_lookahead(lookahead))
        with show.progress("algorithms", len(names)) as advance:
            records = []
            for name in names:
                records.append(record(setting, name, seed, waited))
                advance()
    for path in paths:
        _save(records, path)
    show.timelines(records, paths, json)


@app.command(epilog='Example: dsi generate "Once upon a time" --max-new-tokens 200')
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; without it, standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    target: Target = "builtin",
    drafter: Drafter = None,
    vocab: Vocab = "auto",
    algorithm: OneAlgorithm = "dsi",
    sp: Degree = None,
    target_mp: TargetMp = 1,
    lookahead: AutoLookahead = "auto",
    patience: AutoPatience = "auto",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    rule: Rule = "match",
    seed: Annotated[int, typer.Option(help="Same seed, same text, whatever the algorithm.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this; repeatable.")] = None,
    dtype: Dtype = "float32",
    threads: Threads = None,
    target_devices: TargetDevices = None,
    drafter_device: DrafterDevice = None,
    fleet: Fleet = None,
    target_needs: TargetNeeds = None,
    drafter_needs: DrafterNeeds = None,
    hang_seconds: HangSeconds = None,
    start_seconds: StartSeconds = None,
    json: Json = False,
) -> None:
    """Continue a text: the text alone on stdout as it is written, a summary on stderr."""
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "rule": rule,
        "stop": stop or [],
    }
    text = _prompt(prompt, file)
    with load_engine(locals()) as engine:
        writing = engine.stream(text, **options)
        for piece in writing:
            if not json:
                print(piece, end="", flush=True)
        done = writing.completion
    if json:
        show.document(text=done.text, algorithm=engine.algorithm, **show.figures(done))
    else:
        print()
        print(show.summary(engine.algorithm, done), file=sys.stderr)


@app.command(epilog="Example: dsi chat --target path/to/model --drafter path/to/small-model")
def chat(
    target: Target = "builtin",
    drafter: Drafter = None,
    vocab: Vocab = "auto",
    algorithm: OneAlgorithm = "dsi",
    sp: Degree = None,
    target_mp: TargetMp = 1,
    lookahead: AutoLookahead = "auto",
    patience: AutoPatience = "auto",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    rule: Rule = "match",
    seed: Seed = 0,
    dtype: Dtype = "float32",
    threads: Threads = None,
    target_devices: TargetDevices = None,
    drafter_device: DrafterDevice = None,
    fleet: Fleet = None,
    target_needs: TargetNeeds = None,
    drafter_needs: DrafterNeeds = None,
    hang_seconds: HangSeconds = None,
    start_seconds: StartSeconds = None,
) -> None:
    """Talk with a model, line by line; an empty line or the end of the input ends it."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
    options |= {"top_p": top_p, "min_p": min_p, "seed": seed, "rule": rule}
    messages: list[dict[str, str]] = []
    with load_engine(locals()) as engine:
        while line := _line():
            messages.append({"role": "user", "content": line})
            writing = engine.stream(engine.text.chat(messages), **options)
            for piece in writing:
                print(piece, end="", flush=True)
            print(flush=True)
            messages.append({"role": "assistant", "content": writing.completion.text.strip()})


@app.command(epilog="Example: dsi compare --repeats 5 --json. Example: dsi compare --budget --cores 2 --out budget.svg")
def compare(
    context: typer.Context,
    target: Target = "builtin",
    drafter: Drafter = None,
    vocab: Vocab = "auto",
    algorithm: Algorithm = "nonsi,si,pearl,dsi",
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt on each line.")] = None,
    sp: Degree = None,
    target_mp: TargetMp = 1,
    lookahead: Annotated[str, typer.Option(help="For pearl and dsi: a number, or auto by Eq. (1).")] = "auto",
    si_lookaheads: Annotated[str, typer.Option(help="Blocks that si tries; its best is shown.")] = "3,5,8,12",
    patience: AutoPatience = "auto",
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    rule: Rule = "match",
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(help="Times that each prompt is run under each algorithm.")] = 3,
    dtype: Dtype = "float32",
    threads: Threads = None,
    target_devices: TargetDevices = None,
    drafter_device: DrafterDevice = None,
    fleet: Fleet = None,
    target_needs: TargetNeeds = None,
    drafter_needs: DrafterNeeds = None,
    hang_seconds: HangSeconds = None,
    start_seconds: StartSeconds = None,
    budget: Budget = False,
    cores: Cores = None,
    gpus: Gpus = None,
    profile: BudgetProfile = None,
    scales: Scales = None,
    out: BudgetOut = None,
    json: Json = False,
) -> None:
    """The same prompts under every algorithm, interleaved and repeated; all texts are checked to be equal.

    Above temperature 0, rules other than match give each algorithm a text of its own, the same every time.
    With --budget, each algorithm has the same processors, in arrangements of its own.
    """
    from dsi.experiments.compare import compare as measured
    from dsi.experiments.compare import contenders

    cli_budget.check_options({name: each for name, each in locals().items() if _given(context, name)})
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    blocks = _numbers("si lookaheads", si_lookaheads, 1)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "rule": rule,
    }
    if budget:
        _compare_budget(context, locals(), blocks, options)
        return
    names = contenders(_algorithms(algorithm), blocks)
    texts = _prompts(prompts)
    with (
        load_engine(locals() | {"algorithm": "dsi"}) as engine,
        show.progress("texts", len(names) * len(texts) * repeats) as advance,
    ):
        rows = measured(engine, names, texts, repeats, options, advance)
    show.comparison(rows, json, rule == "match" or temperature == 0)


def _compare_budget(context: typer.Context, options: dict[str, Any], blocks: list[int], said: dict[str, Any]) -> None:
    for path in options["out"] or []:
        show.writable(path, show.PICTURES)
    if not _given(context, "algorithm"):
        options = options | {"algorithm": f"{options['algorithm']},auto"}
    if options["profile"] is None:
        cli_budget.on_cores(options, blocks, _classes(options["prompts"]), said)
        return
    from dsi.experiments.profile import NUMBERS, Profile

    name = Profile.load(options["profile"]).dataset
    measured = _profiled(context, options["profile"], dict.fromkeys(NUMBERS))
    fixed = {"sp": 1, "tokens": said["max_new_tokens"], "eager": False, "pieces": STOPS}
    fixed["drafter_pieces"] = 1  # a guess that is on its way cannot be called back
    cli_budget.on_gpus(options, blocks, name, _setting(measured, **fixed))


def _traced(path: Path) -> list[Record]:
    """The runs of a trace, those in which a token came."""
    from dsi.plot.trace import read

    try:
        records = [record for record in read(jsonlib.loads(path.read_text())) if record.times_ms]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({(error.strerror or '').lower()})") from error
    except ValueError as error:
        reason = "is not JSON" if isinstance(error, jsonlib.JSONDecodeError) else str(error)
        raise ValueError(f"{path}: {reason}") from error
    if not records:
        raise ValueError(f"{path}: is a trace without a token")
    return records


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("a prompt and a file: give one of them")
    if file is not None:
        return file.read_text()
    return sys.stdin.read() if prompt is None else prompt


def _prompts(file: Path | None) -> list[str]:
    from dsi.experiments.compare import PROMPTS

    lines = PROMPTS if file is None else [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: has no prompt in it")
    return list(lines)


def _classes(file: Path | None) -> dict[str, list[str]]:
    """A file is a class of its own."""
    from dsi.experiments.compare import CLASSES

    if file is not None:
        return {file.stem: _prompts(file)}
    return {name: list(prompts) for name, prompts in CLASSES.items()}


def _line() -> str:
    """What the user says next; nothing at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _algorithms(text: str) -> list[str]:
    from dsi.core.policies import check_named

    return [check_named(name.strip()) for name in text.split(",")]


def _setting(options: dict[str, Any], **fixed: Any) -> SimulationConfig:
    """The setting that a command's options describe; they have the names of its fields."""
    from dataclasses import fields

    from dsi.planning.simulation import SimulationConfig

    names = {field.name for field in fields(SimulationConfig)} & options.keys()
    return SimulationConfig(**{name: options[name] for name in names} | fixed)


def _profiled(context: typer.Context, path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those that were not given taken from a profile."""
    if path is None:
        return options
    from dsi.experiments.profile import NUMBERS, Profile

    measured = Profile.load(path)
    free = [name for name in NUMBERS if name in options and not _given(context, name)]
    found = options | {name: measured.number(name, path) for name in free}
    for role in ("target", "drafter"):
        if f"{role}_ttft_ms" in free:  # a first forward that seemed faster than a later one was only lucky
            found[f"{role}_ttft_ms"] = max(found[f"{role}_ttft_ms"], found[f"{role}_ms"])
    return found


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _numbers(name: str, text: str, least: int) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: must be whole numbers separated by commas") from None
    if min(numbers) < least:
        raise ValueError(f"{name} {min(numbers)}: must be at least {least}")
    return numbers


def _one_lookahead(text: str) -> int | None:
    if text == "auto":
        return None
    numbers = _numbers("lookahead", text, 1)
    if len(numbers) > 1:
        raise ValueError(f"lookahead {text!r}: a timeline shows one run, so must be one number or auto")
    return numbers[0]


def _save(records: list[Record], path: Path) -> None:
    if path.suffix == ".json":
        from dsi.plot.trace import trace

        path.write_text(jsonlib.dumps(trace(records)))
    else:
        from dsi.plot.timeline import save

        save(records, path)
