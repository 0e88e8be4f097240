"""The bodies of requests and responses: OpenAI's fields and a few of our own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from dsi.core.sequence import Tokens

MAX_INT = 1 << 31  # of any number; a server's own limits are lower
MAX_POSITIONS = 512  # of a verification, as of a lookahead
MAX_BIAS = 100  # of a logit, either way
TOKEN_ID = re.compile(r"^[0-9]{1,9}$")

# Unions are parsed by functions, so that an error names the field and not a member of the union.

Prompt = str | tuple[int, ...]
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PROMPT = {"anyOf": [{"type": "string"}, TEXTS, TOKENS, {"type": "array", "items": TOKENS, "minItems": 1}]}
STOP = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TOKEN_IDS = {"anyOf": [TOKENS | {"minItems": 0}, {"type": "null"}]}
BIAS = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
LOGIT_BIAS = {"anyOf": [{"type": "object", "patternProperties": {TOKEN_ID.pattern: BIAS}}, {"type": "null"}]}
WORDS = {"anyOf": [{"type": "array", "items": {"type": "string", "minLength": 1}}, {"type": "null"}]}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}, {"type": "null"}]}


def parse_prompts(value: Any) -> list[Prompt]:
    """Text or token ids, or a list of either. Pydantic would take too long on a long list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of either")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(_is_token(item) for item in value):
        return [tuple(value)]
    if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in value):
        return [tuple(item) for item in value]
    raise ValueError("must be text, token ids, or a list of either")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_INT


def parse_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be text or a list of texts")
    return stops


def parse_content(value: Any, info: ValidationInfo) -> str:
    """The text of a message, whole or in parts; an assistant's may be missing."""
    if value is None and info.data.get("role") == "assistant":
        return ""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(map(_is_text, parts)):
        raise ValueError("must be text, or a list of parts of the type text")
    return "".join(part["text"] for part in parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def parse_token_ids(value: Any) -> Tokens | None:
    if value is not None and not (isinstance(value, list) and all(map(_is_token, value))):
        raise ValueError("must be a list of token ids")
    return None if value is None else tuple(value)


def parse_tokens(value: Any) -> Tokens:
    """As `parse_token_ids` of a list that is not empty, without a look at each: it comes with every forward."""
    if not isinstance(value, list) or set(map(type, value)) != {int} or min(value) < 0 or max(value) >= MAX_INT:
        raise ValueError("must be a list of token ids, at least one")
    return tuple(value)


def parse_logit_bias(value: Any) -> dict[int, float]:
    """Biases by token id: the keys of a JSON object are strings."""
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(TOKEN_ID.fullmatch(token) for token in value):
        raise ValueError("must be an object of token ids and numbers")
    for token, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {token} must be a number between -{MAX_BIAS} and {MAX_BIAS}")
    return {int(token): float(bias) for token, bias in value.items()}


def parse_words(value: Any) -> list[str]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError("must be a list of words, none of them empty")
    return words


TokenIds = Annotated[Tokens | None, PlainValidator(parse_token_ids), WithJsonSchema(TOKEN_IDS)]
LogitBias = Annotated[dict[int, float], PlainValidator(parse_logit_bias), WithJsonSchema(LOGIT_BIAS)]
Words = Annotated[list[str], PlainValidator(parse_words), WithJsonSchema(WORDS)]


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class Body(BaseModel):
    """Fields of both kinds of completion. Others are kept, for `check_unknown` to refuse some of them by name."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False})

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_INT)
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, le=MAX_INT, description="0 or -1: all tokens")
    min_p: float | None = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[str], PlainValidator(parse_stops), WithJsonSchema(STOP)] = []
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: LogitBias = {}
    # As in vLLM.
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_INT)
    min_tokens: int | None = Field(0, ge=0, le=MAX_INT)
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = False
    bad_words: Words = []
    allowed_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = False
    return_token_ids: bool | None = Field(False, description="Of each choice, and of prompts in a whole response.")
    add_special_tokens: bool | None = Field(None, description="By default true for a prompt, false for a chat.")
    # Extensions.
    algorithm: Literal["nonsi", "si", "pearl", "dsi", "auto"] | None = None
    lookahead: int | None = Field(None, ge=1, le=MAX_POSITIONS)
    rule: Literal["match", "reject", "block", "specinfer"] | None = None
    timeout: float | None = Field(None, gt=0, description="Seconds until the answer must be complete.")
    trace: bool | None = Field(False, description="Report the origin of each token and what the servers computed.")


class CompletionBody(Body):
    prompt: Annotated[list[Prompt], PlainValidator(parse_prompts), WithJsonSchema(PROMPT)]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_INT, description="Must be n.")


class Message(BaseModel):
    """Other fields than these two, `name` and `tool_calls` say, are given to the model's chat template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, PlainValidator(parse_content), WithJsonSchema(CONTENT)] = Field(None, validate_default=True)


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class VerifyBody(BaseModel):
    """A text of which the target's tokens are wanted. Other fields are kept, for `check_unknown` to refuse."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False})

    prompt: Annotated[Tokens, PlainValidator(parse_tokens), WithJsonSchema(TOKENS)]
    num_positions: int = Field(ge=1, le=MAX_POSITIONS, description="After so many of the last prefixes of the prompt.")
    prompt_length: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="Tokens that the text began with: by them it is known again as it grows.",
    )
    model: str | None = None
    temperature: float = Field(0.0, ge=0, le=100)
    top_k: int = Field(0, ge=-1, le=MAX_INT, description="0 or -1: all tokens")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_INT)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)


class TokenizeBody(BaseModel):
    """A text or a conversation to tokenize, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool = Field(True, description="Of a prompt: those that begin every text.")
    add_generation_prompt: bool = Field(True, description="Of messages: what begins the answer.")
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have either prompt or messages")
        return self


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(strict=True, ge=0, lt=MAX_INT)]] = Field(fail_fast=True)


# Responses, for `/openapi.json`.


class VerifyResponse(BaseModel):
    tokens: list[int] = Field(description="The last one follows the whole prompt.")
    model: str


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerChoice(BaseModel):
    index: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: dict[str, Any] = Field(description="Speculation, timing and overlap of the response.")


class TextChoice(AnswerChoice):
    text: str


class CompletionResponse(Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(AnswerChoice):
    message: AnswerMessage


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
