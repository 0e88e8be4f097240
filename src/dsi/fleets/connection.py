"""Jobs as they travel to another process: only what the server lacks, never the whole text.

Everything travels as plain tuples of numbers, each message in one write and one read: between two forwards
of a small model the caches are cold, and every line of Python then costs ten times what it usually does.
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

TEXTS = 128  # requests that both ends remember; the same for both, so that they forget alike
KINDS: dict[str, Callable[..., Job]] = {"warm": Prefill, "draft": Draft, "verify": Verify}
NAMES = {kind: name for name, kind in KINDS.items()}
EVENTS: tuple[Callable[..., Event], ...] = (Prefilled, Drafted, Verified, Failed)
HEAD = struct.Struct("!I")  # the length of the message that follows
READ = 1 << 16

Message = tuple[str, int, int, int, list[int], tuple[Any, ...]]  # kind, id, request, shared, tail, rest


class Connection:
    """One end of a connection that carries whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._rest = end, b""

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._end.sendall(HEAD.pack(len(body)) + body)

    def receive(self) -> list[Any]:
        """At least one message, and all that have come with it; waits for them."""
        messages: list[Any] = []
        while not messages:
            messages = self.take()
        return messages

    def take(self) -> list[Any]:
        """The messages that are complete after one look; maybe none yet."""
        data = self._end.recv(READ)
        if not data:
            raise EOFError("the other end is gone")
        self._rest += data
        messages: list[Any] = []
        while len(self._rest) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                break
            messages.append(pickle.loads(self._rest[HEAD.size : end]))
            self._rest = self._rest[end:]
        return messages

    def close(self) -> None:
        self._end.close()


def pack_event(event: Event) -> tuple[Any, ...]:
    """Without the id of its job: a server has one at a time."""
    match event:
        case Drafted(odds=None, others=()):
            return 1, event.token
        case Drafted():
            return 1, event.token, event.odds, event.others
        case Verified():
            return (2, event.tokens, event.notes) if event.notes else (2, event.tokens)
        case Failed():
            return 3, event.reason
    return (0,)


def unpack_event(packed: tuple[Any, ...], job: int) -> Event:
    kind, *what = packed
    event: Event = EVENTS[kind](job, *what)
    return event


class Sender:
    """This end of the wire to one server: knows which text of each request it has sent last."""

    def __init__(self) -> None:
        self._sent: OrderedDict[TokenSequence, tuple[int, TokenSequence]] = OrderedDict()
        self._numbers = count()

    def pack(self, job: Job) -> Message:
        origin = job.context.origin
        number, last = self._sent.pop(origin, (next(self._numbers), None))
        shared = 0 if last is None else last.shared(job.context)
        self._sent[origin] = number, job.context
        if len(self._sent) > TEXTS:
            self._sent.popitem(last=False)
        tail = list(origin) if last is None else []
        tail += job.context.since(max(shared, len(origin)))
        return NAMES[type(job)], job.id, number, shared, tail, _rest(job)


class Receiver:
    """The other end: rebuilds each text from the last one of its request."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, TokenSequence] = OrderedDict()

    def unpack(self, message: Message) -> Job:
        kind, id, number, shared, tail, rest = message
        last = self._held.pop(number, None)
        text = TokenSequence.of(tail[: rest[0]]) if last is None else _cut(last, shared)
        for token in tail[rest[0] :] if last is None else tail:
            text = text.then(token)
        self._held[number] = text
        if len(self._held) > TEXTS:
            self._held.popitem(last=False)
        _, plain, numbers, more = rest
        return KINDS[kind](id, text, *plain, *([_sampling(*numbers)] if numbers else ()), *more)


def _rest(job: Job) -> tuple[Any, ...]:
    """The length of the prompt, and of a job besides its id and text what comes before its sampling, that,
    and what comes after it.
    """
    prompt = len(job.context.origin)
    match job:
        case Draft():
            more = job.start, job.block, job.branches, job.min_ratio
            return prompt, (job.count, job.model), _numbers(job.sampling), more
        case Verify():
            return prompt, (job.width, job.lead), _numbers(job.sampling), (job.guesses, job.aside)
    return prompt, (), (), ()


@lru_cache(TEXTS)
def _numbers(sampling: Sampling) -> tuple[Any, ...]:
    return astuple(sampling)


@lru_cache(TEXTS)
def _sampling(*numbers: Any) -> Sampling:
    return Sampling(*numbers)


def _cut(text: TokenSequence, length: int) -> TokenSequence:
    while text.length > length and text.parent is not None:
        text = text.parent
    return text
