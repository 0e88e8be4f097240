"""One choice of a response as its text grows: characters, stop strings, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsi.core.messages import TopLogprobs
from dsi.core.sequence import Tokens
from dsi.models.tokenizer import Detokenizer, TextOutput, Tokenizer
from dsi.server.engine_thread import EngineOutput, GenerationJob, JobStats

MIN_LOGPROB = -9999.0  # for a probability of 0, whose logarithm JSON has no number for


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token, the characters it added, and the likeliest tokens in its place."""

    token: int
    text: str
    offset: int
    top_logprobs: TopLogprobs | None = None
    origin: str = ""
    time: float = 0.0

    @property
    def logprob(self) -> float | None:
        return None if self.top_logprobs is None else dict(self.top_logprobs).get(self.token, MIN_LOGPROB)


@dataclass(eq=False)
class ChoiceOutput:
    """One choice: `add` takes the engine's outputs, the rest puts them into the API's shapes."""

    index: int
    prompt: Tokens
    output: TextOutput
    num_logprobs: int | None = None  # of the likeliest tokens, in the response; None: no log-probabilities
    job: GenerationJob | None = None
    stats: JobStats | None = None  # once the job has ended
    offset: int = 0  # characters before the next token
    tokens: list[TokenText] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.output.tokenizer

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.output.stopped

    def add(self, output: EngineOutput) -> tuple[str, list[TokenText]]:
        """Append an output; returns the new characters and tokens, up to a stop string."""
        tokens, text = [], ""
        top_logprobs: Sequence[TopLogprobs | None] = output.top_logprobs or [None] * len(output.tokens)
        for token, origin, top in zip(output.tokens, output.origins, top_logprobs):
            characters, shown = self.output.push([token])
            tokens.append(TokenText(token, characters, self.offset, top, origin, output.time))
            self.offset += len(characters)
            text += shown
            if self.stopped:
                break
        if output.finish_reason:
            text += self.output.finish()
        self.tokens += tokens
        self.text += text
        self.finish_reason = "stop" if self.stopped else output.finish_reason
        return text, tokens

    def echo_prompt(self, top_logprobs: Sequence[TopLogprobs]) -> tuple[str, list[TokenText]]:
        """Append the prompt, with the target's log-probabilities of each token but the first."""
        tokens, detokenizer = [], Detokenizer(self.tokenizer)
        scores = (None, *top_logprobs) if top_logprobs else [None] * len(self.prompt)
        for token, top in zip(self.prompt, scores):
            characters = detokenizer.push([token])
            tokens.append(TokenText(token, characters, self.offset, top))
            self.offset += len(characters)
        text = "".join(token.text for token in tokens)
        self.tokens += tokens
        self.text += text
        return text, tokens

    @staticmethod
    def token_ids(tokens: Sequence[TokenText]) -> list[int]:
        """Without those of an echoed prompt, which have no origin."""
        return [token.token for token in tokens if token.origin]

    def decode(self, token: int) -> str:
        """The spelling of a token by itself, even of a special one."""
        return str(self.tokenizer.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def completion_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        """In the shape of `/v1/completions`."""
        if self.num_logprobs is None:
            return None
        return {
            "tokens": [self.decode(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top_by_spelling(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top_by_spelling(self, token: TokenText) -> dict[str, float] | None:
        """The likeliest tokens and this one; of those with one spelling, the likelier."""
        if token.top_logprobs is None:
            return None
        top = token.top_logprobs[: self.num_logprobs or 0]
        if all(candidate != token.token for candidate, _ in top):
            top = (*top, *(pair for pair in token.top_logprobs if pair[0] == token.token))
        by_spelling: dict[str, float] = {}
        for candidate, logprob in top:
            by_spelling.setdefault(self.decode(candidate), logprob)
        return by_spelling

    def chat_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        """In the shape of `/v1/chat/completions`."""
        if self.num_logprobs is None:
            return None
        return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}

    def _chat_entry(self, token: TokenText) -> dict[str, Any]:
        top = [self._logprob_json(*pair) for pair in (token.top_logprobs or ())[: self.num_logprobs]]
        return {**self._logprob_json(token.token, token.logprob), "top_logprobs": top}

    def _logprob_json(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelling = self.decode(token)
        return {"token": spelling, "logprob": logprob, "bytes": list(spelling.encode())}

    def trace_tokens(self, tokens: Sequence[TokenText]) -> Iterator[dict[str, Any]]:
        """Each token with its origin and its alternatives, in the shape of a trace."""
        for token in tokens:
            alternatives = [[self.decode(candidate), logprob] for candidate, logprob in token.top_logprobs or ()]
            yield {"text": token.text, "how": token.origin, "at": token.time, "alternatives": alternatives}
