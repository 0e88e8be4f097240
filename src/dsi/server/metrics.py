"""Prometheus metrics; `docs/serving.md` says what each one means."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsi.core.generation import ACCEPTED
from dsi.fleets.base import DEATH_CAUSES
from dsi.server.engine_thread import EngineStatus, JobStats

if TYPE_CHECKING:
    from dsi.core.spec import Decision
    from dsi.server.service import ApiRequest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
LEADS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}  # any others count as one
LAST_POSITION = 31  # later ones count as this one, which bounds the number of labels


class StatusCollector(Collector):
    """Exports the engine's status of the moment."""

    def __init__(self) -> None:
        self.status = EngineStatus()

    def collect(self) -> Iterable[Metric]:
        status, labels = self.status, ("role", "server")
        yield GaugeMetricFamily("dsi:num_requests_running", "Texts being written.", status.running)
        yield GaugeMetricFamily("dsi:num_requests_waiting", "Texts that wait for their turn.", status.waiting)
        busy = CounterMetricFamily("dsi:server_busy_seconds", "Time each server has computed.", labels=labels)
        deaths = CounterMetricFamily("dsi:server_deaths", "Times each server has died.", labels=(*labels, "cause"))
        restarts = CounterMetricFamily("dsi:server_restarts", "Times each server was replaced.", labels=labels)
        alive = GaugeMetricFamily("dsi:server_up", "Whether each server is there.", labels=labels)
        for server in status.servers:
            busy.add_metric((server.role, server.name), server.busy)
            restarts.add_metric((server.role, server.name), server.restarts)
            alive.add_metric((server.role, server.name), server.alive)
            for cause in DEATH_CAUSES:
                deaths.add_metric((server.role, server.name, cause), server.deaths.get(cause, 0))
        yield from (busy, deaths, restarts, alive)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._collector = StatusCollector()
        self.registry.register(self._collector)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._http = self._counter("http_requests", "HTTP requests by their answer.", "method", "route", "status")
        self._requests = self._counter("requests", "Requests that have ended.", "endpoint", "outcome")
        self._positions = self._counter("verified_positions", "Tokens answered by /v1/verify.")
        self._verify_time = self._histogram("verification_latency_seconds", "From a verification to its end.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._new_tokens = self._counter("generation_tokens", "Tokens written.")
        self._ttft = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Between two chunks of a stream.")
        self._tpot = self._histogram("time_per_output_token_seconds", "The time per token after the first.")
        self._queue_time = self._histogram("request_queue_time_seconds", "From a text's arrival to its turn.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From a request to its end.")
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts that were verified.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._accepted_by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by how many in a row were accepted before them.",
            "position",
        )
        self._forwards = self._counter(
            "target_forwards", "Target forwards answered; hidden: they only confirmed draft tokens.", "hidden"
        )
        self._stale = self._counter("stale_tasks", "Verifications no longer wanted.")
        self._wasted = self._counter("wasted_draft_tokens", "Draft tokens that were not accepted.")
        self._fallback = self._counter(
            "fallback", "Times that speculation was reduced or, under auto, given up.", "cause"
        )
        self._decisions = self._counter("decisions", "Decisions of auto.", "cause")
        self._lead = self._histogram(
            "drafter_lead_tokens", "How far the drafter was ahead when tokens became certain.", LEADS
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"dsi:{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"dsi:{name}", help, buckets=buckets, registry=self.registry)

    def text(self, status: EngineStatus) -> bytes:
        """All metrics in Prometheus' text format."""
        self._collector.status = status
        return generate_latest(self.registry)

    def count_http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method if method in METHODS else "other", route, str(status)).inc()

    def count_tokens(self, request: ApiRequest, count: int, lead: int) -> None:
        now = time.perf_counter()
        if request.ttft is None:
            request.ttft = now - request.began
            self._ttft.observe(request.ttft)
        else:
            self._itl.observe(now - request.last_token)
        request.last_token = now
        self._new_tokens.inc(count)
        self._lead.observe(lead)

    def count_request(self, request: ApiRequest, outcome: str) -> None:
        """Count a request that has ended for its client."""
        self._requests.labels("chat" if request.chat else "completions", outcome).inc()
        self._prompt_tokens.inc(request.prompt_tokens)
        self._e2e.observe(request.elapsed)
        if request.ttft is not None and request.new_tokens > 1:
            self._tpot.observe((request.last_token - request.began - request.ttft) / (request.new_tokens - 1))

    def count_verification(self, num_positions: int, seconds: float, outcome: str) -> None:
        """Count a request to `/v1/verify` that has ended."""
        self._requests.labels("verify", outcome).inc()
        self._verify_time.observe(seconds)
        if outcome == "ok":
            self._positions.inc(num_positions)

    def count_speculation(self, algorithm: str, stats: Sequence[JobStats]) -> None:
        """Count the final statistics of a request's jobs."""
        for job in stats:
            self._count_job(job)
        if algorithm in ("dsi", "auto") and any(job.shared for job in stats):
            self._fallback.labels("crowd").inc()

    def _count_job(self, job: JobStats) -> None:
        for _, decision in job.completion.decisions:
            self._count_decision(decision)
        self._queue_time.observe(job.queued)
        tally = job.completion.tally
        hidden = max(0, tally.useful - tally.exposed)
        self._drafts.inc(tally.useful if tally.drafted else 0)
        self._drafted.inc(tally.drafted)
        self._accepted.inc(tally.accepted)
        self._wasted.inc(max(0, tally.wasted))
        self._stale.inc(tally.abandoned)
        self._forwards.labels("true").inc(hidden)
        self._forwards.labels("false").inc(max(0, tally.forwards - hidden))
        position = 0
        for origin in job.completion.origins:
            if origin == ACCEPTED:
                self._accepted_by_position.labels(str(min(position, LAST_POSITION))).inc()
            position = position + 1 if origin == ACCEPTED else 0

    def _count_decision(self, decision: Decision) -> None:
        self._decisions.labels(decision.cause).inc()
        if decision.cause != "start" and not decision.spec.speculates:
            self._fallback.labels(decision.cause).inc()
