"""`dsi generate`: continue a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsi.cli import output as show
from dsi.cli.engine import SpecOptions, generation_arguments, load_engine, report_contexts, text_document
from dsi.cli.options import Json, MaxNewTokens, given, options, read_text
from dsi.core.messages import Sampling
from dsi.engine.config import EngineConfig
from dsi.models.tokenizer import check_unicode

EXAMPLE = 'Example: dsi generate "Once upon a time" --max-new-tokens 200'


@options
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; without it, standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    *,
    config: EngineConfig,
    spec: SpecOptions,
    max_new_tokens: MaxNewTokens = 128,
    sampling: Sampling,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this; repeatable.")] = None,
    json: Json = False,
) -> None:
    """Continue a text: the text alone on stdout as it is written, a summary and the configuration on stderr.

    Options left out are as in the target's generation_config, if it has them.
    """
    text = check_unicode("prompt", _prompt(prompt, file))
    stops = [check_unicode("stop string", each) for each in stop or ()]
    with load_engine(config, spec) as engine:
        arguments = generation_arguments(config, sampling, max_new_tokens, given(context))
        stream = engine.stream(text, **arguments, stop=stops)
        for part in stream:
            if not json:
                print(part, end="", flush=True)
        if json:
            show.document(**text_document(engine, spec, stream.completion))
        else:
            from dsi.engine.explain import explain

            print()
            print(show.summary(spec.algorithm, stream.completion), file=sys.stderr)
            print(explain(engine.deployment, spec, stream.completion), file=sys.stderr)
        report_contexts(engine, spec, stream.completion, arguments["max_new_tokens"])


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("a prompt and a file: give one of them")
    if file is not None:
        return read_text(file)
    return sys.stdin.read() if prompt is None else prompt
