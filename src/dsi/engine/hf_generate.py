"""DSI inside transformers' `generate`, on models that are already loaded.

Either `model.generate(..., custom_generate=dsi.custom_generate, drafter=small)`, or, beside an existing
`assistant_model=small`, `custom_generate=dsi.REPO, trust_remote_code=True`.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

from dsi.core.messages import DRAFTER, Sampling
from dsi.core.policies import policy_for
from dsi.core.request import Request
from dsi.core.spec import SpecConfig, default_max_lead
from dsi.engine.build import cpu_model
from dsi.engine.build_processes import start_processes
from dsi.engine.profile_cpu import forward_ms
from dsi.fleets.loop import EngineLoop
from dsi.models.protocol import SamplingModel
from dsi.planning.equation_1 import minimal_lookahead

REPO = str(files("dsi") / "assets" / "hf_repo")  # a folder as transformers wants it, with `custom_generate/generate.py`


def custom_generate(
    model: Any, input_ids: Any, generation_config: Any = None, drafter: Any = None, sp: int = 1, seed: int = 0, **_: Any
) -> Any:
    """Generate one text with DSI on processes of its own; greedy, or sampled with this seed."""
    if drafter is None:
        raise ValueError(
            "custom_generate: needs a drafter=, a smaller model of the same vocabulary "
            "(or, with custom_generate=dsi.REPO, an assistant_model=)"
        )
    if input_ids.shape[0] != 1:
        raise ValueError(f"custom_generate: {input_ids.shape[0]} texts at once, but it writes one at a time")
    prompt = tuple(input_ids[0].tolist())
    target, draft_model = cpu_model(model), cpu_model(drafter)
    lookahead = minimal_lookahead(forward_ms(target), forward_ms(draft_model), sp)
    # One thread each: a thread pool that the caller has started does not survive the fork.
    fleet = start_processes(target, {DRAFTER: SamplingModel(draft_model)}, sp, 1)
    try:
        policy = policy_for(SpecConfig("dsi", lookahead, min_draft=2, max_lead=default_max_lead(sp, lookahead)))
        tokens = int(generation_config.max_new_tokens or generation_config.max_length - len(prompt))
        sampling, ends = _sampling(generation_config, seed), _end_tokens(generation_config.eos_token_id)
        request = Request(prompt, tokens, policy, sampling, ends)
        [completion] = EngineLoop(fleet).run(request)
    finally:
        fleet.close()
        target.release()
        draft_model.release()
    return torch.tensor([[*prompt, *completion.tokens]], device=input_ids.device)


def _end_tokens(ids: Any) -> frozenset[int]:
    return frozenset() if ids is None else frozenset(torch.as_tensor(ids).flatten().tolist())


def _sampling(config: Any, seed: int) -> Sampling:
    if not config.do_sample:
        return Sampling()
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given = {name: getattr(config, name, None) for name in defaults}
    return Sampling(**defaults | {name: value for name, value in given.items() if value is not None}, seed=seed)
