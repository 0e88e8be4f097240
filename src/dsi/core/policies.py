"""The algorithms: a policy runs after every event and issues the jobs that should start now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from dsi.core.draft_tree import Node
from dsi.core.generation import Generation, Policy
from dsi.core.messages import DRAFTER
from dsi.core.spec import GIVEN_UP, SpecConfig, check_algorithm, default_max_lead
from dsi.core.tree_policies import tree_policy

OLD_NAMES = {"patience": "min_draft", "horizon": "max_lead"}


def policy_for(spec: SpecConfig) -> Policy:
    """Build the policy of a configuration; each algorithm reads the fields it uses."""
    algorithm = check_algorithm(spec.algorithm)
    if algorithm == "nonsi":
        return autoregressive()
    if spec.lookahead is None:
        raise ValueError(f"algorithm {algorithm} without a lookahead: give one, or let the engine choose")
    if spec.tree:
        return tree_policy(spec)
    if algorithm == "si":
        return speculative(spec.lookahead, spec.drafters[0])
    return pearl(spec.lookahead) if algorithm == "pearl" else _distributed(spec)


def autoregressive() -> Policy:
    """non-SI: one target forward per token, streamed by the target if it can."""

    def policy(g: Generation) -> None:
        if g.can_stream:
            g.stream()
        elif g.root.verifier is None:
            g.verify(g.root, 1, alone=True)

    return policy


def speculative(lookahead: int, drafter: str = DRAFTER) -> Policy:
    """SI: draft a block, verify it, repeat (Leviathan et al., 2023)."""
    spec = SpecConfig("si", lookahead, drafters=(drafter,))

    def policy(g: Generation) -> None:
        if g.busy:
            return
        tip = g.tip(drafter)
        drafted = tip.depth - g.root.depth
        count = min(lookahead - drafted, g.room(tip, drafter))
        if count > 0:
            g.draft(tip, count, drafter, spec, alone=True)
        else:
            g.verify(tip, drafted + 1, alone=True)

    return policy


def pearl(lookahead: int) -> Policy:
    """PEARL: verify a block while drafting the next, in lock step (Liu et al., 2025)."""
    spec = SpecConfig("pearl", lookahead)

    def policy(g: Generation) -> None:
        if g.busy:
            return
        tip = g.tip()
        room = g.room(tip)
        last = g.verifiable(tip) or (None if room else tip)
        verify_gap(g, tip, tip.num_unverified())
        if last is not None and (unverified := last.num_unverified()):
            g.verify(last, unverified)
        if room:
            g.draft(tip, min(lookahead, room), spec=spec)

    return policy


def distributed(
    lookahead: int,
    drafters: Sequence[str] = (DRAFTER,),
    min_draft: int = 0,
    max_lead: float = inf,
    **old_names: float,
) -> Policy:
    """DSI: keep every drafter busy, and verify the root and every full block at once (Timor et al., 2025).

    A new root is verified once `min_draft` draft tokens can be verified with it: 0 is the paper's Algorithm 1,
    and with one target and min_draft = lookahead DSI is SI. `max_lead` limits how far a drafter may be ahead of
    the verified text.
    """
    for name in (*GIVEN_UP, "spare", "doubt"):
        if name in old_names:
            raise TypeError(
                f"distributed() no longer takes {name}: trees are faster than runner-ups; use "
                f"policy_for(SpecConfig('dsi', {lookahead}, tree=16))"
            )
    if unknown := old_names.keys() - OLD_NAMES.keys():
        raise TypeError(f"distributed() got an unexpected keyword argument {min(unknown)!r}")
    fields: dict[str, Any] = {OLD_NAMES[name]: value for name, value in old_names.items()}  # kept for one release
    spec = SpecConfig("dsi", lookahead, min_draft, max_lead, drafters=tuple(drafters))
    return _distributed(replace(spec, **fields))


def _distributed(spec: SpecConfig) -> Policy:
    shares_text = spec.max_targets != 1

    def policy(g: Generation) -> None:
        if g.needs_draft:
            _check_single_draft(g.sampling.rule, spec)
        speculate(g, spec)
        if shares_text:  # any target may be the next to verify this request
            g.prefill()

    return policy


def streamed(load: Load) -> Policy:
    """non-SI, streamed by the target while there is one for each request; with more requests, targets take turns."""

    def policy(g: Generation) -> None:
        if g.can_stream and load.requests <= load.targets:
            g.stream()
        elif g.root.verifier is None:
            g.verify(g.root, 1, alone=True)

    return policy


@dataclass
class Load:
    """The requests that share a fleet, as they stand now."""

    targets: int = 1
    requests: int = 0
    verifying: int = 0  # verifications in flight
    # Where requests share forwards: how each of so many requests speculates best, by acceptance rate and that of
    # runners-up, with trees of so many draft tokens at most.
    shared_spec: Callable[[int, float, float, int], SpecConfig] | None = None

    @property
    def idle(self) -> bool:
        """Whether a target has no verification to run."""
        return self.verifying < self.targets


def load_aware(alone: Policy, spec: SpecConfig, load: Load) -> Policy:
    """DSI beside other requests, which can use what an idle server would be spent on; `alone` runs without them.

    The fewer targets there are per request, the smaller the lead; with less than two it drafts one block and
    verifies it whole, as SI does, but never makes a target wait for draft tokens. A rule whose text depends on
    the blocks keeps to those of `alone`.
    """
    lookahead = spec.lookahead or 1
    by_load: dict[tuple[int, bool], SpecConfig] = {}

    def policy(g: Generation) -> None:
        if load.requests < 2 or g.needs_draft:
            alone(g)
            return
        key = share, idle = load.targets // load.requests, load.idle
        if key not in by_load:
            min_draft = 0 if idle else lookahead
            max_lead = default_max_lead(share, lookahead)
            by_load[key] = SpecConfig("dsi", lookahead, min_draft, max_lead, drafters=spec.drafters)
        (speculate if share > 1 else speculate_one_block)(g, by_load[key])

    return policy


def speculate(g: Generation, spec: SpecConfig) -> None:
    """Keep every drafter busy within the maximum lead, and verify the root and every full block.

    With `max_targets` verifications in flight, a block waits, and grows, until one of them ends.
    """
    lookahead, max_lead = spec.lookahead or 1, spec.lead_limit
    whole_blocks = g.needs_draft and g.sampling.rule == "block"  # blocks must not depend on timing
    if whole_blocks:
        max_lead = max(max_lead, lookahead)
    for model in g.usable(spec.drafters):
        tip = g.tip(model, spec.drafters)
        lead = tip.depth - g.root.depth
        room = g.room(tip, model)
        count = int(min(room, max_lead - lead))
        last = g.verifiable(tip) or (None if room > 0 else tip)  # without a draft token, the target samples
        unverified = 0 if last is None else last.num_unverified()
        verify_gap(g, tip, unverified)
        if g.root.verifier is None:
            full = (unverified >= lookahead) if whole_blocks else lead >= (spec.min_draft or 0)
        else:
            full = unverified >= lookahead
            if spec.max_targets is not None and g.jobs.verifying >= spec.max_targets:
                unverified = 0
        if last is not None and unverified and (full or (room if whole_blocks else count) <= 0):
            g.verify(last, unverified)
        if count > 0 and not g.jobs.drafting(model):
            g.draft(tip, count, model, spec)


def verify_gap(g: Generation, tip: Node, unverified: int) -> None:
    """Verify the root where a verification covers a node between it and the tip: one of a tree before it has failed."""
    if g.root.verifier is None and not g.needs_draft and unverified <= tip.depth - g.root.depth:
        g.verify(g.root, 1)


def speculate_one_block(g: Generation, spec: SpecConfig) -> None:
    """Draft one block after the root, and verify nothing before the root's verification has ended."""
    model = g.usable(spec.drafters)[0]
    tip = g.tip(model, spec.drafters)
    lead = tip.depth - g.root.depth
    count = min(g.room(tip, model), (spec.lookahead or 1) - lead)
    verify_gap(g, tip, tip.num_unverified())
    if g.root.verifier is None and (lead >= (spec.min_draft or 0) or count <= 0):
        g.verify(tip, tip.num_unverified())
    if count > 0 and not g.jobs.drafting(model):
        g.draft(tip, count, model, spec)


def _check_single_draft(rule: str, spec: SpecConfig) -> None:
    if len(spec.drafters) > 1:
        raise ValueError(
            f"rule {rule} with {len(spec.drafters)} drafters: whose draft token is verified would depend on who was "
            "faster, and the text would no longer be the target's; use one drafter, or the rule match"
        )
