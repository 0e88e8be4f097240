"""DSI inside transformers, on models that are already loaded.

`model.generate(..., custom_generate=dsi.custom_generate, drafter=small)`, or, for those whose code says
`assistant_model=small` already, `custom_generate=dsi.REPO, trust_remote_code=True` beside it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

from dsi.core.messages import DRAFTER, TARGET, Sampling
from dsi.core.policies import distributed
from dsi.core.request import Request
from dsi.engine.build import backend, forward_ms
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.worker import Server
from dsi.models.protocol import SamplingModel
from dsi.planning.equation_1 import minimal_lookahead

REPO = str(files("dsi") / "assets" / "hf_repo")  # a folder as transformers wants it, with `custom_generate/generate.py`


def custom_generate(
    model: Any,
    input_ids: Any,
    generation_config: Any = None,
    drafter: Any = None,
    sp: int = 1,
    seed: int = 0,
    **_: Any,
) -> Any:
    """One text, on processes of its own; greedy, or sampled with this seed, as the configuration says."""
    if drafter is None:
        raise ValueError(
            "custom_generate: needs a drafter=, a smaller model of the same vocabulary "
            "(or, with custom_generate=dsi.REPO, an assistant_model=)"
        )
    if input_ids.shape[0] != 1:
        raise ValueError(f"custom_generate: {input_ids.shape[0]} texts at once, but it writes one at a time")
    prompt = tuple(input_ids[0].tolist())
    big, little = backend(model), backend(drafter)
    lookahead = minimal_lookahead(forward_ms(big), forward_ms(little), sp)
    servers = [Server(f"{TARGET}-{i}", TARGET, SamplingModel(big)) for i in range(1, sp + 1)]
    servers.append(Server(DRAFTER, DRAFTER, SamplingModel(little)))
    # One thread each: a pool of threads that the caller has started does not survive the fork.
    fleet = ProcessFleet(servers, prepare=lambda _: torch.set_num_threads(1))
    try:
        policy = distributed(lookahead, min_draft=2, max_lead=(sp + 1) * lookahead)
        request = Request(
            prompt,
            _room(generation_config, prompt),
            policy,
            _sampling(generation_config, seed),
            _ends(generation_config),
        )
        [done] = EngineLoop(fleet).run(request)
    finally:
        fleet.close()
        big.release()
        little.release()
    return torch.tensor([[*prompt, *done.tokens]], device=input_ids.device)


def _room(config: Any, prompt: tuple[int, ...]) -> int:
    return int(config.max_new_tokens or config.max_length - len(prompt))


def _ends(config: Any) -> frozenset[int]:
    ends = config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(torch.as_tensor(ends).flatten().tolist())


def _sampling(config: Any, seed: int) -> Sampling:
    if not config.do_sample:
        return Sampling()
    values = [getattr(config, name, None) for name in ("temperature", "top_k", "top_p", "min_p")]
    temperature, top_k, top_p, min_p = (
        default if value is None else value for value, default in zip(values, (1.0, 0, 1.0, 0.0))
    )
    return Sampling(temperature, int(top_k), top_p, min_p, seed)
