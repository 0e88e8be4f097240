"""Connections to workers: framing of messages, and jobs encoded as the difference to what the worker has.

Everything travels as plain tuples of numbers, each message in one write and one read: between two forwards of a
small model the CPU caches are cold, and every line of Python then costs ten times as much.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from functools import lru_cache
from itertools import count
from typing import Any

from dsi.core.messages import (
    Draft,
    Drafted,
    DraftedLevel,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    Verified,
    Verify,
)
from dsi.core.sequence import TokenSequence

MAX_REQUESTS = 128  # that encoder and decoder remember; the same for both, so that they evict alike
JOBS: dict[str, Callable[..., Job]] = {"prefill": Prefill, "draft": Draft, "verify": Verify}
JOB_NAMES = {kind: name for name, kind in JOBS.items()}
EVENTS: tuple[Callable[..., Event], ...] = (Prefilled, Drafted, Verified, Failed, DraftedLevel)
LENGTH_PREFIX = struct.Struct("!I")
READ_BYTES = 1 << 16

_sampling_fields = lru_cache(MAX_REQUESTS)(astuple)
_sampling = lru_cache(MAX_REQUESTS)(Sampling)

EncodedJob = tuple[str, int, int, int, list[int], tuple[Any, ...]]  # kind, id, request, shared, tail, fields


class Connection:
    """One end of a socket that carries whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._buffer = end, b""

    @classmethod
    def pair(cls, timeout: float | None = None) -> tuple[Connection, Connection]:
        """Return two connected ends; at the first, sending and receiving fail after `timeout` seconds."""
        one, other = socket.socketpair()
        one.settimeout(timeout)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(LENGTH_PREFIX.pack(len(body)) + body)

    def receive(self) -> list[Any]:
        """Block until at least one message is complete; return all complete ones."""
        messages: list[Any] = []
        while not messages:
            messages = self.read_once()
        return messages

    def read_once(self) -> list[Any]:
        """Read from the socket once, and return the messages now complete, possibly none."""
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise EOFError("the other end is gone")
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= LENGTH_PREFIX.size:
            end = LENGTH_PREFIX.size + LENGTH_PREFIX.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[LENGTH_PREFIX.size : end]))
            self._buffer = self._buffer[end:]
        return messages

    def close(self) -> None:
        self._socket.close()


def encode_event(event: Event) -> tuple[Any, ...]:
    """Encode an event without the id of its job: a worker has one job at a time."""
    match event:
        case Drafted(draft_probs=None, alternates=()):
            return 1, event.token
        case Drafted():
            return 1, event.token, event.draft_probs, event.alternates
        case Verified():
            return (2, event.tokens, event.top_logprobs) if event.top_logprobs else (2, event.tokens)
        case Failed():
            return 3, event.reason
        case DraftedLevel():
            return 4, event.children, event.level
    return (0,)


def decode_event(encoded: tuple[Any, ...], job: int) -> Event:
    kind, *fields = encoded
    event: Event = EVENTS[kind](job, *fields)
    return event


class JobEncoder:
    """Encodes the jobs for one worker: only the tokens that differ from the last context of the same request."""

    def __init__(self) -> None:
        self._sent: OrderedDict[TokenSequence, tuple[int, TokenSequence]] = OrderedDict()
        self._request_numbers = count()

    def encode(self, job: Job) -> EncodedJob:
        origin = job.context.origin
        request, last = self._sent.pop(origin, (next(self._request_numbers), None))
        shared = 0 if last is None else last.common_prefix(job.context)
        self._sent[origin] = request, job.context
        if len(self._sent) > MAX_REQUESTS:
            self._sent.popitem(last=False)
        tail = list(origin) if last is None else []
        tail += job.context.since(max(shared, len(origin)))
        return JOB_NAMES[type(job)], job.id, request, shared, tail, _fields(job)


class JobDecoder:
    """Decodes jobs at the worker, each from the last context of its request."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[int, TokenSequence] = OrderedDict()

    def decode(self, encoded: EncodedJob) -> Job:
        kind, id, request, shared, tail, (prompt_length, before, sampling, after) = encoded
        last = self._contexts.pop(request, None)
        context = TokenSequence.of(tail[:prompt_length]) if last is None else _truncated(last, shared)
        for token in tail[prompt_length:] if last is None else tail:
            context = context.then(token)
        self._contexts[request] = context
        if len(self._contexts) > MAX_REQUESTS:
            self._contexts.popitem(last=False)
        return JOBS[kind](id, context, *before, *([_sampling(*sampling)] if sampling else ()), *after)


def _fields(job: Job) -> tuple[Any, ...]:
    """Return the length of the prompt, the fields between context and sampling, sampling, and the fields after."""
    prompt_length = len(job.context.origin)
    match job:
        case Draft():
            options = job.block_start, job.block_size, job.first_block
            if job.expansions:
                options += job.alone, job.tree, job.expansions  # type: ignore[assignment]
            return prompt_length, (job.count, job.model), _sampling_fields(job.sampling), options
        case Verify():
            after = job.draft_tokens, job.alone, job.tree, job.asked
            return prompt_length, (job.width, job.lead), _sampling_fields(job.sampling), after
    return prompt_length, (), (), ()


def _truncated(context: TokenSequence, length: int) -> TokenSequence:
    while context.length > length and context.parent is not None:
        context = context.parent
    return context
