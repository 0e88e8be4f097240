"""Between text and tokens: the tokenizer, incremental detokenization, stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from dsi.core.sequence import Tokens

REPLACEMENT = "\ufffd"  # what a decoder writes for an incomplete character
MAX_DECODED = 1 << 15  # tokens, and pairs of them, whose spelling is kept
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # of tokenizers that fall back to bytes


class Tokenizer:
    """A transformers tokenizer, reduced to what the engine needs."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        # Those of the generation configuration, as in transformers; without any, the tokenizer's own.
        self.eos_token_ids = frozenset(eos_token_ids) or frozenset(() if own is None else (own,))

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> Tokens:
        """Encode a text; with special tokens it has at least one."""
        check_unicode("text", text)
        tokens = tuple(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if tokens or not add_special_tokens:
            return tokens
        start = self.tokenizer.bos_token_id
        if start is None:
            raise ValueError("an empty prompt: this tokenizer has no token to begin a text with")
        return (start,)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def decode_few(self) -> Callable[[Tokens], str]:
        """`decode` of a token or two, which is asked for again and again while texts grow."""
        return lru_cache(MAX_DECODED)(self.decode)

    def encode_word(self, word: str) -> list[Tokens]:
        """The tokens of a word at the beginning of a text and, if other ones as many, within it: as vLLM does."""
        first, inside = (
            tuple(self.tokenizer(space + check_unicode("word", word).lstrip(), add_special_tokens=False)["input_ids"])
            for space in ("", " ")
        )
        differs = len(inside) == len(first) and inside[:1] != first[:1]
        return [first, inside] if differs else [first]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that decoding skips."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked = {id for id, token in added.items() if token.special}
        return frozenset(marked if self.tokenizer.is_fast else {*marked, *self.tokenizer.all_special_ids})

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that are one byte each."""
        vocab = self.tokenizer.get_vocab()
        return frozenset(id for token, id in vocab.items() if BYTE_TOKEN.fullmatch(token))

    @property
    def has_chat_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        add_special_tokens: bool | None = None,
    ) -> Tokens:
        """Encode a conversation with the chat template; without one, as the messages joined by spaces.

        By default, special tokens are added only without a template, which has its own.
        """
        if not self.has_chat_template:
            text = " ".join(message["content"] for message in messages)
            return self.encode(text, add_special_tokens is not False)
        conversation: Any = list(messages)
        if add_special_tokens:
            return self.encode(
                self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=add_generation_prompt, tokenize=False
                )
            )
        encoded = self.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=True
        )
        return tuple(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())


def check_unicode(name: str, text: str) -> str:
    """Refuse lone surrogates, which stand for invalid UTF-8 in an argument of a command, and are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"lone surrogate U+{code:04X}"
        raise ValueError(f"a {name} with the {what} at position {error.start}: is not valid UTF-8") from None
    return text


class Detokenizer:
    """Convert tokens to text as they arrive: joined, the parts are what decoding all tokens at once adds to the prompt.

    Only text that no further token can change is shown. A byte-level decoder ends with a replacement character
    while a character is incomplete. A decoder with byte fallback replaces every byte of a run of byte tokens if
    one of them is invalid, so that a run is shown at its end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = self._without_special(prompt)
        # The tokens that are decoded again, because the text of a token can depend on the one before, and those shown.
        self._start, self._shown = 0, len(self._tokens)

    def push(self, tokens: Iterable[int]) -> str:
        new_tokens = self._without_special(tokens)
        self._tokens += new_tokens
        return self._new_text(final=False) if new_tokens else ""

    def finish(self) -> str:
        """Return the rest, complete or not."""
        return self._new_text(final=True)

    def _without_special(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if token not in self._tokenizer.special_ids]

    def _new_text(self, final: bool) -> str:
        if self._shown == len(self._tokens) or (not final and self._tokens[-1] in self._tokenizer.byte_ids):
            return ""
        text = self._decode(self._tokens[self._start :])
        if not final and text.endswith(REPLACEMENT):
            return ""
        before = self._decode(self._tokens[self._start : self._shown])
        added = text[_common_length(before, text) :]
        if added:
            self._start = self._shown
        self._shown = len(self._tokens)
        return added

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode_few(tuple(tokens)) if len(tokens) <= 2 else self._tokenizer.decode(tokens)


def _common_length(before: str, text: str) -> int:
    """Return how much of the text was there before; less than all if a prompt ended within a character."""
    if text.startswith(before):
        return len(before)
    return next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), len(text))


class StopStrings:
    """End a text before any of these strings, or with it, independently of token boundaries."""

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        self._stops, self._include = [stop for stop in stops if stop], include
        self._held_back = ""
        self.stopped = False

    def push(self, new_text: str) -> str:
        """Return what can be shown: up to the first stop string, or to where one may be beginning."""
        text = self._held_back + new_text
        matches = [(at, len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held_back = True, ""
            at, length = min(matches)
            return text[: at + length * self._include]
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
    """The text of a growing sequence: detokenized without half characters, and ended before a stop string.

    The tokens `ends`, which end a text, are not shown, unless `include_stop` shows them and stop strings. Stop
    strings do not count in the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Iterable[str] = (),
        ends: Collection[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops, include_stop)
        self._hidden, self._min_tokens = () if include_stop else ends, min_tokens
        self.num_tokens = 0  # up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, tokens: Iterable[int]) -> tuple[str, str]:
        """Return what these tokens add to the text, and what of it cannot belong to a stop string any more.

        Tokens after a stop string are dropped, however many arrive at once.
        """
        added, shown = "", ""
        for token in tokens:
            if self.stopped:
                break
            characters = "" if token in self._hidden else self._detokenizer.push([token])
            self.num_tokens += 1
            added += characters
            shown += self._stops.push(characters) if self.num_tokens > self._min_tokens else characters
        return added, shown

    def finish(self) -> str:
        """Return the rest of a text that no stop string has ended."""
        if self.stopped:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text if self.stopped else text + self._stops.finish()
