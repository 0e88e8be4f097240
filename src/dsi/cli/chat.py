"""`dsi chat`: talk with a model."""

from __future__ import annotations

import sys

import typer

from dsi.cli import output as show
from dsi.cli.engine import SpecOptions, generation_arguments, load_engine, report_contexts, text_document
from dsi.cli.options import Json, MaxNewTokens, given, options
from dsi.core.messages import Sampling
from dsi.engine.config import EngineConfig
from dsi.models.tokenizer import check_unicode

EXAMPLE = "Example: dsi chat --target path/to/model --drafter path/to/small-model"


@options
def chat(
    context: typer.Context,
    *,
    config: EngineConfig,
    spec: SpecOptions,
    max_new_tokens: MaxNewTokens = 256,
    sampling: Sampling,
    json: Json = False,
) -> None:
    """Talk with a model, line by line; an empty line or the end of the input ends it.

    With --json there is one document for each answer, on a line of its own.
    Options left out are as in the target's generation_config, if it has them.
    """
    messages: list[dict[str, str]] = []
    with load_engine(config, spec) as engine:
        arguments = generation_arguments(config, sampling, max_new_tokens, given(context))
        while line := _line():
            messages.append({"role": "user", "content": line})
            prompt = engine.tokenizer.apply_chat_template(messages)
            stream = engine.stream(prompt, **arguments)
            for part in stream:
                if not json:
                    print(part, end="", flush=True)
            if json:
                show.document(**text_document(engine, spec, stream.completion))
            else:
                print(flush=True)
            report_contexts(engine, spec, stream.completion, arguments["max_new_tokens"])
            messages.append({"role": "assistant", "content": stream.completion.text.strip()})


def _line() -> str:
    """The user's next message, empty at the end of the input."""
    try:
        return check_unicode("message", input("> " if sys.stdin.isatty() else "").strip())
    except EOFError:
        return ""
