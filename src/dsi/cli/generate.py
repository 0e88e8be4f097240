"""`dsi generate`: continue a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dsi.cli import output as show
from dsi.cli.engine_options import load_engine
from dsi.cli.options import (
    AutoLookahead,
    AutoPatience,
    Degree,
    Drafter,
    DrafterDevice,
    DrafterNeeds,
    Dtype,
    Fleet,
    HangSeconds,
    Json,
    MaxNewTokens,
    MinP,
    OneAlgorithm,
    Rule,
    StartSeconds,
    Target,
    TargetDevices,
    TargetMp,
    TargetNeeds,
    Temperature,
    Threads,
    TopK,
    TopP,
    Vocab,
)

EXAMPLE = 'Example: dsi generate "Once upon a time" --max-new-tokens 200'


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


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("a prompt and a file: give one of them")
    if file is not None:
        return file.read_text()
    return sys.stdin.read() if prompt is None else prompt
