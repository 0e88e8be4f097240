"""`dsi serve`: an engine behind OpenAI's API, and a page to watch it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

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
    OneAlgorithm,
    StartSeconds,
    Target,
    TargetDevices,
    TargetMp,
    TargetNeeds,
    Threads,
    Vocab,
)

EXAMPLE = "Example: dsi serve --port 8000, then: curl http://127.0.0.1:8000/v1/models"


def serve(
    target: Target = "builtin",
    drafter: Drafter = None,
    vocab: Vocab = "auto",
    algorithm: OneAlgorithm = "dsi",
    sp: Degree = None,
    target_mp: TargetMp = 1,
    lookahead: AutoLookahead = "auto",
    patience: AutoPatience = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    target_devices: TargetDevices = None,
    drafter_device: DrafterDevice = None,
    fleet: Fleet = None,
    target_needs: TargetNeeds = None,
    drafter_needs: DrafterNeeds = None,
    hang_seconds: HangSeconds = None,
    start_seconds: StartSeconds = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What the model is called; without it, --target.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one on a line; without it, those in $DSI_API_KEYS, if any.")
    ] = None,
    max_running: Annotated[int, typer.Option(help="Texts being written at once; on devices 1.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Texts that wait for their turn; then 429.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="New tokens of one text at most.")] = 4096,
    max_choices: Annotated[int, typer.Option(help="Texts of one request at most: prompts times n.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(help="Of one request.")] = 1 << 20,
    max_connections: Annotated[int, typer.Option(help="At once; more are closed.")] = 512,
    timeout: Annotated[float, typer.Option(help="Seconds until an answer must be complete.")] = 600.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds that answers have to end.")] = 10.0,
) -> None:
    """Serve OpenAI's API, and at / a page that shows who computes what, when."""
    from dsi.server.auth import read_keys
    from dsi.server.limits import Limits
    from dsi.server.sockets import listen

    running = max_running if target_devices is None else 1  # a device holds one text
    limits = Limits(
        running=running,
        waiting=max_waiting,
        choices=max_choices,
        new_tokens=max_tokens,
        body_bytes=max_body_bytes,
        connections=max_connections,
        seconds=timeout,
        shutdown_seconds=shutdown_timeout,
    )
    keys = read_keys(api_key_file)
    listener = listen(host, port)
    more: dict[str, Any] = {} if target_devices else {"texts": running + 1}
    with load_engine(locals(), **more) as engine:
        from dsi.server.run import serve as run

        run(engine, name or target, listener, limits, keys)
    print("dsi: stopped", file=sys.stderr)
