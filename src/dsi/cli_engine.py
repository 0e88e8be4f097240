"""From the options of a command to an engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dsi import show

if TYPE_CHECKING:
    from dsi.speech import Engine


def load_engine(options: dict[str, Any], **more: Any) -> Engine:
    """Loading takes seconds: said on a terminal, and gone when it is done."""
    from rich.console import Console

    names = (
        "sp",
        "target_mp",
        "algorithm",
        "lookahead",
        "patience",
        "dtype",
        "threads",
        "target_devices",
        "drafter_device",
        "vocab",
    )
    drafters = options["drafter"] or ["builtin"]
    with Console(stderr=True).status(f"loading {options['target']} and {', '.join(drafters)}"):
        from dsi.speech import Engine

        engine = Engine.load(options["target"], drafters, **{name: options[name] for name in names}, **more)
    for remark in engine.loaded.remarks:
        print(f"dsi: {remark}", file=sys.stderr)
    if options["algorithm"] == "auto":
        print(show.choices(engine.loaded.choices.values()), file=sys.stderr)
    return engine
