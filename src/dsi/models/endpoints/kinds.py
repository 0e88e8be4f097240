"""The kinds of endpoints, and which of them answers at an address."""

from __future__ import annotations

from typing import Any

from dsi.models.endpoints.address import KINDS
from dsi.models.endpoints.dsi_serve import DsiFormat
from dsi.models.endpoints.llama_cpp import LlamaCppFormat
from dsi.models.endpoints.sglang import SglangFormat
from dsi.models.endpoints.vllm import VllmFormat
from dsi.models.endpoints.wire import WireFormat, first_model

FORMATS: dict[str, WireFormat] = {
    wire.kind: wire for wire in (VllmFormat(), SglangFormat(), LlamaCppFormat(), DsiFormat())
}
MODELS_PATH = "/v1/models"  # which all of them have
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "dsi": "dsi"}  # as it says there


def kind_of(models: Any) -> str:
    """The kind of an endpoint by its answer to `/v1/models`, or raise ValueError."""
    owner = first_model(models).get("owned_by")
    if owner not in OWNERS:
        raise ValueError(
            f"its model is owned by {str(owner)[:40]!r}, which is none of {', '.join(KINDS)}; say which, as vllm+http://"
        )
    return OWNERS[owner]
