"""Tokenizers of engines behind URLs: loaded here where that is possible, and asked for over HTTP otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsi.core.messages import TARGET
from dsi.core.sequence import Tokens
from dsi.engine.build import end_tokens
from dsi.engine.generation_config import load_generation_config
from dsi.fleets.endpoint import Endpoint, EndpointError
from dsi.models.hf import read_tokenizer
from dsi.models.names import BUILTIN, model_path
from dsi.models.tokenizer import Tokenizer

SAMPLES = (  # texts by which tokenizers are compared
    "Once upon a time, there was a little girl.",
    "def add(a, b):\n    return a + b  # 1234567890",
    'Ünïcödé, 日本語 and 🙂: {"x": [1, 2]}',
)


class EndpointTokenizer:
    """What `Tokenizer` uses of a transformers tokenizer, by `/tokenize` and `/detokenize` of an endpoint."""

    is_fast = True
    bos_token_id = None
    chat_template = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.eos_token_id = self._eos()
        self.all_special_ids = [] if self.eos_token_id is None else [self.eos_token_id]

    def _eos(self) -> int | None:
        """The end token, where the endpoint says how it is spelled."""
        spelling = self._endpoint.info.eos_token
        tokens = self._encode(spelling, False) if spelling else ()
        return tokens[0] if len(tokens) == 1 else None

    def __len__(self) -> int:
        return self._endpoint.info.vocab_size or 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Tokens]:
        return {"input_ids": self._encode(text, add_special_tokens)}

    def _encode(self, text: str, add_special_tokens: bool) -> Tokens:
        try:
            return self._endpoint.loop.run(self._endpoint.tokenize(text, add_special_tokens))
        except EndpointError as error:
            raise ValueError(f"{error} (its tokenizer is needed; say which it is with --tokenizer)") from None

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        ids = [token for token in tokens if token != self.eos_token_id]
        return self._endpoint.loop.run(self._endpoint.detokenize(ids)) if ids else ""

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [self.decode([token]) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """It is not known."""
        return {}


def target_tokenizer(name: str | None, endpoint: Endpoint) -> Tokenizer:
    """The tokenizer of this name; otherwise that of the endpoint's model if it is here, or the endpoint's own."""
    if name is not None:
        tokenizer = load_local(name)
        if tokenizer is None:
            raise ValueError(f"tokenizer {name!r}: there is no tokenizer that can be loaded")
        check_endpoint_tokens(tokenizer, endpoint, name)
        return tokenizer
    for source in dict.fromkeys((endpoint.info.source, endpoint.info.model)):
        tokenizer = load_local(source) if is_here(source) else None
        if tokenizer is not None and differing_sample(tokenizer, endpoint) is None:
            return tokenizer
    return Tokenizer(EndpointTokenizer(endpoint))


def is_here(source: str) -> bool:
    """Whether a model's files may be on this machine: nothing is downloaded."""
    return source == BUILTIN or Path(source).exists() or bool(source and source.count("/") == 1 and source[0] != "/")


def load_local(name: str) -> Tokenizer | None:
    """A tokenizer by a folder or name, with the end tokens of the generation configuration beside it."""
    path = model_path(name, TARGET)
    with suppress(Exception):
        tokenizer, ends = read_tokenizer(path), list[int]()
        with suppress(Exception):
            ends = end_tokens(load_generation_config(path).eos_token_id)
        return Tokenizer(tokenizer, ends)
    return None


def differing_sample(tokenizer: Tokenizer, endpoint: Endpoint) -> str | None:
    """A text whose tokens at the endpoint are another text here; None where it has no tokenizer to ask.

    One vocabulary can be used in two ways: engines split some texts differently.
    """
    for text in SAMPLES:
        try:
            tokens = endpoint.loop.run(endpoint.tokenize(text, False))
        except EndpointError:
            return None
        own = tokenizer.encode(text, add_special_tokens=False)
        if tokens != own and tokenizer.decode(tokens) != tokenizer.decode(own):
            return text
    return None


def check_endpoint_tokens(tokenizer: Tokenizer, endpoint: Endpoint, name: str) -> None:
    """Refuse an endpoint whose tokens are others than those of the target's tokenizer."""
    text = differing_sample(tokenizer, endpoint)
    if text is not None:
        raise ValueError(
            f"{endpoint.url}: has another vocabulary than {name}: it encodes {text[:20]!r} with other tokens"
        )
