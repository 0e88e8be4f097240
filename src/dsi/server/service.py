"""From a client's request to jobs for the engine thread, and from its outputs to the deltas of a response."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

from dsi.core.messages import Sampling
from dsi.core.sequence import Tokens
from dsi.core.spec import ALGORITHMS, AUTO, SpecConfig
from dsi.engine.config import default_algorithm, fill_spec
from dsi.engine.deployment import ContextLengthError
from dsi.engine.engine import Engine
from dsi.models.tokenizer import TextOutput
from dsi.planning.latency import LatencyModel
from dsi.server.choice import ChoiceOutput, TokenText
from dsi.server.engine_thread import EngineOutput, EngineThread, GenerationJob, JobStats, ServerStatus
from dsi.server.errors import ApiError, context_length_exceeded, deadline_exceeded, engine_failed, shutting_down
from dsi.server.inbox import Inbox
from dsi.server.limits import MAX_STOP_LENGTH, Limits
from dsi.server.metrics import Metrics
from dsi.server.parameters import check_unknown, unsupported
from dsi.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody, Message, Prompt, TokenizeBody
from dsi.server.traces import Traces
from dsi.server.workers import Workers

log = logging.getLogger("dsi.server")

MAX_WORD_LENGTH = 16  # characters of a bad word, on average
MAX_TOKEN_LENGTH = 64  # characters: a longer prompt has more tokens than its characters divided by this
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
TOKENIZER_THREADS = 2  # more would take the cores of the models
TRACE_LOGPROBS = 3  # alternatives of each token that a trace shows
CALL_FIELDS = frozenset({"tool_calls", "tool_call_id", "function_call"})  # of a message
T = TypeVar("T")


@dataclass(frozen=True)
class EngineInfo:
    """What never changes of an engine, read once before its thread starts."""

    spec: SpecConfig  # of requests that leave it open
    context: int  # tokens; 0: unbounded
    sp: int
    lookaheads: Mapping[str, int]  # by algorithm
    min_draft: int
    latency: LatencyModel
    vocab_size: int
    repetition_penalty: float  # of requests that leave it open
    on_devices: bool  # or behind URLs: where there are neither log-probabilities nor penalties

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Also makes the engine simulate now what requests could not wait for."""
        deployment = engine.deployment
        _ = deployment.latency_table  # for `auto`
        return cls(
            engine.spec,
            deployment.context,
            deployment.sp,
            {algorithm: deployment.lookahead(algorithm) for algorithm in ALGORITHMS},
            engine.min_draft,
            deployment.latency,
            engine.tokenizer.size if deployment.vocab_size is None else deployment.vocab_size,
            deployment.repetition_penalty,
            on_devices=bool(deployment.plans or deployment.endpoints),
        )

    def lookahead(self, algorithm: str) -> int | None:
        """None under `auto`, which chooses its own as it goes."""
        return None if algorithm == AUTO else self.lookaheads[algorithm]


@dataclass(eq=False)
class ApiRequest:
    """One request of a client."""

    id: str
    client: int
    chat: bool
    model: str
    choices: list[ChoiceOutput]
    algorithm: str
    lookahead: int | None
    rule: str
    seconds: float
    stream: bool
    usage: bool
    trace: bool
    echo: bool
    token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)
    ttft: float | None = None  # seconds
    last_token: float = 0.0  # when it came
    servers: Sequence[ServerStatus] = ()
    open: set[ChoiceOutput] = field(default_factory=set)  # whose last output has not come
    outputs: asyncio.Queue[tuple[ChoiceOutput, EngineOutput]] = field(default_factory=asyncio.Queue)

    @property
    def jobs(self) -> list[GenerationJob]:
        return [choice.job for choice in self.choices if choice.job]

    @property
    def stats(self) -> list[JobStats]:
        return [choice.stats for choice in self.choices if choice.stats]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, whatever n is."""
        return sum(len(prompt) for prompt in {id(c.prompt): c.prompt for c in self.choices}.values())

    @property
    def new_tokens(self) -> int:
        echoed = sum(len(choice.prompt) for choice in self.choices) if self.echo else 0
        return sum(len(choice.tokens) for choice in self.choices) - echoed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output of the engine adds to a choice."""

    choice: ChoiceOutput
    text: str
    tokens: Sequence[TokenText]
    output: EngineOutput


class Service:
    """The engine thread with everything the event loop keeps around it."""

    def __init__(self, engine: Engine, limits: Limits, model: str) -> None:
        self.info, self.tokenizer = EngineInfo.of(engine), engine.tokenizer
        self.engine_thread = EngineThread(engine, limits)
        self.limits, self.model = limits, model
        self.metrics = Metrics()
        self.traces = Traces(limits.traces)
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox] = {}
        self.created = int(time.time())
        # A fast tokenizer computes without the GIL, and its state is only read once it has encoded a text.
        self.tokenizer.encode("a")
        self.workers = Workers(TOKENIZER_THREADS if self.tokenizer.tokenizer.is_fast else 1)

    def inbox(self) -> Inbox:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._inboxes:
            self._inboxes[loop] = Inbox(loop)
        return self._inboxes[loop]

    def close(self) -> None:
        self.workers.close()
        self.engine_thread.close()

    async def prepare(self, body: CompletionBody | ChatBody, client: int = 0) -> ApiRequest:
        """Turn a request's body into choices with their jobs, or raise an `ApiError`."""
        began = time.perf_counter()
        check_parameters(body)
        self._check_num_choices(body)
        self._check_named_tokens(body)
        self.check_model(body.model)
        if body.max_tokens != 0:
            await self.engine_thread.check_room(client, [body.max_tokens or DEFAULT_MAX_TOKENS] * _num_texts(body))
        chat = isinstance(body, ChatBody)
        prompts = await self._prompts(body)
        algorithm = body.algorithm or default_algorithm(self.info.spec.algorithm, body.lookahead)
        request = ApiRequest(
            id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            client=client,
            chat=chat,
            model=self.model,
            choices=[],
            algorithm=algorithm,
            lookahead=body.lookahead or self.info.lookahead(algorithm),
            rule=body.rule or "match",
            seconds=min(body.timeout or self.limits.seconds, self.limits.seconds),
            stream=bool(body.stream),
            usage=bool(body.stream_options and body.stream_options.include_usage),
            trace=bool(body.trace),
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            token_ids=bool(body.return_token_ids),
            began=began,
        )
        try:
            await self.workers.run(self._add_choices, request, body, prompts, self.inbox())
        except ValueError as error:  # a sentence that begins with the field's name
            name = re.split(r"\W", str(error), maxsplit=1)[0]
            raise ApiError(400, str(error), param=name if name in type(body).model_fields else None) from error
        return request

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            message = f"the model {model[:200]!r} is not here; there is {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_num_choices(self, body: CompletionBody | ChatBody) -> None:
        """Before any prompt is tokenized, which takes a while where there are many."""
        if _num_texts(body) > self.limits.texts:
            prompts = _num_texts(body) // (body.n or 1)
            message = f"{prompts} prompts times n {body.n or 1}: at most {self.limits.texts} texts"
            raise ApiError(400, message, param="n")

    async def _prompts(self, body: CompletionBody | ChatBody) -> list[Tokens]:
        if isinstance(body, CompletionBody):
            for prompt in body.prompt:
                self._check_length(len(prompt) if isinstance(prompt, str) else 0, "prompt")
            special = _or(body.add_special_tokens, True)
            return [await self.workers.run(self._tokenize, prompt, special) for prompt in body.prompt]
        self._check_length(sum(len(message.content) for message in body.messages), "messages")
        return [await self.workers.run(self._apply_chat_template, body.messages, True, body.add_special_tokens)]

    def _apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, add_special_tokens: bool | None = None
    ) -> Tokens:
        plain = [message.model_dump(exclude_none=True) for message in messages]
        if not self.tokenizer.has_chat_template:
            _check_no_calls(plain)
        try:
            return self.tokenizer.apply_chat_template(plain, add_generation_prompt, add_special_tokens)
        except Exception as error:  # a template may raise anything about roles that it does not know
            raise ApiError(400, "these messages do not fit the model's template", param="messages") from error

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> Tokens:
        if isinstance(prompt, tuple):
            self._check_tokens(prompt, "prompt")
            return prompt
        try:
            return self.tokenizer.encode(prompt, add_special_tokens)
        except (ValueError, TypeError) as error:  # a lone surrogate, say
            raise ApiError(400, "the prompt is no text that can be read", param="prompt") from error

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        size = self.tokenizer.size
        if invalid := [token for token in tokens if token >= size][:1]:
            raise ApiError(400, f"token {invalid[0]}: the model knows {size} tokens, from 0 on", param=param)

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        self.check_model(body.model)
        if body.messages is not None:
            tokens = self._apply_chat_template(body.messages, body.add_generation_prompt)
        else:
            tokens = self._tokenize(body.prompt or "", body.add_special_tokens)
        spellings = self.tokenizer.tokenizer.convert_ids_to_tokens(list(tokens)) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self.info.context, "tokens": tokens, "token_strs": spellings}

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Special tokens are spelled, too."""
        self.check_model(body.model)
        self._check_tokens(body.tokens, "tokens")
        return {"prompt": self.tokenizer.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that is too long however it is tokenized, which would take a while."""
        context = self.info.context
        if context and characters > context * MAX_TOKEN_LENGTH:
            raise context_length_exceeded(ContextLengthError(context, f"{characters} characters"), param)

    def _add_choices(
        self,
        request: ApiRequest,
        body: CompletionBody | ChatBody,
        prompts: Sequence[Tokens],
        inbox: Inbox,
    ) -> None:
        stops, num_logprobs, n = self._stops(body), _num_logprobs(body), body.n or 1
        max_tokens = self._max_tokens(body, max(map(len, prompts)))
        min_draft = None if body.lookahead is None else min(self.info.min_draft, body.lookahead)
        min_tokens, stop_ids = body.min_tokens or 0, frozenset(body.stop_token_ids or ())
        ends = stop_ids if body.ignore_eos else stop_ids | self.tokenizer.eos_token_ids
        spec = fill_spec(SpecConfig(request.algorithm, body.lookahead, min_draft, rule=request.rule), self.info.spec)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        for index in range(len(prompts) * n):
            prompt = prompts[index // n]
            output = TextOutput(self.tokenizer, prompt, stops, ends, bool(body.include_stop_str_in_output), min_tokens)
            choice = ChoiceOutput(index, prompt, output, num_logprobs)
            request.choices.append(choice)
            scores = request.echo and num_logprobs is not None
            if not (scores or max_tokens):
                continue
            choice.job = GenerationJob(
                choice.prompt,
                max_tokens,
                spec,
                self._sampling(request, body, seed + index % n, num_logprobs),
                partial(inbox.put, partial(self._receive, request, choice)),
                num_logprobs if scores else None,
                request.trace,
                request.client,
                body.stop_token_ids or (),
                bool(body.ignore_eos),
            )

    def _sampling(
        self, request: ApiRequest, body: CompletionBody | ChatBody, seed: int, num_logprobs: int | None
    ) -> Sampling:
        traced = request.trace and not self.info.on_devices
        sampling = Sampling(
            _or(body.temperature, 1.0),
            max(0, body.top_k or 0),  # -1: all
            _or(body.top_p, 1.0),
            body.min_p or 0.0,
            seed,
            request.rule,
            logprobs=TRACE_LOGPROBS if num_logprobs is None and traced else num_logprobs,
            repetition_penalty=_or(body.repetition_penalty, self.info.repetition_penalty),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            min_tokens=body.min_tokens or 0,
            logit_bias=tuple(body.logit_bias.items()),
            bad_words=tuple(tokens for word in body.bad_words for tokens in self.tokenizer.encode_word(word)),
            allowed_token_ids=body.allowed_token_ids,
        )
        if self.info.on_devices and sampling.has_penalties:
            raise unsupported(sampling.penalties[0])
        return sampling

    def _check_named_tokens(self, body: Body) -> None:
        """Refuse more tokens or words than every forward can be given, and tokens that the model does not have."""
        most, size = self.limits.token_ids, self.info.vocab_size
        named = {"stop_token_ids": body.stop_token_ids or (), "allowed_token_ids": body.allowed_token_ids or ()}
        for name, tokens in {"logit_bias": tuple(body.logit_bias), **named}.items():
            if len(tokens) > most:
                raise ApiError(400, f"{name}: {len(tokens)} tokens, at most {most}", param=name)
            if tokens and max(tokens) >= size:
                message = f"{name}: token {max(tokens)}, but the model's tokens are 0 to {size - 1}"
                raise ApiError(400, message, param=name)
        words, characters = len(body.bad_words), sum(map(len, body.bad_words))
        if words > most or characters > MAX_WORD_LENGTH * most:
            message = f"bad_words: {words} of {characters} characters, at most {most} of {MAX_WORD_LENGTH * most}"
            raise ApiError(400, message, param="bad_words")

    def _stops(self, body: Body) -> list[str]:
        stops = body.stop
        if len(stops) > self.limits.stops or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            longest = max(len(stop) for stop in stops)
            raise ValueError(
                f"stop: {len(stops)} of up to {longest} characters, at most {self.limits.stops} of {MAX_STOP_LENGTH}"
            )
        return stops

    def _max_tokens(self, body: CompletionBody | ChatBody, prompt: int) -> int:
        """As given, which must fit into the context after a prompt of this length; by default, what fits."""
        name, default, context = "max_tokens", DEFAULT_MAX_TOKENS, self.info.context
        if isinstance(body, ChatBody):
            name = name if body.max_completion_tokens is None else "max_completion_tokens"
            default = self.limits.new_tokens
        given: int | None = getattr(body, name)
        least = 1 if given is None else given
        if context and prompt + least > context:
            is_prompt = prompt > context or given is None
            param = ("messages" if isinstance(body, ChatBody) else "prompt") if is_prompt else name
            raise context_length_exceeded(ContextLengthError(context, prompt, least), param)
        if given is not None and given > self.limits.new_tokens:
            message = f"{name} {given}: must be at most {self.limits.new_tokens}, the limit of this server"
            raise ApiError(400, message, param=name)
        max_tokens = _or(given, default)
        most = min(max_tokens, context - prompt) if context else max_tokens
        if (body.min_tokens or 0) > most:
            message = f"min_tokens {body.min_tokens}: there are {most} new tokens at most"
            raise ApiError(400, message, param="min_tokens")
        return max_tokens

    async def begin(self, request: ApiRequest) -> None:
        """Submit the jobs of a request, or raise an `ApiError`; a request that has begun must be followed."""
        request.open = {choice for choice in request.choices if choice.job}
        try:
            status = await self.engine_thread.submit(request.jobs)
        except asyncio.CancelledError:
            self.engine_thread.cancel(request.jobs)
            raise
        request.servers = status.servers
        if not request.jobs:
            self._complete(request)

    def _receive(self, request: ApiRequest, choice: ChoiceOutput, output: EngineOutput) -> None:
        request.servers = output.servers or request.servers
        if output.finish_reason:
            choice.stats = output.stats
            request.open.discard(choice)
            if not request.open:
                self._complete(request)
        request.outputs.put_nowait((choice, output))

    def _complete(self, request: ApiRequest) -> None:
        """All statistics are there, whether or not the client still is."""
        self.metrics.count_speculation(request.algorithm, request.stats)
        self.traces.keep(request.client, request.id, request.algorithm, request.stats)

    async def follow(self, request: ApiRequest) -> AsyncIterator[Delta]:
        """Yield the deltas of a request as they come; closing the iterator cancels the request."""
        outcome = "error"
        try:
            async with asyncio.timeout(max(0.0, request.seconds - request.elapsed)):
                async for delta in self._deltas(request):
                    yield delta
            outcome = "ok"
        except TimeoutError:
            outcome = "deadline"
            raise deadline_exceeded(request.seconds) from None
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "disconnected"
            raise
        finally:
            self.engine_thread.cancel(choice.job for choice in request.open if choice.job)
            self.metrics.count_request(request, outcome)

    async def _deltas(self, request: ApiRequest) -> AsyncIterator[Delta]:
        for choice in request.choices:
            if request.echo and choice.num_logprobs is None:
                yield Delta(choice, *await self.workers.run(choice.echo_prompt, ()), EngineOutput())
            if choice.job is None:
                choice.finish_reason = "length"
                yield Delta(choice, "", (), EngineOutput(finish_reason="length"))
        unfinished = len(request.jobs)
        stopped: dict[ChoiceOutput, Delta] = {}  # by a stop string; their statistics come with the job's last output
        while unfinished:
            choice, output = await request.outputs.get()
            unfinished -= output.finish_reason is not None
            if choice not in stopped:
                delta = await self._delta(request, choice, output)
                if output.finish_reason or not choice.finish_reason:
                    yield delta
                elif choice.job:
                    stopped[choice] = delta
                    self.engine_thread.cancel([choice.job])
            elif output.finish_reason:
                yield stopped[choice]

    async def _delta(self, request: ApiRequest, choice: ChoiceOutput, output: EngineOutput) -> Delta:
        if output.error:
            log.error("engine failed", extra={"answer": request.id, "why": output.error})
            raise engine_failed()
        if output.finish_reason == "cancelled":
            raise shutting_down()
        if request.echo and choice.num_logprobs is not None and not choice.tokens:
            choice.finish_reason = output.finish_reason  # set if nothing follows the prompt
            return Delta(choice, *await self.workers.run(choice.echo_prompt, output.top_logprobs), output)
        text, tokens = choice.add(output)
        if tokens:
            self.metrics.count_tokens(request, len(tokens), output.tip - output.root)
        return Delta(choice, text, tokens, output)


def _num_texts(body: CompletionBody | ChatBody) -> int:
    return (len(body.prompt) if isinstance(body, CompletionBody) else 1) * (body.n or 1)


def _check_no_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse calls of tools in a conversation that no template would put into the prompt."""
    for i, message in enumerate(messages):
        for name in CALL_FIELDS.intersection(message):
            param = f"messages.{i}.{name}"
            problem = f"{param}: needs a chat template, which this model does not have"
            raise ApiError(400, problem, param=param, code="unsupported_parameter")


def _num_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens the response names; None: no log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise ValueError(f"top_logprobs {body.top_logprobs}: needs logprobs to be true")
    return body.top_logprobs or 0 if body.logprobs else None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def check_parameters(body: CompletionBody | ChatBody) -> None:
    """Refuse what could change the answer and is not supported, rather than ignore it silently."""
    check_unknown(body.model_extra or {})
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.n or 1):
        raise unsupported("best_of")
