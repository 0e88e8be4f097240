"""Distributed speculative inference: lossless decoding that never takes turns."""

from importlib import import_module

__version__ = "0.1.0"

# Loaded when first asked for: `import dsi.core` needs none of the rest, and `dsi --help` none at all.
_HOMES = {
    "Completion": "dsi.request",
    "Engine": "dsi.speech",
    "FleetError": "dsi.engine",
    "Latency": "dsi.models.wait",
    "Loop": "dsi.engine",
    "Request": "dsi.request",
    "Sampling": "dsi.core.messages",
    "Server": "dsi.fleets.work",
    "SimulatedFleet": "dsi.fleets.simulated",
    "ThreadFleet": "dsi.fleets.threads",
    "ToyDrafter": "dsi.models.toy",
    "ToyTarget": "dsi.models.toy",
    "Wait": "dsi.models.wait",
    "autoregressive": "dsi.core.policies",
    "distributed": "dsi.core.policies",
    "pearl": "dsi.core.policies",
    "plan": "dsi.planner",
    "speculative": "dsi.core.policies",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsi' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
