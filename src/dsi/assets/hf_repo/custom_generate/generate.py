"""What `custom_generate=dsi.REPO` runs: transformers hands `assistant_model` to code from a folder only."""

from typing import Any

from dsi.engine.hf_generate import generate_with_assistant


def generate(model: Any, **arguments: Any) -> Any:
    """transformers prepares the text and the configuration as ever, and DSI writes."""
    return generate_with_assistant(model, **arguments)
