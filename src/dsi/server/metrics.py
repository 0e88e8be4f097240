"""What the server counts, for Prometheus; `docs/serving.md` says what each number means."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsi.core.generation import ACCEPTED

if TYPE_CHECKING:
    from dsi.core.spec import Decision
    from dsi.server.engine_thread import EngineOutput, EngineThread, ServerJob
    from dsi.server.service import ApiRequest

log = logging.getLogger("dsi.serve")

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
LEADS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
LAST_POSITION = 31  # further ones count as this one, so that their number has a bound


class Now(Collector):
    """What is so at the moment when it is asked about."""

    def __init__(self, desk: EngineThread) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        desk = self._desk
        yield GaugeMetricFamily("dsi:num_requests_running", "Texts being written.", desk.running)
        yield GaugeMetricFamily("dsi:num_requests_waiting", "Texts that wait for their turn.", desk.waiting)
        fleet = desk.engine.loaded.fleet
        busy = CounterMetricFamily(
            "dsi:server_busy_seconds", "Time each server has computed.", labels=("role", "server")
        )
        died = CounterMetricFamily("dsi:server_deaths", "Times each server has died.", labels=("role", "server"))
        for name, role, _ in fleet.servers():
            busy.add_metric((role, name), float(fleet.busy[name]))
            died.add_metric((role, name), fleet.deaths.get(name, 0))
        yield busy
        yield died


class Metrics:
    def __init__(self, desk: EngineThread) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Now(desk))
        self.requests = self._counter("requests", "Requests that have ended.", "endpoint", "outcome")
        self.prompts = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("generation_tokens", "Tokens written.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.itl = self._histogram("inter_token_latency_seconds", "Between two pieces of a stream.")
        self.tpot = self._histogram("time_per_output_token_seconds", "The time per token after the first.")
        self.e2e = self._histogram("e2e_request_latency_seconds", "From a request to its end.")
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts that were judged.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that stood.")
        self.places = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that stood, by how many before them had since the target's last own.",
            "position",
        )
        self.forwards = self._counter(
            "target_forwards", "Target forwards answered; hidden: they only confirmed guesses.", "hidden"
        )
        self.stale = self._counter("stale_tasks", "Verifications no longer wanted.")
        self.wasted = self._counter("wasted_draft_tokens", "Drafted tokens that did not stand.")
        self.fallback = self._counter(
            "fallback", "Times that speculation was cut back or, under auto, given up.", "cause"
        )
        self.decisions = self._counter("decisions", "Ways to go that auto has taken.", "cause")
        self.lead = self._histogram(
            "drafter_lead_tokens", "How far the drafter was ahead when tokens became certain.", LEADS
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"dsi:{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"dsi:{name}", help, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def heard(self, order: ApiRequest, words: int, update: EngineOutput) -> None:
        if not words:
            return
        now = time.perf_counter()
        if order.first is None:
            order.first = now - order.began
            self.ttft.observe(order.first)
        else:
            self.itl.observe(now - order.last)
        order.last = now
        self.generated.inc(words)
        self.lead.observe(update.tip - update.root)

    def failed(self, order: ApiRequest, why: str) -> None:
        log.error("engine failed", extra={"answer": order.id, "why": why})

    def ended(self, order: ApiRequest, outcome: str) -> None:
        self.requests.labels("chat" if order.chat else "completions", outcome).inc()
        self.prompts.inc(order.prompt_tokens)
        self.e2e.observe(order.elapsed)
        if order.first is not None and order.new_tokens > 1:
            self.tpot.observe((order.last - order.began - order.first) / (order.new_tokens - 1))
        for ticket in order.tickets:
            self._count(ticket)
        if order.algorithm in ("dsi", "auto") and any(ticket.crowded for ticket in order.tickets):
            self.fallback.labels("crowd").inc()

    def _decided(self, decision: Decision) -> None:
        self.decisions.labels(decision.cause).inc()
        if decision.cause != "start" and not decision.spec.speculates:
            self.fallback.labels(decision.cause).inc()

    def _count(self, ticket: ServerJob) -> None:
        for _, decision in ticket.decisions:
            self._decided(decision)
        tally = ticket.tally
        hidden = max(0, tally.useful - tally.exposed)
        self.drafts.inc(tally.useful if tally.drafted else 0)
        self.drafted.inc(tally.drafted)
        self.accepted.inc(tally.accepted)
        self.wasted.inc(max(0, tally.wasted))
        self.stale.inc(tally.abandoned)
        self.forwards.labels("true").inc(hidden)
        self.forwards.labels("false").inc(max(0, tally.forwards - hidden))
        position = 0
        for origin in ticket.origins:
            if origin == ACCEPTED:
                self.places.labels(str(min(position, LAST_POSITION))).inc()
            position = position + 1 if origin == ACCEPTED else 0
