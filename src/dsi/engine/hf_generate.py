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
        request = Request(
            prompt,
            _max_new_tokens(generation_config, prompt),
            policy,
            _sampling(generation_config, seed),
            _end_tokens(generation_config),
        )
        [completion] = EngineLoop(fleet).run(request)
    finally:
        fleet.close()
        target.release()
        draft_model.release()
    return torch.tensor([[*prompt, *completion.tokens]], device=input_ids.device)


def _max_new_tokens(config: Any, prompt: tuple[int, ...]) -> int:
    return int(config.max_new_tokens or config.max_length - len(prompt))


def _end_tokens(config: Any) -> frozenset[int]:
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
