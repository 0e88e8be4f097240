"""String-level exact match (SLEM; Timor et al., 2025): drafting through text.

The drafter continues the text in its own tokens; the continuation is encoded in the target's tokens, and the
first of them is the draft token, as soon as more text would not change it.

A draft token is a function of the text and the sampling, derived as if nothing had been requested before. Only
single steps of the drafter are cached, each by the whole of its input, so that most steps of the next draft
token are cache hits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.models.protocol import Backend, ForwardRequest
from dsi.models.vocab.vocabulary import BOUNDARY, IncrementalDecoder, Vocabulary, fit_context, incomplete_bytes
from dsi.sampling.logits import sample

MAX_STEPS = 24  # drafter tokens for one draft token
ENCODING_CONTEXT = 8  # tokens before the new text that are encoded with it, so that boundaries are right
MAX_WORD = 48  # bytes of the last word
CACHED_STEPS = 256


class SLEM:
    """`context` is the drafter's own; a longer text is truncated from the left. 0: unlimited."""

    def __init__(self, backend: Backend, drafter: Vocabulary, target: Vocabulary, context: int = 0) -> None:
        self._backend, self._drafter, self._target, self._context = backend, drafter, target, context
        self._decoder = IncrementalDecoder(target)
        self._steps: OrderedDict[tuple[Tokens, Sampling], int] = OrderedDict()

    def answer(self, request: ForwardRequest) -> Tokens:
        if request.start > len(request.tokens):
            own_tokens = fit_context(self._drafter.encode_prompt(self._text(request.tokens)), self._context)
            self._backend.forward(own_tokens, len(own_tokens) + 1, request.cancelled)
        positions = range(request.start, len(request.tokens) + 1)
        return tuple(self._guess(request.tokens[:i], request) for i in positions)

    def _guess(self, tokens: Sequence[int], request: ForwardRequest) -> int:
        """Continue from the beginning of the last word, if the drafter agrees with the word so far.

        The text may end within a word, where the drafter may have no token that begins. If it disagrees, or
        the word would be split differently, continue from the end of the text.
        """
        text, before = self._text(tokens), self._encoding_context(tokens)
        end = len(text) - incomplete_bytes(text)
        start = last_word_start(text, end)
        guess = None
        if start < end:
            guess = self._continue(text, start, before, request, strict=True)
        if guess is None:
            guess = self._continue(text, end, before, request, strict=False)
        if guess is None:
            return tokens[-1] if tokens else 0  # no sensible guess: any token will do
        return guess

    def _continue(self, text: bytes, start: int, before: bytes, request: ForwardRequest, strict: bool) -> int | None:
        """Return the target's token after `text` if the drafter continues from its first `start` bytes."""
        own_tokens, rest, generated = self._drafter.encode_prompt(text[:start]), text[start:], b""
        space = b" " if self._drafter.adds_space and not start else b""
        tokens: Tokens | None = ()
        for _ in range(MAX_STEPS):
            token, continuation = self._step(own_tokens, request), generated.removeprefix(space)
            if token in self._drafter.eos_token_ids:
                return tokens[0] if tokens else self._target.eos if continuation.startswith(rest) else None
            token_bytes = self._drafter.token_bytes(token)
            own_tokens, generated = (*own_tokens, token), generated + token_bytes
            continuation = generated.removeprefix(space)
            if not token_bytes or not (continuation.startswith(rest) or rest.startswith(continuation)):
                break
            new = continuation[len(rest) :]
            tokens = self._encode_new(before, new, strict)
            if tokens is None or (tokens and self._is_final(before, new)):
                break
        return tokens[0] if tokens else None

    def _encode_new(self, before: bytes, new: bytes, strict: bool) -> Tokens | None:
        """Encode the new text in the target's tokens; return None if a token would cross into the old text."""
        text = before + new
        complete = text[len(before) : len(text) - incomplete_bytes(text)]
        if not complete:
            return ()
        tokens = self._target.encode_after(before, complete)
        return self._target.encode_inside(complete) if tokens is None and not strict else tokens

    def _is_final(self, before: bytes, new: bytes) -> bool:
        """Whether no token of the target begins with all the new text and is longer."""
        return not self._target.has_longer_token(b" " * (self._target.adds_space and not before) + new)

    def _step(self, own_tokens: Tokens, request: ForwardRequest) -> int:
        """Sample the drafter's next token, with the noise of its own position and vocabulary."""
        key = (own_tokens, request.sampling)
        if key not in self._steps:
            fitting = fit_context(own_tokens, self._context)
            logits = self._backend.forward(fitting, len(fitting), request.cancelled)[0]
            self._steps[key] = sample(logits, request.sampling, len(own_tokens))
            if len(self._steps) > CACHED_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _text(self, tokens: Sequence[int]) -> bytes:
        """Decode without the space that the target's tokenizer puts before every text."""
        text = self._decoder.decode(tokens)
        return text.removeprefix(b" ") if self._target.adds_space else text

    def _encoding_context(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the last few tokens, from a character boundary on, back to a special token at most."""
        parts: list[bytes] = []
        for token in reversed(tokens):
            token_bytes = self._target.token_bytes(token)
            if not token_bytes:
                break
            parts.append(token_bytes)
            if len(parts) >= ENCODING_CONTEXT and token_bytes[0] & 0xC0 != 0x80:
                break
        return b"".join(reversed(parts))


def last_word_start(text: bytes, end: int) -> int:
    """Return where the last word begins; the end, if no boundary is near."""
    boundaries = [match.start() for match in BOUNDARY.finditer(text, max(0, end - MAX_WORD), end)]
    return boundaries[-1] if boundaries else 0 if end <= MAX_WORD else end
