"""llama.cpp's server: `/completion` with token ids. A good drafter; as a target it reads prefixes anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.endpoints.address import LLAMA_CPP
from dsi.models.endpoints.vllm import in_order
from dsi.models.endpoints.wire import Call, EndpointInfo, WireFormat, check_tokens, first_model, only, prefixes

COMPLETION = "/completion"
GREEDY_FIELDS = {"temperature": 0.0, "samplers": ["temperature"], "cache_prompt": True, "return_tokens": True}


class LlamaCppFormat(WireFormat):
    kind = LLAMA_CPP
    has_model_in_answers = False
    properties_path = "/props"

    def verify_calls(
        self, model: str, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int
    ) -> list[Call]:
        del model, sampling, prompt_length
        texts = prefixes(tokens, num_positions)
        prompt: object = texts if num_positions > 1 else texts[0]
        return [Call(COMPLETION, {"prompt": prompt, "n_predict": 1, **GREEDY_FIELDS})]

    def verified(self, answers: Sequence[Any], num_positions: int) -> Tokens:
        [answer] = answers
        results = in_order(answer) if isinstance(answer, list) else [answer]
        if len(results) != num_positions:
            raise ValueError(f"{len(results)} completions in answer to {num_positions} positions")
        return tuple(only(result["tokens"]) for result in results)

    def stream_call(
        self, model: str, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int
    ) -> Call:
        # With `ignore_eos` it would never choose an end token: the text may end early instead.
        del model, sampling, prompt_length
        return Call(COMPLETION, {"prompt": list(tokens), "n_predict": count, "stream": True, **GREEDY_FIELDS})

    def streamed(self, chunk: Any, num_received: int) -> Sequence[int]:
        """It sends nothing for a token that ends within a character: tokens after such a gap are dropped."""
        tokens = check_tokens(chunk["tokens"])
        predicted = chunk.get("tokens_predicted")
        return () if predicted is not None and predicted != num_received + len(tokens) else tokens

    def info(self, models: Any, properties: Any) -> EndpointInfo:
        entry = first_model(models)
        meta, settings = entry.get("meta") or {}, (properties or {}).get("default_generation_settings") or {}
        details = tuple((name, meta.get(name)) for name in ("n_vocab", "n_params", "size", "n_embd"))
        return EndpointInfo(
            self.kind,
            entry["id"],
            int(settings.get("n_ctx") or meta.get("n_ctx_train") or 0),
            meta.get("n_vocab"),
            str((properties or {}).get("model_path") or ""),
            (properties or {}).get("eos_token"),
            details,
        )

    def tokenize_call(self, model: str, text: str, add_special_tokens: bool) -> Call:
        del model
        return Call("/tokenize", {"content": text, "add_special": add_special_tokens})

    def detokenize_call(self, model: str, tokens: Sequence[int]) -> Call:
        del model
        return Call("/detokenize", {"tokens": list(tokens)})

    def detokenized(self, answer: Any) -> str:
        return str(answer["content"])
