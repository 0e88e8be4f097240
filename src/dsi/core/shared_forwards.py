"""The policy of requests that share forwards.

Every request drafts a block, or a tree, and verifies it, as in SI, and all that are ready share one forward. Draft
tokens are rows of that forward: nearly free while few requests share it, and worth less than other requests' tokens
when many do. So speculation shrinks with the load, down to plain decoding, in which the target continues each text for
several forwards before the engine handles their tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from dsi.core.adaptive import PRIOR_ACCEPTANCE, PRIOR_RUNNER_UP_ACCEPTANCE, AcceptanceEMA, runner_up_accepted
from dsi.core.generation import Generation, Policy
from dsi.core.messages import TARGET
from dsi.core.policies import Load, policy_for
from dsi.core.spec import SpecConfig

ENGINE_WINDOW = 400  # tokens of all requests by which one without a draft token of its own is judged
PLAIN = SpecConfig("nonsi")


class SharedForwards:
    """Chooses how all requests of an engine speculate, each by its acceptance rates, which start from those of all."""

    def __init__(self, drafter: str, load: Load) -> None:
        self._drafter, self._load = drafter, load
        self._acceptance = AcceptanceEMA(PRIOR_ACCEPTANCE, ENGINE_WINDOW)
        self._runner_up = AcceptanceEMA(PRIOR_RUNNER_UP_ACCEPTANCE, ENGINE_WINDOW)
        self._in_turns = cache(lambda spec: policy_for(replace(spec, drafters=(drafter,))))

    def policy(self, alone: Policy, tree: int = 0) -> Policy:
        """The policy of one request, with trees of so many draft tokens at most.

        It is `alone` while no other request runs, and for rules whose text depends on the blocks.
        """
        acceptance, runner_up = AcceptanceEMA(PRIOR_ACCEPTANCE), AcceptanceEMA(PRIOR_RUNNER_UP_ACCEPTANCE)
        load, num_learned, chosen = self._load, 0, PLAIN
        chosen_for = -1  # verified tokens: what is drafted as a tree is verified as one

        def policy(g: Generation) -> None:
            nonlocal num_learned, chosen, chosen_for
            choose = load.shared_spec
            if choose is None or not self._shares(g):
                alone(g)
                return
            if g.busy:
                return
            self._learn(g, num_learned, acceptance, runner_up)
            num_learned = len(g.verified)
            if chosen_for < num_learned:
                acceptance.prior, runner_up.prior = self._acceptance.rate, self._runner_up.rate
                chosen = choose(load.requests, acceptance.rate, runner_up.rate, tree)
                chosen_for = num_learned
            self._go_on(g, chosen)

        return policy

    def plain(self, alone: Policy) -> Policy:
        """The same for a request that does not speculate."""

        def policy(g: Generation) -> None:
            if not self._shares(g):
                alone(g)
            elif not g.busy:
                self._go_on(g, PLAIN)

        return policy

    def _shares(self, g: Generation) -> bool:
        """Whether a request shares forwards with others; where it no longer does, no target continues it."""
        if self._load.shared_spec is None:
            return False
        if self._load.requests >= 2 and not g.needs_draft:
            return True
        g.stop_stream()
        return False

    def _go_on(self, g: Generation, chosen: SpecConfig) -> None:
        """Under plain decoding the target continues the text, if nothing but its tokens is wanted."""
        if chosen.algorithm == PLAIN.algorithm and g.sampling.logprobs is None and not g.jobs.failing(TARGET):
            g.stream()
            return
        g.stop_stream()
        self._in_turns(chosen)(g)

    def _learn(self, g: Generation, num_learned: int, acceptance: AcceptanceEMA, runner_up: AcceptanceEMA) -> None:
        for position in g.verified[num_learned:]:
            drafted_by, token, _ = position
            if self._drafter in drafted_by:
                for ema in (acceptance, self._acceptance):
                    ema.add(drafted_by[self._drafter] == token)
            if (is_next := runner_up_accepted(position)) is not None:
                for ema in (runner_up, self._runner_up):
                    ema.add(is_next)
