"""Distributed speculative inference: lossless decoding that never takes turns."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsi.core.messages import Sampling as Sampling
    from dsi.core.policies import (
        autoregressive as autoregressive,
        distributed as distributed,
        pearl as pearl,
        speculative as speculative,
    )
    from dsi.core.request import Completion as Completion, Request as Request
    from dsi.core.spec import SpecConfig as SpecConfig
    from dsi.engine.config import EngineConfig as EngineConfig
    from dsi.engine.engine import Engine as Engine
    from dsi.engine.hf_generate import REPO as REPO, custom_generate as custom_generate
    from dsi.fleets.loop import EngineLoop as EngineLoop, FleetError as FleetError
    from dsi.fleets.servers import Server as Server
    from dsi.fleets.simulated import SimulatedFleet as SimulatedFleet
    from dsi.fleets.threads import ThreadFleet as ThreadFleet
    from dsi.models.toy import ToyDrafter as ToyDrafter, ToyTarget as ToyTarget
    from dsi.models.wait import Latency as Latency, Wait as Wait
    from dsi.planning.equation_1 import plan as plan
    from dsi.planning.latency import LatencyModel as LatencyModel

__version__ = "0.1.0"

# Imported on first use: `import dsi.core` needs none of the rest, and `dsi --help` none at all.
_EXPORTS = {
    "dsi.core.messages": ("Sampling",),
    "dsi.core.policies": ("autoregressive", "distributed", "pearl", "speculative"),
    "dsi.core.request": ("Completion", "Request"),
    "dsi.core.spec": ("SpecConfig",),
    "dsi.engine.config": ("EngineConfig",),
    "dsi.engine.engine": ("Engine",),
    "dsi.engine.hf_generate": ("REPO", "custom_generate"),
    "dsi.fleets.loop": ("EngineLoop", "FleetError"),
    "dsi.fleets.simulated": ("SimulatedFleet",),
    "dsi.fleets.threads": ("ThreadFleet",),
    "dsi.fleets.servers": ("Server",),
    "dsi.models.toy": ("ToyDrafter", "ToyTarget"),
    "dsi.models.wait": ("Latency", "Wait"),
    "dsi.planning.equation_1": ("plan",),
    "dsi.planning.latency": ("LatencyModel",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
_OLD_NAMES = {"Loop": "EngineLoop"}  # kept for one release
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    name = _OLD_NAMES.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module 'dsi' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
