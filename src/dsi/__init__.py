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
    from dsi.dropin import REPO as REPO
    from dsi.dropin import custom_generate as custom_generate
    from dsi.engine import FleetError as FleetError
    from dsi.engine import Loop as Loop
    from dsi.fleets.simulated import SimulatedFleet as SimulatedFleet
    from dsi.fleets.threads import ThreadFleet as ThreadFleet
    from dsi.fleets.work import Server as Server
    from dsi.models.toy import ToyDrafter as ToyDrafter
    from dsi.models.toy import ToyTarget as ToyTarget
    from dsi.models.wait import Latency as Latency
    from dsi.models.wait import Wait as Wait
    from dsi.planner import plan as plan
    from dsi.request import Completion as Completion
    from dsi.request import Request as Request
    from dsi.speech import Engine as Engine

__version__ = "0.1.0"

# Loaded when first asked for: `import dsi.core` needs none of the rest, and `dsi --help` none at all.
_HOMES = {
    "Completion": "dsi.request",
    "Engine": "dsi.speech",
    "FleetError": "dsi.engine",
    "Latency": "dsi.models.wait",
    "Loop": "dsi.engine",
    "REPO": "dsi.dropin",
    "Request": "dsi.request",
    "Sampling": "dsi.core.messages",
    "Server": "dsi.fleets.work",
    "SimulatedFleet": "dsi.fleets.simulated",
    "ThreadFleet": "dsi.fleets.threads",
    "ToyDrafter": "dsi.models.toy",
    "ToyTarget": "dsi.models.toy",
    "Wait": "dsi.models.wait",
    "autoregressive": "dsi.core.policies",
    "custom_generate": "dsi.dropin",
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
