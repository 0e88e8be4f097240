"""Between text and tokens: the tokenizer, incremental detokenization, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsi.core.sequence import Tokens

REPLACEMENT = "\ufffd"  # what a decoder writes for an incomplete character


class Tokenizer:
    """A transformers tokenizer, reduced to what the engine needs."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if own is None else {own})

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.tokenizer)

    def encode(self, text: str) -> Tokens:
        tokens = tuple(self.tokenizer(text)["input_ids"])
        if tokens:
            return tokens
        start = self.tokenizer.bos_token_id
        if start is None:
            raise ValueError("an empty prompt: this tokenizer has no token to begin a text with")
        return (start,)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def has_chat_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Encode a conversation with the chat template; without one, as the messages joined by spaces."""
        if not self.has_chat_template:
            return self.encode(" ".join(message["content"] for message in messages))
        encoded = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
        return tuple(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())


class Detokenizer:
    """Convert tokens to text as they arrive, in whole characters.

    A token's text can depend on the one before it, so new tokens are decoded together with the last ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-4:])
        self._prefix_start, self._shown = 0, len(self._tokens)

    def push(self, tokens: Iterable[int]) -> str:
        self._tokens += tokens
        return self._new_text(final=False)

    def finish(self) -> str:
        """Return the rest, complete or not."""
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        prefix = self._tokenizer.decode(self._tokens[self._prefix_start : self._shown])
        text = self._tokenizer.decode(self._tokens[self._prefix_start :])
        if not final and text.endswith(REPLACEMENT):
            return ""
        self._prefix_start, self._shown = self._shown, len(self._tokens)
        return text[len(prefix) :]


class StopStrings:
    """End a text before any of these strings, independently of token boundaries."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held_back = ""
        self.stopped = False

    def push(self, new_text: str) -> str:
        """Return what can be shown: up to the first stop string, or to where one may be beginning."""
        text = self._held_back + new_text
        matches = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held_back = True, ""
            return text[: min(matches)]
        overlap = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - overlap :]
        return text[: len(text) - overlap]

    def finish(self) -> str:
        rest, self._held_back = self._held_back, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextOutput:
    """The text of a growing sequence: detokenized without half characters, and ended before a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Iterable[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, tokens: Iterable[int]) -> tuple[str, str]:
        """Return what these tokens add to the text, and what of it cannot belong to a stop string any more."""
        added = self._detokenizer.push(tokens)
        return added, self._stops.push(added)

    def finish(self) -> str:
        """Return the rest of a text that no stop string has ended."""
        if self.stopped:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text if self.stopped else text + self._stops.finish()
