"""SI, PEARL and DSI with draft trees: a wrong first choice costs nothing where a sibling is right and was continued.

Under the rule match the target's token after a node depends on the text up to it alone, so the text is that of
non-SI whatever the tree.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from dsi.core.draft_tree import Node
from dsi.core.generation import Generation, Policy
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import TREE_BRANCHES, expansions, rank_chances

MAX_UNVERIFIED = 8  # verifications' worth of draft tokens that may wait: more would be pruned before their turn
PRIOR_CHANCES = rank_chances(0.7, 0.4, TREE_BRANCHES)  # of a drafter's choices, where nothing is known of them


def tree_policy(spec: SpecConfig) -> Policy:
    """The policy of a configuration with a tree."""
    spec = replace(spec, chances=spec.chances or PRIOR_CHANCES)
    if spec.algorithm == "pearl":  # verifies in turn what was drafted during the verification before
        spec = replace(spec, max_targets=1, max_lead=2 * (spec.lookahead or 1))
    speculate = speculate_in_turns if spec.takes_turns else speculate_at_once
    shares_text = not spec.takes_turns and spec.max_targets != 1

    def policy(g: Generation) -> None:
        if g.needs_draft:
            raise ValueError(why_refused(g.sampling.rule, spec.tree))
        if not g.tree.first_choices().queued and g.root.children:  # another policy has drafted a chain
            g.go_on_as_tree(spec)
        speculate(g, spec)
        if shares_text:  # any target may be the next to verify this request
            g.prefill()

    return policy


def why_refused(rule: str, size: int) -> str:
    if rule == "specinfer":
        why = "it needs the distribution that each was drawn from, which those of a tree do not carry"
    else:
        why = "it verifies one draft token for each position"
    return f"rule {rule} with trees of {size} draft tokens: {why}; use no tree, or the rule match"


def speculate_in_turns(g: Generation, spec: SpecConfig) -> None:
    """SI: draft the best tree of a size, `lookahead` levels at most, verify it in one forward, repeat."""
    if g.busy:
        return
    drafter = spec.drafters[0]
    depth = min(spec.lookahead or 1, g.room(g.root, drafter))
    if g.root.children or depth < 1:
        g.verify_tree([g.root, *unverified(g, spec.tree)], alone=True)
    else:
        g.draft_tree_and_verify(drafter, spec, expansions(spec.chances, spec.tree, depth))


def speculate_at_once(g: Generation, spec: SpecConfig) -> None:
    """DSI: keep the drafter growing the likeliest nodes, and verify the likeliest of what is new.

    A verification begins with a new root, and with every `lookahead` levels while a target is free.
    """
    lookahead = spec.lookahead or 1
    model = g.usable(spec.drafters)[0]
    grown = [] if g.jobs.drafting(model) else growing(g, model, spec, max(1, spec.tree // lookahead))
    if wants_verification(g, spec, lookahead, can_grow=bool(grown) or g.jobs.drafting(model)):
        first = [g.root] if g.root.verifier is None else []
        if nodes := first + unverified(g, spec.tree):
            g.verify_tree(nodes)
    if grown:
        g.draft_tree([(node, len(spec.chances)) for node in grown], model, spec)


def wants_verification(g: Generation, spec: SpecConfig, lookahead: int, can_grow: bool) -> bool:
    """Whether enough was drafted on the path of first choices, or nothing more will be."""
    tip = g.tree.first_choices()
    if g.root.verifier is None:
        return tip.depth - g.root.depth >= (spec.min_draft or 0) or not can_grow
    if spec.max_targets is not None and g.jobs.verifying >= spec.max_targets:
        return False
    return tip.num_unverified() >= (lookahead if can_grow else 1)


def unverified(g: Generation, most: int) -> list[Node]:
    """Take the likeliest draft tokens that no verification covers; nothing follows a stop token."""
    waiting = g.tree.unverified.pop(most, lambda node: node is not g.root)
    return [node for node in waiting if node.verifier is None and not g.stops(node)]


def growing(g: Generation, model: str, spec: SpecConfig, most: int) -> list[Node]:
    """Take the likeliest nodes that the drafter can continue, the root if there is nothing after it."""
    if g.tree.unverified.has(MAX_UNVERIFIED * spec.tree):
        return []
    if not g.root.children:
        return [g.root] if g.room(g.root, model) > 0 else []
    limit = g.root.depth + spec.lead_limit
    leaves = g.tree.leaves.pop(most, lambda node: node.depth < limit and g.room(node, model) > 0)
    return [node for node in leaves if node is not g.root and not node.children and node.log_chance > -inf]
