"""`dsi chat`: talk with a model."""

from __future__ import annotations

import sys
from typing import Any

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
    MaxNewTokens,
    MinP,
    OneAlgorithm,
    Rule,
    Seed,
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

EXAMPLE = "Example: dsi chat --target path/to/model --drafter path/to/small-model"


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
            writing = engine.stream(engine.tokenizer.apply_chat_template(messages), **options)
            for piece in writing:
                print(piece, end="", flush=True)
            print(flush=True)
            messages.append({"role": "assistant", "content": writing.completion.text.strip()})


def _line() -> str:
    """What the user says next; nothing at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
