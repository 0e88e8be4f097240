"""An inference engine behind a URL, over HTTP connections that are kept alive. A request ends when it is cancelled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx

from dsi.core.messages import GREEDY, Sampling
from dsi.core.sequence import Tokens
from dsi.fleets.event_loop import EventLoopThread
from dsi.models.endpoints.address import EndpointAddress
from dsi.models.endpoints.kinds import FORMATS, MODELS_PATH, kind_of
from dsi.models.endpoints.wire import Call, EndpointInfo, WireFormat
from dsi.models.protocol import ForwardRequest

CONNECT_SECONDS = 2.0
CHECK_SECONDS = 5.0  # for an endpoint to say which model it has
RESTART_SECONDS = 0.25  # no engine is back with another model any sooner
MAX_RETRIES, MAX_RETRY_SECONDS = 3, 1.0  # of a request that came too soon, status 429
MAX_CONNECTIONS = 64
KEEPALIVE_SECONDS = 2.0  # of an idle connection: the engines close theirs after 5, perhaps as a request is sent
DONE = "[DONE]"  # the end of a stream
DISCONNECTED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # what reading a wrong answer raises


class EndpointError(ConnectionError):
    """An endpoint did not answer, or not as it should."""


class Endpoint:
    """Verifies and drafts on one engine; its methods run on the event loop.

    `info` is what it said when it was first asked: with another model it counts as dead.
    """

    def __init__(self, address: EndpointAddress, loop: EventLoopThread, api_key: str | None = None) -> None:
        self.address, self.url, self.loop = address, address.url, loop
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_SECONDS,
        )
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # other limits are the caller's
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )
        loop.on_close.append(self._client.aclose)
        self.drafts_greedily = False  # for targets whose noise is not the drafter's
        self._info: EndpointInfo | None = None
        self._last_answer = -RESTART_SECONDS
        self._num_closed = 0  # connections that were closed here, by cancelling a request, and not yet replaced

    @property
    def info(self) -> EndpointInfo:
        if self._info is None:
            raise RuntimeError(f"{self.url}: was not asked which model it has")
        return self._info

    @property
    def wire(self) -> WireFormat:
        return FORMATS[self.info.kind]

    async def connect(self) -> EndpointInfo:
        """Ask the endpoint what it is."""
        self._info = await self._ask()
        return self._info

    async def check(self) -> None:
        """Raise EndpointError unless it is up, with the model that it had."""
        info = await self._ask()
        if info.identity != self.info.identity:
            raise EndpointError(f"{self.url}: has another model, {info.model}, no longer {self.info.model}")
        self._last_answer = time.monotonic()

    async def _ask(self) -> EndpointInfo:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                models = await self._json(Call(MODELS_PATH))
                with _reading(self.url):
                    wire = FORMATS[self.address.kind or kind_of(models)]
                path = wire.properties_path
                properties = await self._json(Call(path)) if path else None
                with _reading(self.url):
                    return wire.info(models, properties)
        except TimeoutError:
            raise EndpointError(f"{self.url}: no answer within {CHECK_SECONDS:g} s") from None

    async def verify(
        self, tokens: Sequence[int], num_positions: int, sampling: Sampling, prompt_length: int = 0
    ) -> Tokens:
        """Return the token after each of the last prefixes of a text."""
        calls = self.wire.verify_calls(self.info.model, tokens, num_positions, sampling, prompt_length)
        answers = [await self._json(calls[0])] if len(calls) == 1 else await self._all_json(calls)
        with _reading(self.url):
            return self.wire.verified(answers, num_positions)

    async def draft(
        self, tokens: Sequence[int], count: int, sampling: Sampling, prompt_length: int = 0
    ) -> AsyncGenerator[int, None]:
        """Yield tokens as they are streamed; where a stream ends early, go on after what it had."""
        text, end = list(tokens), len(tokens) + count
        sampling = GREEDY if self.drafts_greedily else sampling
        while len(text) < end:
            before, most = len(text), self.info.max_new_tokens or count
            call = self.wire.stream_call(self.info.model, text, min(most, end - len(text)), sampling, prompt_length)
            async with aclosing(self._stream(call)) as stream:
                async for token in stream:
                    if len(text) < end:
                        text.append(token)
                        yield token
            if len(text) == before:
                raise EndpointError(f"{self.url}: a stream without a token")

    async def _stream(self, call: Call) -> AsyncGenerator[int, None]:
        num_received = 0
        async with self._send(call) as response, aclosing(_chunks(response)) as chunks:
            async for chunk in chunks:
                with _reading(self.url):
                    document = json.loads(chunk)
                    check_no_error(self.url, document)
                    self._check_model(document)
                    tokens = self.wire.streamed(document, num_received)
                num_received += len(tokens)
                for token in tokens:
                    yield token

    async def tokenize(self, text: str, add_special_tokens: bool) -> Tokens:
        answer = await self._json(self.wire.tokenize_call(self.info.model, text, add_special_tokens))
        with _reading(self.url):
            return self.wire.tokenized(answer)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        answer = await self._json(self.wire.detokenize_call(self.info.model, tokens))
        with _reading(self.url):
            return self.wire.detokenized(answer)

    async def _json(self, call: Call) -> Any:
        async with self._send(call) as response:
            body = await response.aread()
        with _reading(self.url):
            answer = json.loads(body)
            self._check_model(answer)
        return answer

    async def _all_json(self, calls: Sequence[Call]) -> list[Any]:
        """Send requests at once; if one fails, the others are cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._json(call)) for call in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def _send(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Send a request; one over a new connection may have met another model."""
        with _connecting(self.url), self._counting_closed():
            response, is_new = await self._response(call)
            try:
                if call.body is not None and is_new and self._may_have_restarted():
                    await self.check()
                yield response
                self._last_answer = time.monotonic()
            finally:
                await response.aclose()

    async def _response(self, call: Call) -> tuple[httpx.Response, bool]:
        """Send a request until it is not too soon; return the response, and whether its connection is new."""
        method, retries_left = "GET" if call.body is None else "POST", MAX_RETRIES
        while True:
            trace = ConnectionTrace()
            request = self._client.build_request(method, call.path, json=call.body, extensions={"trace": trace})
            try:
                response = await self._client.send(request, stream=True)
            except DISCONNECTED:
                if trace.is_new:
                    raise
                continue  # a connection that was kept, and that the engine had closed
            if response.status_code < 400:
                return response, trace.is_new
            message, wait = await _status_message(self.url, response), _retry_seconds(response.headers)
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS or not retries_left:
                raise EndpointError(message)
            retries_left -= 1
            await asyncio.sleep(wait)

    @contextmanager
    def _counting_closed(self) -> Iterator[None]:
        """Count a connection that a request closes which is cancelled or fails."""
        try:
            yield
        except BaseException:
            self._num_closed += 1
            raise

    def _may_have_restarted(self) -> bool:
        """Whether a new connection may lead to another server: not if it replaces one that was just closed here."""
        expected, self._num_closed = self._num_closed > 0, max(0, self._num_closed - 1)
        is_recent = time.monotonic() - self._last_answer < RESTART_SECONDS
        return self._info is not None and not (expected and is_recent)

    def _check_model(self, answer: Any) -> None:
        """Refuse the answer of another model, where answers say whose they are."""
        if self._info is None or not isinstance(answer, Mapping) or not self.wire.has_model_in_answers:
            return
        if "model" in answer and answer["model"] != self._info.model:
            raise EndpointError(f"{self.url}: answers as {str(answer['model'])[:80]}, no longer as {self._info.model}")

    def answer(self, request: ForwardRequest) -> Tokens:
        """Wait for the answer in another thread than the event loop's, which a fleet never does."""
        return self.loop.run(
            self.verify(request.tokens, request.num_positions, request.sampling, request.prompt_length)
        )


class ConnectionTrace:
    """Whether a request opened a connection: the server at its other end may be another one than before."""

    def __init__(self) -> None:
        self.is_new = False

    async def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        self.is_new |= event == "connection.connect_tcp.complete"


def check_no_error(url: str, chunk: Any) -> None:
    """Raise what an engine says that went wrong amid a stream."""
    if isinstance(chunk, Mapping) and isinstance(error := chunk.get("error"), Mapping):
        raise EndpointError(f"{url}: {_one_line(error.get('message', error))}")


def _one_line(message: Any) -> str:
    return " ".join(str(message).split())[:200]


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turn what a wrong answer raises into an EndpointError."""
    try:
        yield
    except UNREADABLE as error:
        raise EndpointError(f"{url}: an answer that cannot be read ({type(error).__name__}: {error})") from None


@contextmanager
def _connecting(url: str) -> Iterator[None]:
    """Turn failures of connections into an EndpointError."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        unreachable = "cannot be reached: " if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else ""
        raise EndpointError(f"{url}: {unreachable}{reason}") from None


async def _chunks(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of server-sent events up to the end of the stream, which is read to keep the connection."""
    async for line in response.aiter_lines():
        field, _, data = line.partition(":")
        if field == "data" and data.strip() != DONE:
            yield data


def _retry_seconds(headers: Mapping[str, str]) -> float:
    with suppress(ValueError):
        return max(0.0, min(MAX_RETRY_SECONDS, float(headers.get("retry-after", ""))))
    return MAX_RETRY_SECONDS / 10


async def _status_message(url: str, response: httpx.Response) -> str:
    try:
        body = (await response.aread())[:2000].decode(errors="replace")
    finally:
        await response.aclose()
    with suppress(*UNREADABLE):
        body = json.loads(body)["error"]["message"]
    return f"{url}: status {response.status_code}: {_one_line(body)}"
