"""vLLM: `/v1/completions` with a list of prefixes, which its prefix cache has read before.

Its `/inference/v1/generate` is never used: with its prefix cache it was seen to answer 19 of 91 blocks wrongly. One
prompt with `prompt_logprobs` would be right, but bypasses the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.core.messages import GREEDY, Sampling
from dsi.core.sequence import Tokens
from dsi.models.endpoints.address import VLLM
from dsi.models.endpoints.wire import (
    Call,
    EndpointInfo,
    WireFormat,
    completion_tokens,
    first_model,
    only,
    position_seed,
    prefixes,
)

COMPLETIONS = "/v1/completions"
# Named in every request: defaults come from the generation configuration of the model. A text does not end by itself,
# as the engine in front ends it.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
}


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


class VllmFormat(WireFormat):
    kind = VLLM
    samples = True

    def verify_calls(
        self, model: str, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int
    ) -> list[Call]:
        """One list of prefixes; sampled, one request for each, as a request has one seed."""
        del prompt_length
        texts = prefixes(tokens, num_positions)
        if not sampling.temperature:
            return [self._call(model, texts, 1, GREEDY)]
        return [self._call(model, text, 1, sampling, seed=position_seed(sampling, len(text))) for text in texts]

    def verified(self, answers: Sequence[Any], num_positions: int) -> Tokens:
        choices = [choice for answer in answers for choice in in_order(answer["choices"])]
        if len(choices) != num_positions:
            raise ValueError(f"{len(choices)} choices in answer to {num_positions} positions")
        return tuple(only(choice["token_ids"]) for choice in choices)

    def stream_call(
        self, model: str, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int
    ) -> Call:
        del sampling, prompt_length  # one seed would be for the whole stream: greedy drafts are accepted more often
        return self._call(model, list(tokens), count, GREEDY, stream=True)

    def streamed(self, chunk: Any, num_received: int) -> Sequence[int]:
        del num_received
        return completion_tokens(chunk)

    def info(self, models: Any, properties: Any) -> EndpointInfo:
        del properties
        entry = first_model(models)
        context, root = int(entry.get("max_model_len") or 0), str(entry.get("root") or "")
        return EndpointInfo(self.kind, entry["id"], context, source=root, details=(("root", root),))

    @staticmethod
    def _call(model: str, prompt: object, count: int, sampling: Sampling, **fields: object) -> Call:
        body = {"model": model, "prompt": prompt, "max_tokens": count, **sampling_fields(sampling), **NEUTRAL, **fields}
        return Call(COMPLETIONS, body)


def in_order(choices: Any) -> list[Any]:
    """The choices of an answer in the order of its prompts; two for one prompt, or none, are an error."""
    by_index = {choice["index"]: choice for choice in choices}
    if sorted(by_index) != list(range(len(choices))):
        raise ValueError(f"choices {sorted(by_index)} of {len(choices)}")
    return [by_index[i] for i in range(len(choices))]
