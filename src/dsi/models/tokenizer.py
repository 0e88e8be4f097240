"""Between characters and tokens: a tokenizer, text that grows by whole characters, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsi.core.sequence import Tokens

HALF = "\ufffd"  # what a decoder writes for a character that is not complete


class Tokenizer:
    """A tokenizer of transformers, as much of it as we need."""

    def __init__(self, tokenizer: Any, ends: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(ends) | (frozenset() if own is None else {own})

    @property
    def size(self) -> int:
        """How many tokens it knows."""
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
        """A conversation as the model was taught to read one; without a template, as one running text."""
        if not self.has_chat_template:
            return self.encode(" ".join(message["content"] for message in messages))
        found = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
        return tuple(found["input_ids"] if isinstance(found, Mapping) else found)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())


class Detokenizer:
    """Text as tokens arrive, never half a character.

    A token's spelling can depend on the one before it, so each piece is decoded together with the last.
    """

    def __init__(self, text: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._text = text
        self._tokens = list(prompt[-4:])
        self._from, self._shown = 0, len(self._tokens)

    def push(self, tokens: Iterable[int]) -> str:
        self._tokens += tokens
        return self._piece(final=False)

    def finish(self) -> str:
        """What is left, complete or not."""
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        before = self._text.decode(self._tokens[self._from : self._shown])
        now = self._text.decode(self._tokens[self._from :])
        if not final and now.endswith(HALF):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]


class StopStrings:
    """Ends a text before any of these strings, wherever the borders between tokens are."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """What can be shown: up to the first stop, or to where one may be beginning."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is a beginning of `stop`."""
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
