"""Distributed speculative inference: lossless decoding that never takes turns."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsi.core.messages import Sampling as Sampling
    from dsi.core.policies import (
        autoregressive as autoregressive,
    )
    from dsi.core.policies import (
        distributed as distributed,
    )
    from dsi.core.policies import (
        pearl as pearl,
    )
    from dsi.core.policies import (
        speculative as speculative,
    )
    from dsi.core.request import Completion as Completion
    from dsi.core.request import Request as Request
    from dsi.core.spec import SpecConfig as SpecConfig
    from dsi.engine.config import EngineConfig as EngineConfig
    from dsi.engine.engine import Engine as Engine
    from dsi.engine.hf_generate import REPO as REPO
    from dsi.engine.hf_generate import custom_generate as custom_generate
    from dsi.fleets.loop import EngineLoop as EngineLoop
    from dsi.fleets.loop import FleetError as FleetError
    from dsi.fleets.simulated import SimulatedFleet as SimulatedFleet
    from dsi.fleets.threads import ThreadFleet as ThreadFleet
    from dsi.fleets.worker import Server as Server
    from dsi.models.toy import ToyDrafter as ToyDrafter
    from dsi.models.toy import ToyTarget as ToyTarget
    from dsi.models.wait import Latency as Latency
    from dsi.models.wait import Wait as Wait
    from dsi.planning.equation_1 import plan as plan
    from dsi.planning.latency import LatencyModel as LatencyModel

__version__ = "0.1.0"

# Imported on first use: `import dsi.core` needs none of the rest, and `dsi --help` none at all.
_MODULES = {
    "Completion": "dsi.core.request",
    "Engine": "dsi.engine.engine",
    "EngineConfig": "dsi.engine.config",
    "EngineLoop": "dsi.fleets.loop",
    "FleetError": "dsi.fleets.loop",
    "Latency": "dsi.models.wait",
    "LatencyModel": "dsi.planning.latency",
    "REPO": "dsi.engine.hf_generate",
    "Request": "dsi.core.request",
    "Sampling": "dsi.core.messages",
    "Server": "dsi.fleets.worker",
    "SimulatedFleet": "dsi.fleets.simulated",
    "SpecConfig": "dsi.core.spec",
    "ThreadFleet": "dsi.fleets.threads",
    "ToyDrafter": "dsi.models.toy",
    "ToyTarget": "dsi.models.toy",
    "Wait": "dsi.models.wait",
    "autoregressive": "dsi.core.policies",
    "custom_generate": "dsi.engine.hf_generate",
    "distributed": "dsi.core.policies",
    "pearl": "dsi.core.policies",
    "plan": "dsi.planning.equation_1",
    "speculative": "dsi.core.policies",
}
_OLD_NAMES = {"Loop": "EngineLoop"}  # kept for one release
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    name = _OLD_NAMES.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module 'dsi' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
