"""Measures latencies through a fleet, as its engine sees them, with messages and what servers cost one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, pairwise
from statistics import linear_regression, median

from dsi.core.messages import TARGET, Draft, Failed, Verify
from dsi.core.policies import autoregressive
from dsi.core.request import Request
from dsi.core.sequence import Tokens, TokenSequence
from dsi.core.tree_shape import END
from dsi.engine.build import ModelInfo
from dsi.fleets.loop import EngineLoop, Fleet
from dsi.models.vocab.translate import SAMPLE_TEXT
from dsi.planning.latency import LatencyModel, monotone

PROMPT = 32  # tokens after which forwards are timed
WIDTHS = (1, 2, 4, 8, 16)  # new tokens of a target forward
NARROW = 8  # of these, up to which a line is drawn through what was measured
WIDE = (32, 64)  # likewise, of forwards that requests share; for each token of the narrower ones, a line is enough
MAX_WIDE_MS = 20.0  # of a forward over the widest of the others, or these would take too long to measure
DRAFT_TOKENS = 8
TREE_NODES = 4  # of the level by which it is measured what nodes add to a drafter's forward
MAX_WIDTH = 32  # up to which latencies are extrapolated
MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 3, 9, 0.25  # of measurements
STREAMED = 16  # tokens of a text that a target streams
DECODED = 12  # tokens of a text by which the engine's own work is measured
CANCEL_POINTS = 8  # of a forward: one per layer, more or less
LOOKUP_SHARE = 0.05  # of a target forward that an n-gram lookup is taken to cost


def measured_latency(by_width: Mapping[int, float], drafter_ms: float, contention: float = 0.0) -> LatencyModel:
    """The latencies of CPU forwards, timed at some widths."""
    curve = fitted_widths(by_width)
    latency = LatencyModel.measured(curve, drafter_ms, contention=contention, cancel_points=CANCEL_POINTS)
    return replace(latency, by_width=monotone(curve))


def fitted_widths(by_width: Mapping[int, float]) -> dict[int, float]:
    """Milliseconds of every width: one new token as measured, and a line through a few more, which evens out noise.

    A forward over one token multiplies matrices with vectors, in other kernels than those of several. Wider ones take
    more for each token, as they no longer wait for memory: between them, and beyond, lines from one to the next.
    """
    narrow = NARROW if sum(1 < width <= NARROW for width in by_width) > 1 else WIDTHS[-1]
    several = {width: ms for width, ms in by_width.items() if 1 < width <= narrow}
    if len(several) < 2:
        return dict(by_width)
    slope, intercept = linear_regression(list(several), list(several.values()))
    one = by_width[1]
    curve = {1: one} | {width: max(one, intercept + slope * width) for width in range(2, narrow + 1)}
    rise = max(0.0, slope)
    for a, b in pairwise([narrow, *sorted(width for width in by_width if width > narrow)]):
        rise = max(0.0, by_width[b] - curve[a]) / (b - a)
        curve |= {width: curve[a] + rise * (width - a) for width in range(a + 1, b + 1)}
    last = max(curve)
    return curve | {width: curve[last] + rise * (width - last) for width in range(last + 1, MAX_WIDTH + 1)}


def sample_tokens(target: ModelInfo) -> Tokens:
    """Text to measure with: what a drafter with another vocabulary translates must be text."""
    return tuple(target.vocabulary.encode(SAMPLE_TEXT)) or (0,)


def typical_ms(timed: Mapping[object, Callable[[], float]]) -> dict[object, float]:
    """Measure all of these in turn, a few times; medians, since memory is not always as fast as at its best."""
    began, rounds = time.perf_counter(), list[dict[object, float]]()
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() - began < MAX_SECONDS):
        rounds.append({name: measure() for name, measure in timed.items()})
    return {name: median(times[name] for times in rounds) for name in timed}


class FleetProfiler:
    """Times jobs on a fleet that has nothing else to do; without a drafter, lookups are taken to cost next to nothing.

    A context of 0 is unlimited.
    """

    def __init__(
        self,
        fleet: Fleet,
        sample: Tokens,
        context: int = 0,
        drafter: str | None = None,
        drafter_context: int = 0,
        trees: bool = False,
    ) -> None:
        self._trees = trees  # whether the drafter computes them
        self._fleet, self._drafter = fleet, drafter
        self._context, self._drafter_context = context or PROMPT + 64, drafter_context or PROMPT + 64
        prompt = max(1, min(PROMPT, self._context - 2, self._drafter_context - 2))
        self._prompt, self._others = TokenSequence.of(sample[:prompt]), cycle(sample[prompt:] or sample)
        self.run(self._verify(1))
        if drafter is not None:
            self.run(self._draft(1))

    def latency(self, every_core: bool = False) -> LatencyModel:
        """The latencies of servers that take turns, with its own cores for each server, or all of them."""
        widths = [width for width in WIDTHS if len(self._prompt) + width <= self._context] or [1]
        timed: dict[object, Callable[[], float]] = {width: partial(self._turn, width, every_core) for width in widths}
        tokens = max(1, min(DRAFT_TOKENS, self._drafter_context - len(self._prompt) - 1))
        if self._drafter is not None:
            timed["first"] = lambda: self.run(self._draft(1, every_core))
            timed["all"] = lambda: self.run(self._draft(tokens, every_core))
            if tokens > 1 and self._trees:
                timed["tree"] = lambda: self.run(self._draft_tree(every_core))
        ms = typical_ms(timed)
        by_width = {width: ms[width] for width in widths}
        if every_core:
            by_width |= self._wide_ms(by_width[widths[-1]])
        if self._drafter is None:
            return measured_latency(by_width, by_width[1] * LOOKUP_SHARE)
        first, all = ms["first"], ms["all"]
        drafter_ms = min(first, (all - first) / (tokens - 1)) if all > first and tokens > 1 else all / tokens
        delay_ms = max(0.0, first - drafter_ms) / 2  # to the drafter and back
        node_ms = max(0.0, ms["tree"] - first - drafter_ms) / (TREE_NODES - 1) if "tree" in ms else 0.0
        latency = measured_latency(by_width, drafter_ms)
        return replace(latency, drafter_delay_ms=delay_ms, drafter_per_token_ms=node_ms)

    def _wide_ms(self, widest_ms: float) -> dict[int, float]:
        """Forwards that many requests share, unless they take long."""
        if widest_ms > MAX_WIDE_MS or len(self._prompt) + WIDE[-1] > self._context:
            return {}
        ms = typical_ms({width: lambda width=width: self.run(self._verify(width, True)) for width in WIDE})  # type: ignore[misc]
        return {width: ms[width] for width in WIDE}

    def engine_ms(self) -> float:
        """What the engine takes for each verification, besides the forward: by a text that is decoded plainly."""
        new_tokens = max(2, min(DECODED, self._context - len(self._prompt)))
        loop = EngineLoop(self._fleet)
        active = loop.submit(Request(tuple(self._prompt), new_tokens, autoregressive()))
        times = [time.perf_counter() for _ in loop.follow(active)]
        per_token = [1000 * (after - before) for before, after in pairwise(times)]
        forward = [self.run(self._verify(1, alone=True)) for _ in per_token]
        return max(0.0, median(per_token) - median(forward))

    def contention(self, targets: int) -> float:
        """The share by which each other busy target slows one down: all verify at once."""
        if targets < 2:
            return 0.0
        ms = typical_ms({"one": lambda: self.run(self._verify(1)), "all": lambda: self._run_at_once(targets)})
        return max(0.0, ms["all"] / ms["one"] - 1) / (targets - 1)

    def _run_at_once(self, targets: int) -> float:
        jobs, began = {job.id: job for job in (self._verify(1) for _ in range(targets))}, time.perf_counter()
        for job in jobs.values():
            self._fleet.start(job)
        while jobs:
            event = self._fleet.next_event()
            if isinstance(event, Failed) and event.id in jobs:
                raise ValueError(f"a server cannot work: {event.reason}")
            jobs.pop(event.id, None)
        return 1000 * (time.perf_counter() - began)

    def stream_ms(self) -> float:
        """The time per token of a text that a target streams."""
        tokens = max(2, min(STREAMED, self._context - len(self._prompt) - 1))
        first, all = (self._stream(count) for count in (1, tokens))
        ms = typical_ms({"first": lambda: self.run(first()), "all": lambda: self.run(all())})
        return max(0.001, ms["all"] - ms["first"]) / (tokens - 1)

    def _stream(self, tokens: int) -> Callable[[], Draft]:
        return lambda: Draft(next(self._fleet.job_ids), self._text(1), tokens, TARGET, alone=True)

    def _turn(self, width: int, every_core: bool) -> float:
        """Time a verification after a draft; that of one token, as in plain decoding, after another."""
        if width == 1 or self._drafter is None:
            self.run(self._verify(1, every_core))
        else:
            self.run(self._draft(1, every_core))
        return self.run(self._verify(width, every_core))

    def run(self, job: Verify | Draft) -> float:
        """Run a job; return after how many milliseconds it has ended."""
        began, missing = time.perf_counter(), job.num_answers if isinstance(job, Draft) else 1  # events
        self._fleet.start(job)
        while missing:
            event = self._fleet.next_event()
            if isinstance(event, Failed) and event.id == job.id:
                raise ValueError(f"a server cannot work: {event.reason}")
            missing -= event.id == job.id
        return 1000 * (time.perf_counter() - began)

    def _verify(self, width: int, alone: bool = False) -> Verify:
        return Verify(next(self._fleet.job_ids), self._text(width), width, alone=alone)

    def _draft(self, tokens: int, alone: bool = False) -> Draft:
        job = Draft(next(self._fleet.job_ids), self._text(1), tokens, self._drafter or "", alone=alone)
        return replace(job, block_size=tokens, first_block=tokens)

    def _draft_tree(self, alone: bool = False) -> Draft:
        """A tree in two forwards: over the end of the text, and over its children."""
        expansions = ((END, TREE_NODES), *((node, 1) for node in range(TREE_NODES)))
        return replace(self._draft(1, alone), expansions=expansions, first_block=2)

    def _text(self, new: int) -> TokenSequence:
        """The prompt and so many tokens after it, which are not those of the text before."""
        next(self._others)
        text = self._prompt
        for token in islice(self._others, new):
            text = text.then(token)
        return text
