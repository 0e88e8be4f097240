"""Fields of requests that are no parameters here: refused by name if they could change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsi.server.errors import ApiError

# Parameters of OpenAI's and vLLM's APIs that are not supported, with values at which they have no effect; null never
# has one.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),  # of a chat
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Fields that clients send and that cannot change the answer.
WITHOUT_EFFECT = {
    "cache_salt",
    "include_reasoning",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
}


def check_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse the first of these fields that could change the answer, be it misspelt or not supported."""
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT or value in UNSUPPORTED.get(name, ()):
            continue
        if name in UNSUPPORTED or name.startswith("guided_"):
            raise unsupported(name)
        raise ApiError(400, f"{name[:100]}: is no parameter here", param=name[:100], code="unknown_parameter")


def unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name}: is not supported here", param=name, code="unsupported_parameter")
