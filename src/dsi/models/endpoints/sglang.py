"""SGLang: `/generate` with the log-probabilities of the prompt. Written by its documentation; it has not met one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.endpoints.address import SGLANG
from dsi.models.endpoints.wire import Call, EndpointInfo, WireFormat, check_tokens, first_model, only

GENERATE = "/generate"
GREEDY_FIELDS = {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}


class SglangFormat(WireFormat):
    kind = SGLANG
    has_model_in_answers = False

    def verify_calls(
        self, model: str, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int
    ) -> list[Call]:
        """The likeliest token at each place of the prompt, from one place earlier: that one is answered with None."""
        del model, sampling, prompt_length
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {**GREEDY_FIELDS, "max_new_tokens": 1},
        }
        if num_positions > 1:
            start = len(tokens) - num_positions
            body |= {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        return [Call(GENERATE, body)]

    def verified(self, answers: Sequence[Any], num_positions: int) -> Tokens:
        [answer] = answers
        places = answer["meta_info"]["input_top_logprobs"][1:] if num_positions > 1 else []
        if len(places) != num_positions - 1:
            raise ValueError(f"{len(places)} places in answer to {num_positions} positions")
        return *(only([place[0][1]]) for place in places), only(answer["output_ids"])

    def stream_call(
        self, model: str, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int
    ) -> Call:
        del model, sampling, prompt_length
        parameters = {**GREEDY_FIELDS, "max_new_tokens": count}
        return Call(GENERATE, {"input_ids": list(tokens), "sampling_params": parameters, "stream": True})

    def streamed(self, chunk: Any, num_received: int) -> Sequence[int]:
        """Each chunk has all tokens so far or, by an option of the server, only the new ones."""
        tokens = check_tokens(chunk["output_ids"])
        return tokens[num_received:] if len(tokens) == chunk["meta_info"]["completion_tokens"] else tokens

    def info(self, models: Any, properties: Any) -> EndpointInfo:
        del properties
        entry = first_model(models)
        root = str(entry.get("root") or entry["id"])
        return EndpointInfo(
            self.kind, entry["id"], int(entry.get("max_model_len") or 0), source=root, details=(("root", root),)
        )
