"""Jobs as they travel to another process: only what the server lacks, never the whole text."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Any

from dsi.core.context import Context
from dsi.core.messages import Draft, Job, Verify, Warm

TEXTS = 32  # requests that both ends remember; the same for both, so that they forget alike
KINDS: dict[str, type[Job]] = {"warm": Warm, "draft": Draft, "verify": Verify}
NAMES = {kind: name for name, kind in KINDS.items()}

Message = tuple[str, int, int, int, list[int], tuple[Any, ...]]  # kind, id, request, shared, tail, rest


class Sender:
    """This end of the wire to one server: knows which text of each request it has sent last."""

    def __init__(self) -> None:
        self._sent: OrderedDict[Context, tuple[int, Context]] = OrderedDict()
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
        self._held: OrderedDict[int, Context] = OrderedDict()

    def unpack(self, message: Message) -> Job:
        kind, id, number, shared, tail, rest = message
        last = self._held.pop(number, None)
        text = Context.of(tail[: rest[0]]) if last is None else _cut(last, shared)
        for token in tail[rest[0] :] if last is None else tail:
            text = text.then(token)
        self._held[number] = text
        if len(self._held) > TEXTS:
            self._held.popitem(last=False)
        return KINDS[kind](id, text, *rest[1:])


def _rest(job: Job) -> tuple[Any, ...]:
    """The length of the prompt, and what is left of a job besides its id and text."""
    prompt = len(job.context.origin)
    match job:
        case Draft():
            return prompt, job.count, job.model, job.sampling
        case Verify():
            return prompt, job.width, job.lead, job.sampling
    return (prompt,)


def _cut(text: Context, length: int) -> Context:
    while text.length > length and text.parent is not None:
        text = text.parent
    return text
