"""What `custom_generate=dsi.REPO` runs: transformers hands `assistant_model` to code from a folder only."""

from typing import Any

import dsi


def generate(model: Any, assistant_model: Any = None, **arguments: Any) -> Any:
    """transformers prepares the text and the configuration as ever, and DSI writes."""
    return model.generate(custom_generate=dsi.custom_generate, drafter=assistant_model, **arguments)
