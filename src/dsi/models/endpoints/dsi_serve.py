"""`dsi serve`: `/v1/verify` answers every position of a text in one request; its noise is keyed as ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.endpoints.address import DSI
from dsi.models.endpoints.vllm import COMPLETIONS, sampling_fields
from dsi.models.endpoints.wire import Call, EndpointInfo, WireFormat, check_tokens, completion_tokens, first_model

VERIFY = "/v1/verify"
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class DsiFormat(WireFormat):
    kind = DSI
    samples = True
    keyed_by_position = True
    penalties = PENALTIES

    def verify_calls(
        self, model: str, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int
    ) -> list[Call]:
        fields = {"model": model, "prompt": list(tokens), "num_positions": num_positions, "seed": sampling.seed}
        penalties = {name: getattr(sampling, name) for name in PENALTIES}
        return [Call(VERIFY, {**fields, **sampling_fields(sampling), **penalties, "prompt_length": prompt_length})]

    def verified(self, answers: Sequence[Any], num_positions: int) -> Tokens:
        [answer] = answers
        tokens = check_tokens(answer["tokens"])
        if len(tokens) != num_positions:
            raise ValueError(f"{len(tokens)} tokens in answer to {num_positions} positions")
        return tokens

    def stream_call(
        self, model: str, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int
    ) -> Call:
        del prompt_length
        fields = {"model": model, "prompt": list(tokens), "max_tokens": count, "seed": sampling.seed}
        more = {"repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True, "stream": True}
        return Call(COMPLETIONS, {**fields, **sampling_fields(sampling), **more})

    def streamed(self, chunk: Any, num_received: int) -> Sequence[int]:
        del num_received
        return completion_tokens(chunk)

    def info(self, models: Any, properties: Any) -> EndpointInfo:
        del properties
        entry = first_model(models)
        context, limit = int(entry.get("max_model_len") or 0), int(entry.get("max_tokens") or 0)
        return EndpointInfo(self.kind, entry["id"], context, source=entry["id"], max_new_tokens=limit)
