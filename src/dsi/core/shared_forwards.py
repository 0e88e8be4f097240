"""The policy of requests that share forwards.

Every request drafts a block and verifies it, as in SI, and all that are ready share one forward. Draft tokens are
rows of that forward: nearly free while few requests share it, and worth less than other requests' tokens when many do.
So the block shrinks with the load, down to plain decoding.
"""

from __future__ import annotations

from functools import cache

from dsi.core.adaptive import PRIOR_ACCEPTANCE, AcceptanceEMA
from dsi.core.generation import Generation, Policy
from dsi.core.policies import Load, autoregressive, speculative

ENGINE_WINDOW = 400  # tokens of all requests by which one without a draft token of its own is judged


class SharedForwards:
    """Chooses the blocks of all requests of an engine, each by its acceptance rate, which starts from that of all."""

    def __init__(self, drafter: str, load: Load) -> None:
        self._drafter, self._load = drafter, load
        self._acceptance = AcceptanceEMA(PRIOR_ACCEPTANCE, ENGINE_WINDOW)
        self._in_turns = cache(lambda block: speculative(block, drafter) if block else autoregressive())

    def policy(self, alone: Policy) -> Policy:
        """The policy of one request: `alone` while no other runs, and for rules whose text depends on the blocks."""
        own, num_learned, load = AcceptanceEMA(PRIOR_ACCEPTANCE), 0, self._load

        def policy(g: Generation) -> None:
            nonlocal num_learned
            if load.shared_block is None or load.requests < 2 or g.needs_draft:
                alone(g)
                return
            if g.busy:
                return
            self._learn(g, num_learned, own)
            num_learned = len(g.verified)
            own.prior = self._acceptance.rate
            self._in_turns(load.shared_block(load.requests, own.rate))(g)

        return policy

    def _learn(self, g: Generation, num_learned: int, own: AcceptanceEMA) -> None:
        for drafted_by, token, _ in g.verified[num_learned:]:
            if self._drafter in drafted_by:
                for acceptance in (own, self._acceptance):
                    acceptance.add(drafted_by[self._drafter] == token)
