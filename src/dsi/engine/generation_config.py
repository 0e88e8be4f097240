"""The generation configuration of a model folder: what of it an engine honours, as transformers does."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from transformers import GenerationConfig

from dsi.engine.config import EngineConfig
from dsi.models.hf import load_config
from dsi.models.logits_processors import LogitsProcessors
from dsi.models.names import gguf_file

# Fields, with the value at which they have no effect; None never has one.
PROCESSORS = {  # which make logits processors that depend on the text alone
    "sequence_bias": None,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "forced_bos_token_id": None,
    "remove_invalid_values": False,
    "suppress_tokens": None,
}
PENALTY = {"repetition_penalty": 1.0}  # which is the default of a request's own
WARPERS = {"typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}  # where it samples
OTHER_SEARCHES = {  # which DSI, one text token by token, is not
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "speculation_type": None,
}
IGNORED = {  # by an engine, whose processors know neither the length of the prompt nor that of the text
    "max_length": 20,
    "min_new_tokens": 0,
    "begin_suppress_tokens": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "max_time": None,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
    **OTHER_SEARCHES,
}
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' defaults


def set_fields(config: Any, neutral: dict[str, Any]) -> list[str]:
    """The names of those fields that are set to something that has an effect."""
    return [name for name, value in neutral.items() if getattr(config, name, None) not in (None, value)]


def load_generation_config(path: str) -> Any:
    """Read a model's generation configuration, or derive it from the model's own, as transformers does."""
    with suppress(OSError):  # it may have none of its own
        if gguf_file(path) is None:
            return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(load_config(path))


def process_logits(model: Any) -> LogitsProcessors | None:
    """Build the logits processors of a model's generation configuration; None if there are none."""
    config = copy.deepcopy(model.generation_config)
    if not set_fields(config, PROCESSORS):
        return None
    for name in (*IGNORED, *WARPERS, *PENALTY):
        setattr(config, name, None)
    config.do_sample = False
    model._prepare_special_tokens(config, device="cpu")
    return LogitsProcessors(model._get_logits_processor(config, 1, device="cpu"))


def ignored_fields(config: Any, engine: EngineConfig, has_limit: bool) -> list[str]:
    """The fields that an engine does not honour; a limit of new tokens takes precedence over `max_length`."""
    ignored = [name for name in set_fields(config, IGNORED) if name != "max_length" or not has_limit]
    ignored += set_fields(config, WARPERS) if config.do_sample else []
    if engine.fleet is not None or engine.target_devices is not None:
        ignored += set_fields(config, PENALTY | PROCESSORS)
    return ignored


def request_defaults(config: Any) -> dict[str, Any]:
    """The arguments of a request that a configuration sets: sampling parameters only if it samples."""
    given = {name: getattr(config, name, None) for name in ("max_new_tokens", *SAMPLING)}
    wanted = ("max_new_tokens", *SAMPLING) if config.do_sample else ("max_new_tokens",)
    defaults = SAMPLING if config.do_sample else {}
    return defaults | {name: given[name] for name in wanted if given[name] is not None}
