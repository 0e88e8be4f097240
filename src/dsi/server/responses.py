"""Responses in the shapes of OpenAI's API, whole or as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dsi.core.messages import TARGET
from dsi.core.stats import mean
from dsi.experiments.records import first_place
from dsi.fleets.spans import Span
from dsi.server.choice import ChoiceOutput, TokenText
from dsi.server.engine_thread import JobStats
from dsi.server.estimate import nonsi_seconds, observed_latency, si_seconds
from dsi.server.service import ApiRequest, Delta, EngineInfo

DONE = b"data: [DONE]\n\n"
TEXT_MARK = "\0text\0"  # in no name of a model


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _json(document: object) -> bytes:
    return _encode(document).encode()


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(document) + b"\n\n"


def envelope(request: ApiRequest, chunk: bool) -> dict[str, Any]:
    """The fields that a response and its chunks have in common."""
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if request.chat else "text_completion"
    return {"id": request.id, "object": kind, "created": request.created, "model": request.model}


def full_response(info: EngineInfo, request: ApiRequest) -> dict[str, Any]:
    return envelope(request, chunk=False) | {
        "choices": [full_choice(request, choice) for choice in request.choices],
        "usage": usage(request),
        "metrics": metrics(info, request, request.stats),
    }


def full_choice(request: ApiRequest, choice: ChoiceOutput) -> dict[str, Any]:
    if request.chat:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        content: dict[str, Any] = {"message": message, "logprobs": choice.chat_logprobs(choice.tokens)}
    else:
        content = {"text": choice.text, "logprobs": choice.completion_logprobs(choice.tokens)}
    if request.token_ids:
        content |= {"token_ids": choice.token_ids(choice.tokens), "prompt_token_ids": choice.prompt}
    return {"index": choice.index, **content, "finish_reason": choice.finish_reason}


class Chunks:
    """The events of one stream."""

    def __init__(self, info: EngineInfo, request: ApiRequest) -> None:
        self._info, self._request = info, request
        self._envelope = envelope(request, chunk=True)
        self._sent_servers = False
        self._around_text: dict[ChoiceOutput, tuple[bytes, bytes]] = {}  # in its event: all but the text

    def first(self) -> Iterable[bytes]:
        """A chat starts with the role of each choice."""
        if self._request.chat:
            delta = {"role": "assistant", "content": ""}
            for choice in self._request.choices:
                yield self._event([{"index": choice.index, "delta": delta, "finish_reason": None}])

    def of(self, delta: Delta) -> Iterable[bytes]:
        request, choice = self._request, delta.choice
        if not (delta.text or delta.tokens or choice.finish_reason or request.trace):
            return  # an incomplete character, or the possible start of a stop string
        if delta.text and self._has_only_text(choice):
            yield self._text_event(choice, delta.text)
            return
        fields: dict[str, Any] = {}
        if request.trace:
            fields["trace"] = self._trace(delta)
        if choice.finish_reason:
            fields["metrics"] = metrics(self._info, request, [choice.stats] if choice.stats else [])
        yield self._event([self._choice(choice, delta.text, delta.tokens)], **fields)

    def _has_only_text(self, choice: ChoiceOutput) -> bool:
        """Whether the events of a choice differ in nothing but their text, as most do."""
        return not (choice.finish_reason or self._request.trace or self._request.token_ids) and (
            choice.num_logprobs is None
        )

    def _text_event(self, choice: ChoiceOutput, text: str) -> bytes:
        """The event that `of` would make of a text alone; all but the text is written once."""
        if choice not in self._around_text:
            begin, end = self._event([self._choice(choice, TEXT_MARK, ())]).split(_json(TEXT_MARK))
            self._around_text[choice] = begin, end
        begin, end = self._around_text[choice]
        return begin + _json(text) + end

    def last(self) -> Iterable[bytes]:
        if self._request.usage:
            yield event(self._envelope | {"choices": [], "usage": usage(self._request)})
        yield DONE

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        if self._request.usage:
            fields["usage"] = None
        return event({**self._envelope, "choices": choices, **fields})

    def _choice(self, choice: ChoiceOutput, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        if self._request.chat:
            content: dict[str, Any] = {"delta": {"content": text} if text else {}}
            logprobs = choice.chat_logprobs(tokens)
        else:
            content, logprobs = {"text": text}, choice.completion_logprobs(tokens)
        if self._request.token_ids:
            content["token_ids"] = choice.token_ids(tokens)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _trace(self, delta: Delta) -> dict[str, Any]:
        output = delta.output
        trace: dict[str, Any] = {
            "now": output.time,
            "tokens": list(delta.choice.trace_tokens(delta.tokens)),
            "spans": [span_json(span) for span in output.spans],
            "root": output.root,
            "tip": output.tip,
        }
        if output.decisions:
            trace["decisions"] = [{"at": at, **decision.json()} for at, decision in output.decisions]
        if output.servers or not self._sent_servers:
            trace["servers"] = [server.json() for server in output.servers or self._request.servers]
        self._sent_servers = True
        return trace


def span_json(span: Span) -> dict[str, Any]:
    """Positions count from the end of the prompt."""
    prompt = len(span.context.origin)
    return {
        "server": span.server,
        "role": span.role if span.role == TARGET else "drafter",
        "kind": span.kind,
        "start": span.start,
        "end": span.end,
        "from": len(first_place(span)) - prompt,
        "to": len(span.context) - prompt,
        "stale": span.stale,
        "texts": span.num_texts,
    }


def usage(request: ApiRequest) -> dict[str, int]:
    prompt, new = request.prompt_tokens, request.new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def metrics(info: EngineInfo, request: ApiRequest, stats: Sequence[JobStats]) -> dict[str, Any]:
    return {
        "speculative_decoding": speculation(request, stats),
        "timing": timing(stats),
        "overlap": overlap(stats),
        "estimated": estimates(info, stats),
    }


def overlap(stats: Sequence[JobStats]) -> dict[str, Any] | None:
    """The mean overlap of several texts; under `auto` also what was decided."""
    overlaps = [job.completion.overlap for job in stats if job.completion.overlap]
    if not overlaps:
        return None
    made = [decision for job in stats for decision in job.completion.decisions]
    decisions = {"decisions": [{"at": at, **decision.json()} for at, decision in made]} if made else {}
    return mean(overlaps) | decisions


def speculation(request: ApiRequest, stats: Sequence[JobStats]) -> dict[str, Any]:
    """Draft acceptance rate: accepted over drafted. Mean acceptance length: 1 + accepted over drafts."""
    tallies = [job.completion.tally for job in stats]
    drafted, accepted = sum(t.drafted for t in tallies), sum(t.accepted for t in tallies)
    drafts = sum(t.useful for t in tallies) if drafted else 0
    return {
        "algorithm": request.algorithm,
        "lookahead": request.lookahead if request.algorithm != "nonsi" else 0,
        "rule": request.rule,
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


def timing(stats: Sequence[JobStats]) -> dict[str, float]:
    """Seconds from the request on; `elapsed_s` counts from a text's admission, the longest of them."""
    completions = [job.completion for job in stats if job.completion.times]
    elapsed = max((float(done.elapsed) for done in completions), default=0.0)
    first = min((float(done.ttft) for done in completions), default=0.0)
    tokens = sum(len(done.tokens) for done in completions)
    queued = max((job.queued for job in stats), default=0.0)
    longest = max((len(done.tokens) for done in completions), default=0)
    return {
        "queued_s": queued,
        "ttft_s": queued + first,
        "tpot_s": (elapsed - first) / (longest - 1) if longest > 1 else 0.0,
        "elapsed_s": elapsed,
        "tokens_per_second": tokens / elapsed if elapsed else 0.0,
    }


def estimates(info: EngineInfo, stats: Sequence[JobStats]) -> dict[str, float] | None:
    """What plain decoding and SI would have taken for one text, by the latencies of its own forwards."""
    if len(stats) != 1 or not stats[0].completion.origins:
        return None
    origins = stats[0].completion.origins
    latency = observed_latency(stats[0].clock_spans, info.latency)
    return {
        "nonsi_s": nonsi_seconds(len(origins), latency),
        "si_s": si_seconds(origins, latency, info.lookaheads["si"]),
    }
