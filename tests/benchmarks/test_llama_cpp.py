"""llama.cpp's server on the built-in models: what DSI asks of an engine of this kind."""

from typing import Any

import httpx
import pytest

from dsi import Engine
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.sequence import Tokens
from dsi.models.names import BUILTIN, model_path
from llama_cpp import LlamaCpp

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "The little dog", "One day a girl named Lily")
GREEDY = {"temperature": 0, "samplers": ["temperature"], "cache_prompt": True, "return_tokens": True}


def complete(server: LlamaCpp, prompt: Any, tokens: int) -> Any:
    body = {**GREEDY, "prompt": prompt, "n_predict": tokens, "ignore_eos": True}
    answer = httpx.post(server.url + "/completion", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(role: str) -> list[tuple[Tokens, Tokens]]:
    """Prompts and greedy texts of one of the built-in models, as plain decoding gives them."""
    with Engine.load(target=model_path(BUILTIN, role), drafter="ngram", algorithm="nonsi") as engine:
        prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        return [(p, engine.generate(p, max_new_tokens=24, ignore_eos=True).tokens) for p in prompts]


def test_llama_cpp_drafts_the_tokens_of_the_drafter(llama_cpp_drafter: LlamaCpp) -> None:
    for prompt, tokens in texts(DRAFTER):
        assert complete(llama_cpp_drafter, prompt, 24)["tokens"] == list(tokens)


def test_llama_cpp_reads_only_what_is_new_of_a_text(llama_cpp_drafter: LlamaCpp) -> None:
    [(prompt, tokens), *_] = texts(DRAFTER)
    complete(llama_cpp_drafter, prompt, 8)
    answer = complete(llama_cpp_drafter, (*prompt, *tokens[:10]), 4)
    assert answer["tokens"] == list(tokens[10:14])
    assert answer["timings"]["prompt_n"] <= 4


def test_llama_cpp_verifies_by_a_list_of_prefixes(llama_cpp_target: LlamaCpp) -> None:
    for prompt, tokens in texts(TARGET):
        prefixes = [[*prompt, *tokens[:i]] for i in range(5)]
        answers = complete(llama_cpp_target, prefixes, 1)
        assert [answer["tokens"] for answer in answers] == [[token] for token in tokens[:5]]
