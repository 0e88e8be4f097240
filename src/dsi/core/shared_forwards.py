"""The policy of requests that share forwards.

Every request drafts a block, or a tree, and verifies it, as in SI, and all that are ready share one forward. Draft
tokens are rows of that forward: nearly free while few requests share it, and worth less than other requests' tokens
when many do. So speculation shrinks with the load, down to plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from dsi.core.adaptive import PRIOR_ACCEPTANCE, PRIOR_RUNNER_UP_ACCEPTANCE, AcceptanceEMA, runner_up_accepted
from dsi.core.generation import Generation, Policy
from dsi.core.policies import Load, policy_for
from dsi.core.spec import SpecConfig

ENGINE_WINDOW = 400  # tokens of all requests by which one without a draft token of its own is judged


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
        load, num_learned, chosen = self._load, 0, SpecConfig("nonsi")
        chosen_for = -1  # verified tokens: what is drafted as a tree is verified as one

        def policy(g: Generation) -> None:
            nonlocal num_learned, chosen, chosen_for
            if load.shared_spec is None or load.requests < 2 or g.needs_draft:
                alone(g)
                return
            if g.busy:
                return
            self._learn(g, num_learned, acceptance, runner_up)
            num_learned = len(g.verified)
            if chosen_for < num_learned:
                acceptance.prior, runner_up.prior = self._acceptance.rate, self._runner_up.rate
                chosen = load.shared_spec(load.requests, acceptance.rate, runner_up.rate, tree)
                chosen_for = num_learned
            self._in_turns(chosen)(g)

        return policy

    def _learn(self, g: Generation, num_learned: int, acceptance: AcceptanceEMA, runner_up: AcceptanceEMA) -> None:
        for position in g.verified[num_learned:]:
            drafted_by, token, _ = position
            if self._drafter in drafted_by:
                for ema in (acceptance, self._acceptance):
                    ema.add(drafted_by[self._drafter] == token)
            if (is_next := runner_up_accepted(position)) is not None:
                for ema in (runner_up, self._runner_up):
                    ema.add(is_next)
