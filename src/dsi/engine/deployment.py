"""The models, fleet and latency model of one engine, and the speculation that suits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from dsi.core.latency_table import LatencyTable
from dsi.core.messages import DRAFTER, Sampling
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig, default_max_lead
from dsi.fleets.cuda import CudaFleet
from dsi.fleets.processes import ProcessFleet
from dsi.fleets.ray_actors import RayFleet
from dsi.models.tokenizer import Tokenizer
from dsi.planning.auto import latency_table
from dsi.planning.equation_1 import suitable_lookahead
from dsi.planning.latency import LatencyModel
from dsi.planning.search import DeploymentPlan, device_specs, fastest_min_draft
from dsi.planning.shared_forwards import shared_spec
from dsi.planning.simulation import SimulationConfig

if TYPE_CHECKING:
    from dsi.fleets.endpoint import Endpoint
    from dsi.fleets.http import HttpFleet

TYPICAL_ACCEPTANCE = 0.8  # of the built-in pair; only a first estimate for any other
SIMULATED_TOKENS = 96  # of the simulations by which a minimum draft is chosen


class ContextLengthError(ValueError):
    """A text that the target's context has no room for. Clients recognise the sentence."""

    def __init__(self, context: int, prompt: int | str, new: int = 0) -> None:
        more = f" and the request asks for {new} more" if new else ""
        super().__init__(f"This model's maximum context length is {context} tokens, but the prompt has {prompt}{more}.")


@dataclass(frozen=True)
class Deployment:
    """What `build` makes of an `EngineConfig`: the servers, their tokenizer and their latency model."""

    fleet: ProcessFleet | CudaFleet | RayFleet | HttpFleet
    tokenizer: Tokenizer
    context: int  # the target's; 0: unlimited
    sp: int
    latency: LatencyModel
    drafters: tuple[str, ...] = (DRAFTER,)  # names of their servers, the first one first
    plans: Mapping[str, DeploymentPlan] = field(default_factory=dict)  # the fastest of each algorithm, on devices
    warnings: tuple[str, ...] = ()
    exact: bool = False  # whether the target's logits do not depend on how a text is cut into forwards, to the bit
    trees: bool = False  # whether target and first drafter compute a tree of draft tokens in one forward
    max_tree: float = inf  # draft tokens of a tree at most
    drafter_contexts: Mapping[str, int] = field(default_factory=dict)  # by server, in the target's tokens; 0: unlimited
    vocab_size: int | None = None  # of the target's embedding; None: unknown
    repetition_penalty: float = 1.0  # of the target's generation configuration, for requests that give none
    max_running: int | None = None  # requests at once that there are KV caches for; None: no limit
    endpoints: tuple[Endpoint, ...] = ()  # of the targets, where they are engines behind URLs
    stream_ms: float | None = None  # per token of a text that a target streams; None: it cannot
    profile_key: str = ""  # under which what is measured of these models is kept; empty: nowhere
    _min_drafts: dict[int, int] = field(default_factory=dict)  # the fastest by lookahead
    _shared_specs: dict[tuple[int, float, float, int], SpecConfig] = field(default_factory=dict)  # by its arguments

    def simulation(self, sp: int, tokens: int, **fields: Any) -> SimulationConfig:
        """These servers in virtual time."""
        return SimulationConfig(self.latency, TYPICAL_ACCEPTANCE, sp, tokens, thread_pool=False, **fields)

    def resolve(self, spec: SpecConfig) -> SpecConfig:
        """Choose what a request left open: by plan, Eq. (1), or simulation with the measured latencies."""
        if spec.tree and not self.trees:
            raise ValueError(f"tree {spec.tree}: these models compute a chain of draft tokens; leave it out")
        if spec.tree > self.max_tree:
            raise ValueError(f"tree {spec.tree}: a forward of these models has at most {self.max_tree} draft tokens")
        lookahead, min_draft = spec.lookahead or self.lookahead(spec.algorithm), spec.min_draft
        if min_draft is None:
            min_draft = self.min_draft(lookahead) if spec.algorithm == "dsi" else 0
        max_lead = self.max_lead(lookahead) if spec.max_lead is None else spec.max_lead
        return replace(spec, lookahead=lookahead, min_draft=min_draft, max_lead=max_lead, drafters=self.drafters)

    def lookahead(self, algorithm: str) -> int:
        if algorithm in self.plans:
            return self.plans[algorithm].spec.lookahead or 1
        latency = self.latency.under(algorithm)
        return suitable_lookahead(algorithm, latency.target_ms, latency.drafter_ms, TYPICAL_ACCEPTANCE, self.sp)

    @property
    def shared_lookahead(self) -> int:
        """The lookahead of requests that share the targets.

        As many draft tokens as the drafter generates in a target's share of a forward, at most SI's block.
        """
        per_target = self.latency.target_ms / (self.sp * self.latency.drafter_ms)
        return max(1, min(self.lookahead("si"), int(per_target)))

    @property
    def shares_forwards(self) -> bool:
        """Whether a target computes several requests in one forward."""
        return isinstance(self.fleet, ProcessFleet | CudaFleet) and self.fleet.packs

    def shared_spec(self, requests: int, acceptance: float, runner_up: float, tree: int) -> SpecConfig:
        """How each of so many requests that share forwards speculates."""
        key = requests, round(acceptance, 1), round(runner_up, 1), tree
        if key not in self._shared_specs:
            self._shared_specs[key] = shared_spec(self.latency, *key)
        return self._shared_specs[key]

    def drafts_trees(self, sampling: Sampling) -> bool:
        """Whether trees may be chosen for a request: on devices the host samples each of their tokens, if any."""
        return self.trees and not (self.plans and sampling.temperature)

    def min_draft(self, lookahead: int) -> int:
        """The minimum draft with the lowest expected latency under DSI; the smallest of equals."""
        if plan := self._plan_with(lookahead):
            return plan.spec.min_draft or 0
        if lookahead not in self._min_drafts:
            spec = SpecConfig("dsi", lookahead, max_lead=self.max_lead(lookahead))
            config = self.simulation(self.sp, SIMULATED_TOKENS, spec=spec)
            self._min_drafts[lookahead] = fastest_min_draft(config, self.lookahead("si"))
        return self._min_drafts[lookahead]

    def max_lead(self, lookahead: int) -> int:
        plan = self._plan_with(lookahead)
        return int(plan.spec.lead_limit) if plan else default_max_lead(self.sp, lookahead)

    def can_stream(self, sampling: Sampling) -> bool:
        """Whether a target streams the text that verifications would give."""
        return self.stream_ms is not None and all(endpoint.wire.can_stream(sampling) for endpoint in self.endpoints)

    @cached_property
    def unstreamed_latency_table(self) -> LatencyTable:
        """The same for requests whose text cannot be streamed."""
        return latency_table(self.simulation(self.sp, SIMULATED_TOKENS), in_background=True)

    @cached_property
    def latency_table(self) -> LatencyTable:
        """Expected latencies of all configurations that `auto` chooses from."""
        config = self.simulation(self.sp, SIMULATED_TOKENS)
        if not self.plans:
            return latency_table(config, in_background=True, trees=self.trees, plain_ms=self.stream_ms)
        specs = device_specs(self.latency, TYPICAL_ACCEPTANCE, self.sp)
        table = latency_table(config, specs=specs, trees=self.trees, simulates=False)
        table = replace(table, greedy_trees=True)  # as in `drafts_trees`
        all(table.ms)  # predicted now: a process with CUDA should not be forked
        return table

    def check_request(self, prompt: Tokens, sampling: Sampling, new_tokens: int = 1) -> None:
        """Refuse a prompt that the target cannot continue, and sampling that these models do not support."""
        if self.plans:
            self._check_on_devices(sampling)
        for endpoint in self.endpoints:
            endpoint.wire.check_sampling(sampling, endpoint.url)
        if not prompt:
            raise ValueError("an empty prompt: must have at least one token")
        self.check_tokens(prompt)
        self.check_tokens(tuple(sampling.token_ids))
        if self.context and len(prompt) + new_tokens > self.context:
            raise ContextLengthError(self.context, len(prompt), new_tokens)

    @staticmethod
    def _check_on_devices(sampling: Sampling) -> None:
        if sampling.rule != "match" or sampling.logprobs is not None:
            name = "logprobs" if sampling.rule == "match" else f"rule {sampling.rule}"
            raise ValueError(f"{name}: on devices there are only match and no logprobs; leave them out")
        if sampling.has_penalties:
            raise ValueError(f"{sampling.penalties[0]}: is not supported on devices; leave it out")

    def check_tokens(self, tokens: Tokens) -> None:
        """Refuse tokens that the target does not have."""
        if tokens and self.vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            invalid = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise ValueError(f"token {invalid}: the target's tokens are 0 to {self.vocab_size - 1}")

    def limit_new_tokens(self, prompt: Tokens, max_new_tokens: int) -> int:
        """At most as many tokens as the target's context has room for."""
        return min(max_new_tokens, self.context - len(prompt)) if self.context else max_new_tokens

    def _plan_with(self, lookahead: int) -> DeploymentPlan | None:
        plan = self.plans.get("dsi")
        return plan if plan and plan.spec.lookahead == lookahead else None
