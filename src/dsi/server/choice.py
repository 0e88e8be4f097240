"""One text of an answer as it grows: its characters, its stops, and what is said of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsi.core.messages import TopLogprobs
from dsi.core.sequence import Tokens
from dsi.models.tokenizer import Detokenizer, StopStrings, Tokenizer
from dsi.server.engine_thread import EngineOutput, ServerJob

FLOOR = -9999.0  # the logarithm of a probability of nothing, which JSON has no number for


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token in the text: what it added to it, where, and what else might have stood there."""

    token: int
    spelling: str
    offset: int
    note: TopLogprobs | None = None
    origin: str = ""
    at: float = 0.0

    @property
    def logprob(self) -> float | None:
        return None if self.note is None else dict(self.note).get(self.token, FLOOR)


@dataclass
class ChoiceOutput:
    index: int
    prompt: Tokens
    text: Tokenizer
    stops: Sequence[str]
    seed: int
    best: int | None = None  # how many of the likeliest tokens are to be named; None: nobody asks
    ticket: ServerJob | None = None
    offset: int = 0  # characters before the next token
    words: list[TokenText] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    root: int = 0
    tip: int = 0

    def __post_init__(self) -> None:
        self._spelling = Detokenizer(self.text, self.prompt)  # token by token
        self._stops = StopStrings(self.stops)

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def take(self, update: EngineOutput) -> tuple[str, list[TokenText]]:
        """The characters and tokens that this news makes certain; what follows a stop is not taken."""
        words, piece = [], ""
        self.root, self.tip = update.root, update.tip
        notes: Sequence[TopLogprobs | None] = update.notes or [None] * len(update.tokens)
        for token, origin, note in zip(update.tokens, update.origins, notes):
            added = self._spelling.push([token])
            words.append(TokenText(token, added, self.offset, note, origin, update.at))
            self.offset += len(added)
            piece += self._stops.push(added)
            if self.stopped:
                break
        if update.ended and not self.stopped:
            piece += self._rest()
        self.words += words
        self.pieces.append(piece)
        self.finish_reason = "stop" if self.stopped else update.ended
        return piece, words

    def _rest(self) -> str:
        shown = self._stops.push(self._spelling.finish())
        return shown if self.stopped else shown + self._stops.finish()

    def read(self, notes: Sequence[TopLogprobs]) -> tuple[str, list[TokenText]]:
        """The prompt, with what the target thought of each token but the first."""
        words, spelling = [], Detokenizer(self.text)
        for token, note in zip(self.prompt, (None, *notes) if notes else [None] * len(self.prompt)):
            added = spelling.push([token])
            words.append(TokenText(token, added, self.offset, note))
            self.offset += len(added)
        self.words += words
        self.pieces.append("".join(word.spelling for word in words))
        return self.pieces[-1], words

    def one_token(self, token: int) -> str:
        """A token by itself, special ones too."""
        return str(self.text.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def completion_logprobs(self, words: Sequence[TokenText]) -> dict[str, Any] | None:
        """As `/v1/completions` has them."""
        if self.best is None:
            return None
        return {
            "tokens": [self.one_token(word.token) for word in words],
            "token_logprobs": [word.logprob for word in words],
            "top_logprobs": [self._top(word) for word in words],
            "text_offset": [word.offset for word in words],
        }

    def _top(self, word: TokenText) -> dict[str, float] | None:
        """The likeliest tokens and this one; of those that are spelled alike, the likelier."""
        if word.note is None:
            return None
        found: dict[str, float] = {}
        for token, log in self._best(word):
            found.setdefault(self.one_token(token), log)
        return found

    def _best(self, word: TokenText) -> TopLogprobs:
        note = word.note or ()
        kept = note[: self.best or 0]
        return kept if any(token == word.token for token, _ in kept) else (*kept, *_of(word, note))

    def chat_logprobs(self, words: Sequence[TokenText]) -> dict[str, Any] | None:
        """As `/v1/chat/completions` has them."""
        if self.best is None:
            return None
        return {"content": [self._entry(word) for word in words], "refusal": None}

    def _entry(self, word: TokenText) -> dict[str, Any]:
        top = [self._named(token, log) for token, log in (word.note or ())[: self.best]]
        return {**self._named(word.token, word.logprob), "top_logprobs": top}

    def _named(self, token: int, log: float | None) -> dict[str, Any]:
        spelling = self.one_token(token)
        return {"token": spelling, "logprob": log, "bytes": list(spelling.encode())}

    def tinted(self, words: Sequence[TokenText]) -> Iterator[dict[str, Any]]:
        """For whoever wants to see how each token came."""
        for word in words:
            others = [[self.one_token(token), log] for token, log in word.note or ()]
            yield {"text": word.spelling, "how": word.origin, "at": word.at, "alternatives": others}


def _of(word: TokenText, note: TopLogprobs) -> TopLogprobs:
    return tuple(pair for pair in note if pair[0] == word.token)
