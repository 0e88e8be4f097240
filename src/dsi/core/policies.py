"""The algorithms. Each is asked, after every event, which jobs should now begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from dsi.core.generation import Generation, Policy
from dsi.core.messages import DRAFTER

ALGORITHMS = ("nonsi", "si", "pearl", "dsi")
AUTO = "auto"  # which goes from one to another
DOUBT = 0.1  # how close a runner-up must come to the winner to be worth a look


def check_algorithm(name: str) -> str:
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(ALGORITHMS)}")
    return name


def check_named(name: str) -> str:
    """One of the algorithms, or `auto`."""
    if name not in (*ALGORITHMS, AUTO):
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join((*ALGORITHMS, AUTO))}")
    return name


def named(
    algorithm: str,
    lookahead: int,
    drafters: Sequence[str] = (DRAFTER,),
    patience: int = 0,
    horizon: float = inf,
    branches: int = 1,
    spare: int = 1,
) -> Policy:
    """The policy that users know by this name; each takes what it has a use for."""
    match check_algorithm(algorithm):
        case "nonsi":
            return autoregressive()
        case "si":
            return speculative(lookahead)
        case "pearl":
            return pearl(lookahead)
    return distributed(lookahead, drafters, patience, horizon, branches, spare)


def autoregressive() -> Policy:
    """non-SI: one target forward per token."""

    def policy(g: Generation) -> None:
        if not g.busy:
            g.verify(g.root, 1)

    return policy


def speculative(lookahead: int) -> Policy:
    """SI: draft a block, verify it, repeat (Leviathan et al., 2023)."""
    _at_least("lookahead", lookahead, 1)

    def policy(g: Generation) -> None:
        if g.busy:
            return
        g.block = lookahead
        tip = g.tip()
        guesses = tip.depth - g.root.depth
        wanted = min(lookahead - guesses, g.room(tip))
        if wanted > 0:
            g.draft(tip, wanted)
        else:
            g.verify(tip, guesses + 1)

    return policy


def pearl(lookahead: int) -> Policy:
    """PEARL: verify a block while drafting the next, in lock step (Liu et al., 2025)."""
    _at_least("lookahead", lookahead, 1)

    def policy(g: Generation) -> None:
        if g.busy:
            return
        g.block = lookahead
        tip = g.tip()
        room = g.room(tip)
        last = g.judgeable(tip) or (None if room else tip)
        if last is not None and (unwatched := g.unwatched(last)):
            g.verify(last, unwatched)
        if room:
            g.draft(tip, min(lookahead, room))

    return policy


def distributed(
    lookahead: int,
    drafters: Sequence[str] = (DRAFTER,),
    patience: int = 0,
    horizon: float = inf,
    branches: int = 1,
    spare: int = 1,
    doubt: float = DOUBT,
) -> Policy:
    """DSI: never let a drafter rest; never leave the root, or a full block, unwatched (Timor et al., 2025).

    `patience` holds the watch on a fresh root until that many guesses can be judged with it: 0 is the
    paper's Algorithm 1, and with one target and patience = lookahead it is SI. `horizon` is how far
    beyond the sure text a drafter may guess.

    With `branches` a drafter also names the runners-up for each place, where they came to at least `doubt`
    of the winner, and up to `spare` targets look past them: if the first guess falls and a second one is
    the truth, what follows it is known already. The rule match allows it, whose truth needs no guess.
    """
    _at_least("lookahead", lookahead, 1)
    _at_least("patience", patience, 0)
    _at_least("horizon", horizon, 1)
    _at_least("number of drafters", len(drafters), 1)
    _at_least("branches", branches, 1)
    _at_least("spare", spare, 0)

    def policy(g: Generation) -> None:
        if g.needs_guess:
            _check_one_guess(g.sampling.rule, drafters, branches)
        g.branches = branches
        g.doubt = doubt
        go_ahead(g, lookahead, drafters, patience, horizon)
        if branches > 1 and g.root.watcher is not None:
            look_aside(g, spare)
        g.remind()  # any target may be next to watch this text

    return policy


@dataclass
class Load:
    """The requests that share a fleet, as they stand now."""

    targets: int = 1
    requests: int = 0
    verifying: int = 0  # verifications asked for and not answered

    @property
    def idle(self) -> bool:
        return self.verifying < self.targets


def considerate(alone: Policy, lookahead: int, drafters: Sequence[str], crowd: Load) -> Policy:
    """DSI among others: what an idle server would be spent on is another request's now.

    The fewer targets there are for each request, the less far it goes beyond its root; with less than two it
    drafts one block and lets it be verified whole, as SI does, but never makes a target wait for guesses. A
    rule whose text depends on its blocks keeps to them.
    """
    _at_least("lookahead", lookahead, 1)

    def policy(g: Generation) -> None:
        if crowd.requests < 2 or g.needs_guess:
            alone(g)
            return
        g.branches = 1
        share, patience = crowd.targets // crowd.requests, 0 if crowd.idle else lookahead
        if share > 1:
            go_ahead(g, lookahead, drafters, patience, lookahead * (share + 1))
        else:
            _stay_close(g, lookahead, drafters, patience)

    return policy


def go_ahead(
    g: Generation,
    lookahead: int,
    drafters: Sequence[str],
    patience: int,
    horizon: float,
    targets: float = inf,
) -> None:
    """Let no drafter rest within the horizon; leave neither the root nor a full block unwatched.

    Where no more than so many targets are to work, a block waits, and grows, until one is free.
    """
    g.block = lookahead
    whole = g.needs_guess and g.sampling.rule == "block"  # blocks must not depend on timing
    for model in g.willing(drafters):
        tip = g.tip(model, drafters)
        lead = tip.depth - g.root.depth
        left = g.room(tip, model)
        room = int(min(left, (max(horizon, lookahead) if whole else horizon) - lead))
        last = g.judgeable(tip) or (None if left > 0 else tip)  # without a guess, the root draws freely
        unwatched = 0 if last is None else g.unwatched(last)
        root_is_watched = g.root.watcher is not None
        full = unwatched >= lookahead if root_is_watched or whole else lead >= patience
        free = not root_is_watched or g.verifying < targets
        if last is not None and unwatched and free and (full or (left if whole else room) <= 0):
            g.verify(last, unwatched)
        if room > 0 and not g.drafting(model):
            g.draft(tip, room, model)


def _stay_close(g: Generation, lookahead: int, drafters: Sequence[str], patience: int) -> None:
    """One block beyond the root, and no verification but the root's."""
    model = g.willing(drafters)[0]
    tip = g.tip(model, drafters)
    lead = tip.depth - g.root.depth
    room = min(g.room(tip, model), lookahead - lead)
    if g.root.watcher is None and (lead >= patience or room <= 0):
        g.verify(tip, g.unwatched(tip))
    if room > 0 and not g.drafting(model):
        g.draft(tip, room, model)


def look_aside(g: Generation, spare: int) -> None:
    """Let targets that are to spare look past second guesses."""
    while g.asides < spare and (node := g.second()) is not None:
        g.verify(node, 1, aside=True)


def _check_one_guess(rule: str, drafters: Sequence[str], branches: int) -> None:
    if branches > 1:
        raise ValueError(
            f"rule {rule} with {branches} branches: it judges the guesses it is given, and second ones would "
            "change the text; use 1 branch, or the rule match"
        )
    if len(drafters) > 1:
        raise ValueError(
            f"rule {rule} with {len(drafters)} drafters: whose guess is judged would depend on who was "
            "faster, and the text would no longer be the target's; use one drafter, or the rule match"
        )


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} {value}: must be at least {least}")
