"""`dsi serve`: an engine behind OpenAI's API, and a page that shows the overlap."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dsi.cli.engine import SpecOptions, load_engine, report_ignored_defaults
from dsi.cli.options import options
from dsi.engine.config import EngineConfig
from dsi.server.limits import Limits

EXAMPLE = "Example: dsi serve --port 8000, then: curl http://127.0.0.1:8000/v1/models"
MAX_RUNNING_APART = 16  # texts at once where each has forwards of its own: servers keep all of their KV caches


@options
def serve(
    *,
    config: EngineConfig,
    spec: SpecOptions,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What the model is called; without it, --target.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one on a line; without it, those in $DSI_API_KEYS, if any.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Whose pages may use the API, as https://example.org; can be repeated.")
    ] = None,
    limits: Limits,
) -> None:
    """Serve OpenAI's API, and at / a page that shows who computes what, when."""
    from dsi.server.auth import check_origins, read_keys
    from dsi.server.sockets import listen

    keys, origins = read_keys(api_key_file), check_origins(cors_origin or ())
    listener = listen(host, port)
    if config.target_devices is None:
        config = replace(config, max_num_seqs=min(limits.running, MAX_RUNNING_APART) + 1)
    with load_engine(config, spec) as engine:
        from dsi.server.run import serve as run

        report_ignored_defaults(config)
        endpoints = engine.deployment.endpoints
        served = name or (endpoints[0].info.model if endpoints else config.target)
        run(engine, served, listener, limits, keys, origins)
    print("dsi: stopped", file=sys.stderr)
