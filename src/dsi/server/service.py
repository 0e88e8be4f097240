"""From what a client asks to texts being written, and their news."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsi.core.generation import Policy
from dsi.core.messages import Sampling
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.spec import AUTO
from dsi.engine.engine import Engine
from dsi.server.choice import ChoiceOutput, TokenText
from dsi.server.engine_thread import EngineOutput, EngineThread, ServerJob
from dsi.server.errors import Problem, closing
from dsi.server.limits import LONGEST_STOP, Limits
from dsi.server.metrics import Metrics
from dsi.server.schema import Body, ChatBody, CompletionBody, Prompt
from dsi.server.traces import Traces

LONGEST_TOKEN = 64  # characters: a longer text has more tokens than its characters over this


@dataclass(eq=False)
class ApiRequest:
    """One request of a client."""

    id: str
    chat: bool
    model: str
    choices: list[ChoiceOutput]
    algorithm: str
    lookahead: int | None  # None under `auto`, which finds its own
    rule: str
    seconds: float
    stream: bool
    usage: bool
    trace: bool
    echo: bool
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None  # seconds until its first token
    last: float = 0.0  # when its last news came
    news: asyncio.Queue[tuple[ServerJob, EngineOutput]] = field(default_factory=asyncio.Queue)

    @property
    def tickets(self) -> list[ServerJob]:
        return [choice.ticket for choice in self.choices if choice.ticket]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many texts are to follow it."""
        return sum(len(prompt) for prompt in {id(c.prompt): c.prompt for c in self.choices}.values())

    @property
    def new_tokens(self) -> int:
        echoed = sum(len(choice.prompt) for choice in self.choices) if self.echo else 0
        return sum(len(choice.words) for choice in self.choices) - echoed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began


@dataclass(frozen=True, slots=True)
class Delta:
    choice: ChoiceOutput
    piece: str
    words: Sequence[TokenText]
    update: EngineOutput


class Service:
    """The engine and all that is around it."""

    def __init__(self, engine: Engine, desk: EngineThread, limits: Limits, model: str) -> None:
        self.engine, self.desk, self.limits, self.model = engine, desk, limits, model
        self.metrics = Metrics(desk)
        self.traces = Traces(limits.traces)
        self.created = int(time.time())
        self.patience = engine.patience  # rehearsed once, here: a request could not wait for it
        _ = engine.loaded.outlook  # nor for this, which `auto` needs

    @property
    def servers(self) -> list[dict[str, Any]]:
        """Who is there, drafters first."""
        fleet = self.engine.loaded.fleet
        found = [
            {"name": name, "role": role, "alive": alive, "restarts": fleet.deaths.get(name, 0)}
            for name, role, alive in fleet.servers()
        ]
        return sorted(found, key=lambda each: each["role"] == "target")

    @property
    def able(self) -> bool:
        """Whether a text can be written."""
        targets = [each for each in self.servers if each["role"] == "target" and each["alive"]]
        return self.desk.alive and bool(targets)

    def lookahead(self, algorithm: str) -> int | None:
        return None if algorithm == AUTO else self.engine.loaded.lookahead(algorithm)

    def order(self, body: CompletionBody | ChatBody) -> ApiRequest:
        """What is asked for, or a `Problem`."""
        check_support(body)
        self._check_count(body)
        if body.model is not None and body.model != self.model:
            message = f"the model {body.model[:200]!r} is not here; there is {self.model!r}"
            raise Problem(404, message, param="model", code="model_not_found")
        chat = isinstance(body, ChatBody)
        prompts = self._prompts(body)
        algorithm = body.algorithm or self.engine.algorithm
        try:
            patience = None if body.lookahead is None else min(self.patience, body.lookahead)
            policy = self.engine.policy(algorithm, body.lookahead, patience)
            order = ApiRequest(
                id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
                chat=chat,
                model=self.model,
                choices=[],
                algorithm=algorithm,
                lookahead=body.lookahead or self.lookahead(algorithm),
                rule=body.rule or "match",
                seconds=min(body.timeout or self.limits.seconds, self.limits.seconds),
                stream=bool(body.stream),
                usage=bool(body.stream_options and body.stream_options.include_usage),
                trace=bool(body.trace),
                echo=isinstance(body, CompletionBody) and bool(body.echo),
            )
            self._add_choices(order, body, prompts, policy)
        except ValueError as error:
            raise Problem(400, str(error)) from error
        return order

    def _check_count(self, body: CompletionBody | ChatBody) -> None:
        """Before any of them is read, which takes a while where they are many."""
        prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        if prompts * (body.n or 1) > self.limits.choices:
            message = f"{prompts} prompts times n {body.n or 1}: at most {self.limits.choices} texts"
            raise Problem(400, message, param="n")

    def _prompts(self, body: CompletionBody | ChatBody) -> list[Tokens]:
        if isinstance(body, CompletionBody):
            return [self._read(prompt) for prompt in body.prompt]
        messages = [{"role": each.role, "content": each.text} for each in body.messages]
        self._check_length(sum(len(each["content"]) for each in messages))
        try:
            return [self.engine.text.apply_chat_template(messages)]
        except Exception as error:  # a template may raise anything about roles that it does not know
            raise Problem(400, "these messages do not fit the model's template", param="messages") from error

    def _read(self, prompt: Prompt) -> Tokens:
        if isinstance(prompt, tuple):
            most = self.engine.text.size
            if bad := [token for token in prompt if token >= most][:1]:
                raise Problem(400, f"token {bad[0]}: the model knows {most} tokens, from 0 on", param="prompt")
            return prompt
        self._check_length(len(prompt))
        try:
            return self.engine.text.encode(prompt)
        except (ValueError, TypeError) as error:  # half a character, say
            raise Problem(400, "the prompt is no text that can be read", param="prompt") from error

    def _check_length(self, characters: int) -> None:
        context = self.engine.loaded.context
        if context and characters > context * LONGEST_TOKEN:
            message = f"a prompt of {characters} characters: the models' context is {context} tokens"
            raise Problem(400, message, param="prompt", code="context_length_exceeded")

    def _add_choices(
        self, order: ApiRequest, body: CompletionBody | ChatBody, prompts: list[Tokens], policy: Policy
    ) -> None:
        stops, best, wanted = self._stops(body), _best(body), self._wanted(body)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        loop = asyncio.get_running_loop()
        for index in range(len(prompts) * (body.n or 1)):
            prompt = prompts[index // (body.n or 1)]
            own = seed + index % (body.n or 1)
            sampling = Sampling(
                _or(body.temperature, 1.0),
                body.top_k or 0,
                _or(body.top_p, 1.0),
                body.min_p or 0.0,
                own,
                order.rule,
                logprobs=3 if best is None and order.trace and not self.engine.loaded.choices else best,
            )
            choice = ChoiceOutput(index, prompt, self.engine.text, stops, own, best)
            order.choices.append(choice)
            requests: deque[Request] = deque()
            if order.echo and best is not None:
                scored = Sampling(logprobs=best)
                requests.append(self.engine.request(prompt, 0, policy, scored))
            if wanted != 0:
                most = self.limits.new_tokens if wanted is None else wanted
                requests.append(self.engine.request(prompt, most, policy, sampling))
            if requests:
                choice.ticket = ServerJob(requests, order.news, loop, order.trace)

    def _stops(self, body: Body) -> list[str]:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > self.limits.stops or any(len(stop) > LONGEST_STOP for stop in stops):
            longest = max(len(stop) for stop in stops)
            raise ValueError(
                f"{len(stops)} stops of up to {longest} characters: at most {self.limits.stops} of {LONGEST_STOP}"
            )
        return stops

    def _wanted(self, body: CompletionBody | ChatBody) -> int | None:
        """New tokens; None: as many as there is room for."""
        asked = body.max_tokens
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        if asked is not None and asked > self.limits.new_tokens:
            raise ValueError(f"max_tokens {asked}: must be at most {self.limits.new_tokens}")
        return asked if asked is not None or isinstance(body, ChatBody) else 16

    def begin(self, order: ApiRequest) -> None:
        """Take it on, or refuse it: from here on it must be followed."""
        if not self.able:
            raise closing() if not self.desk.alive else Problem(503, "no target server is left")
        self.desk.submit(order.tickets)

    async def follow(self, order: ApiRequest) -> AsyncIterator[Delta]:
        """Its news as they come. Whoever stops listening has cancelled it."""
        cause = "error"
        try:
            async with asyncio.timeout(max(0.0, order.seconds - order.elapsed)):
                async for news in self._news(order):
                    yield news
            cause = "ok"
        except TimeoutError:
            cause = "deadline"
            message = f"the answer was not complete after {order.seconds:g} s"
            raise Problem(503, message, code="deadline_exceeded") from None
        except (asyncio.CancelledError, GeneratorExit):
            cause = "disconnected"
            raise
        finally:
            self.desk.cancel(order.tickets)
            self.metrics.ended(order, cause)
            names = [each["name"] for each in self.servers]
            self.traces.keep(order.id, order.algorithm, names, order.tickets)

    async def _news(self, order: ApiRequest) -> AsyncIterator[Delta]:
        for choice in order.choices:
            if order.echo and choice.best is None:
                yield Delta(choice, *choice.read(()), EngineOutput())
            if choice.ticket is None:
                choice.finish_reason = "length"
                yield Delta(choice, "", (), EngineOutput(ended="length"))
        owners = {choice.ticket: choice for choice in order.choices}
        while not all(choice.finish_reason for choice in order.choices):
            ticket, update = await order.news.get()
            choice = owners[ticket]
            if not choice.finish_reason:  # what comes after a stop is nobody's
                yield self._heard(order, choice, ticket, update)

    def _heard(self, order: ApiRequest, choice: ChoiceOutput, ticket: ServerJob, update: EngineOutput) -> Delta:
        if update.error:
            self.metrics.failed(order, update.error)
            raise Problem(503, "no server could finish this text", code="engine_failed")
        if update.ended == "cancelled":
            raise closing()
        if order.echo and choice.best is not None and not choice.words:
            choice.finish_reason = update.ended  # if nothing is to follow it
            return Delta(choice, *choice.read(update.notes), update)
        piece, words = choice.take(update)
        if choice.stopped and not update.ended:
            self.desk.cancel([ticket])
        self.metrics.heard(order, len(words), update)
        return Delta(choice, piece, words, update)


def _best(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens are to be named."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise ValueError(f"top_logprobs {body.top_logprobs}: needs logprobs to be true")
    return body.top_logprobs or 0 if body.logprobs else None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_support(body: CompletionBody | ChatBody) -> None:
    """Refuse what is known and not done here, rather than leave it out in silence."""
    asked: dict[str, Any] = {
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": body.logit_bias,
    }
    if isinstance(body, CompletionBody):
        asked |= {"suffix": body.suffix, "best_of": body.best_of if body.best_of != (body.n or 1) else None}
    else:
        format = (body.response_format or {}).get("type", "text")
        asked |= {"tools": body.tools, "functions": body.functions}
        asked |= {"response_format": format if format != "text" else None}
    for name, value in asked.items():
        if value:
            raise Problem(400, f"{name}: is not supported here", param=name, code="unsupported_parameter")
