"""DSI inside transformers' `generate`, on models that are already loaded.

Either `model.generate(..., custom_generate=dsi.custom_generate, drafter=small)`, or, beside an existing
`assistant_model=small`, `custom_generate=dsi.REPO, trust_remote_code=True`. What `generate` is given is honoured,
or refused by name.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationMixin,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AdaptiveController
from dsi.core.generation import Policy
from dsi.core.messages import DRAFTER, Sampling
from dsi.core.request import Request
from dsi.engine.build import cpu_model
from dsi.engine.build_processes import MAX_INLINE_MS, available_cores, measure_turns, start_processes
from dsi.engine.generation_config import OTHER_SEARCHES, set_fields
from dsi.engine.profile_fleet import FleetProfiler
from dsi.fleets.loop import EngineLoop
from dsi.fleets.processes import ProcessFleet
from dsi.models.cpu.decoder import CompiledDecoder
from dsi.models.hf import Transformer, context_length
from dsi.models.logits_processors import LogitsProcessors, check_stateless
from dsi.models.protocol import SamplingModel
from dsi.planning.auto import latency_table
from dsi.planning.search import TOKENS
from dsi.planning.simulation import SimulationConfig

REPO = str(files("dsi") / "assets" / "hf_repo")  # a folder as transformers wants it, with `custom_generate/generate.py`
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# What `generate` passes on that cannot change the text, or is checked by itself.
KNOWN = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache", "synced_gpus", *OUTPUTS}
WARPERS = {  # in the order in which they are applied
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
NUM_SAMPLED = 64  # tokens of the text by which servers are measured
Controllers = dict[int, tuple[AdaptiveController, frozenset[str]]]  # by SP degree, with the servers that use every core
_CONTROLLERS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Controllers]] = WeakKeyDictionary()


def custom_generate(
    model: Any,
    input_ids: Any,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    streamer: Any = None,
    drafter: Any = None,
    sp: int = 1,
    seed: int = 0,
    **model_kwargs: Any,
) -> Any:
    """Generate one text with `auto` on processes of its own; greedy, or sampled with this seed."""
    # `attention_mask` must not be a parameter: `generate` would pass it on without preparing it.
    check_models(model, drafter)
    check_config(generation_config)
    check_inputs(input_ids, model_kwargs)
    if generation_config is None or stopping_criteria is None:
        raise ValueError("custom_generate: is called by model.generate(custom_generate=dsi.custom_generate)")
    streamer = streamer_of_generate(model) if streamer is None else streamer
    text, num_padding = tuple(input_ids[0].tolist()), count_padding(model_kwargs.get("attention_mask"))
    padding, prompt = text[:num_padding], text[num_padding:]
    processors, sampling = split_sampling(logits_processor or [], generation_config.do_sample, seed)
    check_stateless(processors, input_ids, model.config.get_text_config().vocab_size)
    process = LogitsProcessors(processors, padding) if processors else None
    limit = stopping_criteria.max_length or generation_config.max_length
    wanted = max(1, limit - len(text))  # transformers checks after the first one
    num_tokens = limit_new_tokens(wanted, len(prompt), context_length(model.config))
    ends = end_tokens(stopping_criteria)
    target, draft_model = cpu_model(model), cpu_model(drafter)
    # One thread each: a thread pool that the caller has started does not survive the fork. Compiled forwards that take
    # turns run in this process, with threads of their own.
    draft = SamplingModel(draft_model, process if same_size(model, drafter) else None)
    compiled = all(isinstance(backend, CompiledDecoder) for backend in (target, draft_model))
    every_core = compiled and len(available_cores()) > 1
    fleet = start_processes(target, {DRAFTER: draft}, sp, 1, process, every_core, shares_forwards=every_core)
    try:
        policy = choose_policy(fleet, target, draft_model, sp)
        request = Request(prompt, num_tokens, policy, sampling, ends, {DRAFTER: draft_model.context})
        ids = decode(EngineLoop(fleet), request, input_ids, stopping_criteria, streamer)
    finally:
        fleet.close()
        target.release()
        draft_model.release()
    if num_tokens < wanted and ids.shape[1] == len(text) + num_tokens and int(ids[0, -1]) not in ends:
        warnings.warn(f"the text ends at the target's context of {target.context} tokens", stacklevel=2)
    return GenerateDecoderOnlyOutput(sequences=ids) if generation_config.return_dict_in_generate else ids


def generate_with_assistant(
    model: Any,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    stop_strings: Any = None,
    stopping_criteria: Any = None,
    **arguments: Any,
) -> Any:
    """What `custom_generate=REPO` runs: `generate` passes an assistant and tokenizers to no function."""
    if assistant_tokenizer is not None:
        raise ValueError("custom_generate: assistant_tokenizer is not supported: both models need one vocabulary")
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None and tokenizer is not None:
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return model.generate(
        custom_generate=custom_generate, drafter=assistant_model, stopping_criteria=criteria, **arguments
    )


def limit_new_tokens(wanted: int, prompt: int, context: int) -> int:
    """At most as many new tokens as the target's context has room for; a context of 0 is unlimited."""
    if context and prompt >= context:
        raise ValueError(f"custom_generate: a prompt of {prompt} tokens, and the target's context is {context}")
    return min(wanted, context - prompt) if context else wanted


def choose_policy(fleet: ProcessFleet, target: Transformer, drafter: Transformer, sp: int) -> Policy:
    """`auto`, which starts each text from what it has learned of the same pair before."""
    controllers = _CONTROLLERS.setdefault(target.model, WeakKeyDictionary()).setdefault(drafter.model, {})
    if sp not in controllers:
        tokens = min(model.get_input_embeddings().num_embeddings for model in (target.model, drafter.model))
        sample = tuple(i % tokens for i in range(NUM_SAMPLED))
        profiler = FleetProfiler(fleet, sample, target.context, DRAFTER, drafter.context)
        own = profiler.latency()
        if own.target_ms > MAX_INLINE_MS:
            fleet.every_core = frozenset()  # which would be in a worker, where torch has one thread
        measured = measure_turns(profiler, fleet, own)
        config = SimulationConfig(measured.latency, PRIOR_ACCEPTANCE, sp, TOKENS, thread_pool=False)
        table = latency_table(config, in_background=True)
        controllers[sp] = AdaptiveController(table, (DRAFTER,), PRIOR_ACCEPTANCE), measured.every_core
    controller, fleet.every_core = controllers[sp]
    return controller


def decode(loop: EngineLoop, request: Request, input_ids: Any, criteria: Any, streamer: Any) -> Any:
    """Return the text with its prompt, up to where a stopping criterion ends it; stream it token by token."""
    # End tokens and the length are the request's own.
    others = StoppingCriteriaList(c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria))
    tokens: list[int] = []
    active = loop.submit(request)
    for token in chain.from_iterable(loop.follow(active)):
        tokens.append(token)
        stopped = bool(others) and bool(others(_append(input_ids, tokens), None).all())
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if stopped:
            loop.cancel(active)
            break
    active.completion()  # raises if the servers failed
    if streamer is not None:
        streamer.end()
    return _append(input_ids, tokens)


def _append(input_ids: Any, tokens: Sequence[int]) -> Any:
    return torch.cat([input_ids, torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def split_sampling(processors: Sequence[Any], do_sample: bool, seed: int) -> tuple[list[Any], Sampling]:
    """Split off the processors at the end that are sampling parameters, in the order `Sampling` applies them."""
    if not do_sample:
        return list(processors), Sampling()
    tail = list(takewhile(_is_parameter, reversed(processors)))[::-1]
    parameters: dict[str, Any] = {WARPERS[type(warper)]: getattr(warper, WARPERS[type(warper)]) for warper in tail}
    if list(parameters) != [name for name in WARPERS.values() if name in parameters] or len(parameters) < len(tail):
        return list(processors), Sampling(temperature=1.0, seed=seed)
    return list(processors[: len(processors) - len(tail)]), Sampling(**{"temperature": 1.0, **parameters}, seed=seed)


def _is_parameter(processor: Any) -> bool:
    is_plain = getattr(processor, "filter_value", -float("inf")) == -float("inf")
    return type(processor) in WARPERS and is_plain and getattr(processor, "min_tokens_to_keep", 1) == 1


def end_tokens(criteria: Any) -> frozenset[int]:
    ends = [criterion.eos_token_id.flatten().tolist() for criterion in criteria if type(criterion) is EosTokenCriteria]
    return frozenset(chain.from_iterable(ends))


def streamer_of_generate(model: Any) -> Any:
    """The streamer of the `generate` that called: transformers passes it to its own decoding loops only."""
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals["self"] is model):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["streamer"]


def same_size(model: Any, drafter: Any) -> bool:
    """Whether two vocabularies have one size; processors can depend on it."""
    a, b = (one.config.get_text_config().vocab_size for one in (model, drafter))
    return bool(a == b)


def check_models(model: Any, drafter: Any) -> None:
    if drafter is None:
        raise ValueError(
            "custom_generate: needs a drafter=, a smaller model of the same vocabulary "
            "(or, with custom_generate=dsi.REPO, an assistant_model=)"
        )
    for name, one in (("model", model), ("drafter", drafter)):
        if one.config.is_encoder_decoder:
            raise ValueError(f"custom_generate: the {name} has an encoder, but only decoders are supported")
        if one.device.type != "cpu":
            raise ValueError(f"custom_generate: the {name} is on {one.device}, but its servers run on CPU cores")


def check_config(config: Any) -> None:
    """Refuse other searches than sampling token by token, and outputs that there are not."""
    for name in set_fields(config, OTHER_SEARCHES):
        raise ValueError(
            f"custom_generate: {name}={getattr(config, name)} is not supported: it writes one text, token by token"
        )
    if getattr(config, "cache_implementation", None) == "quantized":
        raise ValueError("custom_generate: cache_implementation=quantized is not supported: its caches are exact")
    for name in OUTPUTS if getattr(config, "return_dict_in_generate", False) else ():
        if getattr(config, name, False):
            raise ValueError(f"custom_generate: {name}=True is not supported: only sequences are returned")


def check_inputs(input_ids: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse several texts, and inputs of the model that the servers would not see."""
    if input_ids.shape[0] != 1:
        raise ValueError(f"custom_generate: {input_ids.shape[0]} texts at once, but it writes one at a time")
    cache, positions = model_kwargs.get("past_key_values"), model_kwargs.get("position_ids")
    if cache is not None and getattr(cache, "_is_user_defined", cache.get_seq_length() > 0):
        raise ValueError("custom_generate: past_key_values is not supported: its servers have caches of their own")
    num_padding = count_padding(model_kwargs.get("attention_mask"))
    num_tokens = input_ids.shape[1] - num_padding
    if positions is not None and positions.flatten()[num_padding:].tolist() != list(range(num_tokens)):
        raise ValueError(f"custom_generate: position_ids other than 0 to {num_tokens - 1} are not supported")
    for name, value in model_kwargs.items():
        if name not in KNOWN and value is not None:
            raise ValueError(f"custom_generate: {name} is not supported: its servers take tokens only")


def count_padding(mask: Any) -> int:
    """How many tokens are padding, which must be on the left."""
    if mask is None:
        return 0
    bits = mask.flatten().tolist()
    num_padding = len(bits) - sum(map(bool, bits))
    if any(bits[:num_padding]) or num_padding == len(bits):
        raise ValueError(
            f"custom_generate: attention_mask has {num_padding} zeros among {len(bits)}, but only padding "
            "on the left of a text is supported"
        )
    return num_padding
