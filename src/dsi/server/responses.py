"""Answers in the shapes of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dsi.core.messages import TARGET
from dsi.core.stats import mean
from dsi.experiments.records import first_place
from dsi.fleets.spans import Span
from dsi.server.choice import ChoiceOutput, TokenText
from dsi.server.engine_thread import ServerJob
from dsi.server.errors import Problem
from dsi.server.estimate import nonsi_seconds, own_pace, si_seconds
from dsi.server.service import ApiRequest, Delta, Service

DONE = b"data: [DONE]\n\n"


def line(document: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def problem_line(problem: Problem) -> bytes:
    return line(problem.json())


def head(order: ApiRequest, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if order.chat else "text_completion"
    return {"id": order.id, "object": kind, "created": order.created, "model": order.model}


def whole(house: Service, order: ApiRequest) -> dict[str, Any]:
    return head(order, chunk=False) | {
        "choices": [whole_choice(order, choice) for choice in order.choices],
        "usage": usage(order),
        "metrics": metrics(house, order, order.tickets),
    }


def whole_choice(order: ApiRequest, choice: ChoiceOutput) -> dict[str, Any]:
    text, words = "".join(choice.pieces), choice.words
    if order.chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        said: dict[str, Any] = {"message": message, "logprobs": choice.chat_logprobs(words)}
    else:
        said = {"text": text, "logprobs": choice.completion_logprobs(words)}
    return {"index": choice.index, **said, "finish_reason": choice.finish_reason}


class Chunks:
    """The events of one stream."""

    def __init__(self, house: Service, order: ApiRequest) -> None:
        self._house, self._order = house, order
        self._head = head(order, chunk=True)
        self._introduced = False

    def first(self) -> Iterable[bytes]:
        """A chat begins by saying who speaks."""
        if self._order.chat:
            delta = {"role": "assistant", "content": ""}
            for choice in self._order.choices:
                yield self._line([{"index": choice.index, "delta": delta, "finish_reason": None}])

    def of(self, news: Delta) -> Iterable[bytes]:
        order, choice = self._order, news.choice
        if not (news.piece or news.words or choice.finish_reason or order.trace):
            return  # half a character, or the beginning of a stop
        more: dict[str, Any] = {}
        if order.trace:
            more["trace"] = self._trace(news)
        if choice.finish_reason:
            tickets = [choice.ticket] if choice.ticket else []
            more["metrics"] = metrics(self._house, order, tickets)
        yield self._line([self._choice(choice, news.piece, news.words)], **more)

    def last(self) -> Iterable[bytes]:
        if self._order.usage:
            yield line(self._head | {"choices": [], "usage": usage(self._order)})
        yield DONE

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._order.usage:
            more["usage"] = None
        return line({**self._head, "choices": choices, **more})

    def _choice(self, choice: ChoiceOutput, piece: str, words: Sequence[TokenText]) -> dict[str, Any]:
        if self._order.chat:
            said: dict[str, Any] = {"delta": {"content": piece} if piece else {}}
            logprobs = choice.chat_logprobs(words)
        else:
            said, logprobs = {"text": piece}, choice.completion_logprobs(words)
        return {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _trace(self, news: Delta) -> dict[str, Any]:
        update, ticket = news.update, news.choice.ticket
        began = ticket.began if ticket else 0.0
        told: dict[str, Any] = {
            "now": update.at,
            "tokens": list(news.choice.tinted(news.words)),
            "spans": [span_json(span, began) for span in update.spans],
            "root": update.root,
            "tip": update.tip,
        }
        if update.decisions:
            told["decisions"] = [{"at": at, **decision.json()} for at, decision in update.decisions]
        if update.died or not self._introduced:
            told["servers"] = self._house.servers
        self._introduced = True
        return told


def span_json(span: Span, began: float) -> dict[str, Any]:
    """Places are counted from the end of the prompt."""
    prompt = len(span.context.origin)
    return {
        "server": span.server,
        "role": span.role if span.role == TARGET else "drafter",
        "kind": span.kind,
        "start": float(span.start) - began,
        "end": float(span.end) - began,
        "from": len(first_place(span)) - prompt,
        "to": len(span.context) - prompt,
        "stale": span.stale,
    }


def usage(order: ApiRequest) -> dict[str, int]:
    asked, new = order.prompt_tokens, order.new_tokens
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def metrics(house: Service, order: ApiRequest, tickets: Sequence[ServerJob]) -> dict[str, Any]:
    return {
        "speculative_decoding": speculation(order, tickets),
        "timing": timing(tickets),
        "overlap": overlapped(tickets),
        "estimated": estimated(house, tickets),
    }


def overlapped(tickets: Sequence[ServerJob]) -> dict[str, Any] | None:
    """What the overlap did, in the mean of several texts; under `auto` also what was decided."""
    runs = [ticket.run for ticket in tickets if ticket.run]
    if not runs:
        return None
    turns = [decision for ticket in tickets for decision in ticket.decisions]
    decided = {"decisions": [{"at": at, **decision.json()} for at, decision in turns]} if turns else {}
    return mean([run.overlap for run in runs]) | decided


def speculation(order: ApiRequest, tickets: Sequence[ServerJob]) -> dict[str, Any]:
    """Draft acceptance rate: accepted over drafted. Mean acceptance length: 1 + accepted over drafts."""
    tallies = [ticket.tally for ticket in tickets]
    drafted, accepted = sum(t.drafted for t in tallies), sum(t.accepted for t in tallies)
    drafts = sum(t.useful for t in tallies) if drafted else 0
    return {
        "algorithm": order.algorithm,
        "lookahead": order.lookahead if order.algorithm != "nonsi" else 0,
        "rule": order.rule,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_drafts": drafts,
        "num_wasted_draft_tokens": sum(max(0, t.wasted) for t in tallies),
        "target_forwards": sum(t.forwards for t in tallies),
        "target_forwards_hidden": sum(max(0, t.useful - t.exposed) for t in tallies),
        "stale_tasks": sum(t.abandoned for t in tallies),
    }


def timing(tickets: Sequence[ServerJob]) -> dict[str, float]:
    """In seconds, from the request on; `elapsed_s` from when a text was taken up, the longest of them."""
    runs = [ticket.run for ticket in tickets if ticket.run and ticket.run.times]
    elapsed = max((float(run.times[-1]) for run in runs), default=0.0)
    first = min((float(run.times[0]) for run in runs), default=0.0)
    tokens = sum(len(run.tokens) for run in runs)
    queued = max((ticket.queued for ticket in tickets), default=0.0)
    longest = max((len(run.tokens) for run in runs), default=0)
    return {
        "queued_s": queued,
        "ttft_s": queued + first,
        "tpot_s": (elapsed - first) / (longest - 1) if longest > 1 else 0.0,
        "elapsed_s": elapsed,
        "tokens_per_second": tokens / elapsed if elapsed else 0.0,
    }


def estimated(house: Service, tickets: Sequence[ServerJob]) -> dict[str, float] | None:
    """What plain decoding and SI would have taken for one text, by what its own forwards took."""
    if len(tickets) != 1 or not tickets[0].origins:
        return None
    loaded, origins = house.engine.loaded, tickets[0].origins
    pace = own_pace(tickets[0].spans, loaded.latency)
    return {
        "nonsi_s": nonsi_seconds(len(origins), pace),
        "si_s": si_seconds(origins, pace, loaded.lookahead("si")),
    }
