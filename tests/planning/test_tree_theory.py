"""The exact expectations with draft trees against a simulator that shares nothing with them but the best tree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsi.core.draft_tree import Node
from dsi.core.generation import Generation, Policy
from dsi.core.messages import DRAFTER, TARGET
from dsi.core.policies import policy_for
from dsi.core.request import Request
from dsi.core.sequence import Tokens
from dsi.core.spec import SpecConfig
from dsi.core.tree_shape import Chances, best_paths, num_accepted, rank_chances
from dsi.fleets.loop import EngineLoop
from dsi.fleets.servers import Server
from dsi.fleets.simulated import SimulatedFleet
from dsi.models.protocol import ForwardRequest
from dsi.models.toy import VOCAB_SIZE, ToyTarget
from dsi.models.wait import Wait
from dsi.planning import theory, tree_theory
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import PROMPT, SimulationConfig

CHANCES = rank_chances(0.63, 0.5, 3)
H200_7B = ((1, 4.52), (8, 4.60), (16, 4.62), (32, 4.69), (64, 4.80), (128, 5.07))  # ms by width
Ranks = tuple[int, ...]  # of the choice that is right at each position; as many as there are choices: none


@dataclass
class Scripted:
    """A drafter whose right choices are those of a script."""

    target: ToyTarget
    script: Ranks

    def answer(self, request: ForwardRequest) -> Tokens:
        return self.top_k(request, 1)

    def top_k(self, request: ForwardRequest, count: int) -> Tokens:
        (truth,) = self.target.answer(request)
        right = self.script[len(request.tokens) - len(PROMPT)]
        return tuple(truth if rank == right else (truth + 1 + 2 * rank) % VOCAB_SIZE for rank in range(count))


@dataclass(frozen=True)
class Case:
    tokens: int
    size: int
    depth: int
    chances: tuple[Fraction, ...]
    latency: LatencyModel

    @property
    def floats(self) -> Chances:
        return tuple(map(float, self.chances))

    def took(self, policy: Policy, script: Ranks, sp: int) -> Fraction:
        toy = ToyTarget(0)
        servers = [Server(f"target-{i}", TARGET, Wait(toy, self.latency.target())) for i in range(sp)]
        servers.append(Server(DRAFTER, DRAFTER, Wait(Scripted(toy, script), self.latency.drafter())))
        request = Request(PROMPT, self.tokens, policy)
        [done] = EngineLoop(SimulatedFleet(servers, thread_pool=True)).run(request)
        return Fraction(done.elapsed)

    def expected(self, policy: Policy, sp: int = 1) -> float:
        """The mean over every course that events can take, weighed by its chance: no sampling error at all."""
        chances = (*self.chances, 1 - sum(self.chances))
        scripts = product(range(len(chances)), repeat=self.tokens - 1)
        return float(sum(prod(chances[r] for r in script) * self.took(policy, script, sp) for script in scripts))

    def si(self) -> Policy:
        return policy_for(SpecConfig("si", self.depth, tree=self.size, chances=self.floats))

    def dsi(self, size: int) -> Policy:
        return policy_for(SpecConfig("dsi", 1, tree=size, chances=self.floats))


@st.composite
def cases(draw: st.DrawFn, slowest_drafter: int = 1) -> Case:
    tenths = st.integers(1, 10).map(lambda n: Fraction(n, 10))
    drafter, ttft = draw(st.integers(slowest_drafter, 20)) / Fraction(20), 1 + draw(st.integers(0, 3)) / Fraction(2)
    first, runner_up, count = draw(tenths), draw(tenths), draw(st.integers(1, 3))
    return Case(
        tokens=draw(st.integers(1, 5)),
        size=draw(st.integers(1, 12)),
        depth=draw(st.integers(1, 4)),
        chances=tuple(
            sorted((first, (1 - first) * runner_up, (1 - first) * (1 - runner_up) / 2)[:count], reverse=True)
        ),
        latency=LatencyModel(Fraction(1), drafter, ttft, drafter + draw(tenths) * (ttft - drafter)),
    )


WIDTHS = st.sampled_from([{}, {"per_token_ms": Fraction(1, 8)}, {"by_width": ((1, Fraction(1)), (4, Fraction(3, 2)))}])


@given(case=cases(), widths=WIDTHS)
@settings(max_examples=20, deadline=None)
def test_si_agrees_exactly_with_every_course_of_short_texts(case: Case, widths: dict[str, Any]) -> None:
    case = replace(case, latency=replace(case.latency, **widths))
    exact = tree_theory.si(case.tokens, case.latency, case.floats, case.size, case.depth)
    assert exact == pytest.approx(case.expected(case.si()), rel=1e-12)


@given(case=cases(slowest_drafter=6))
@settings(max_examples=10, deadline=None)
def test_dsi_agrees_exactly_where_every_place_is_continued(case: Case) -> None:
    size = tree_theory.places(case.latency, len(case.chances))
    exact = tree_theory.dsi(case.tokens, case.latency, case.floats)
    assert exact == pytest.approx(case.expected(case.dsi(size), sp=14), rel=1e-12)


@given(case=cases())
@settings(max_examples=10, deadline=None)
def test_dsi_is_a_lower_bound_whatever_the_tree(case: Case) -> None:
    exact = tree_theory.dsi(case.tokens, case.latency, case.floats)
    assert exact <= case.expected(case.dsi(case.size), sp=30) * (1 + 1e-12)


SHORT = Case(5, 6, 3, (Fraction(6, 10), Fraction(2, 10)), LatencyModel(Fraction(1), Fraction(1, 4)))


def no_walk_to_siblings(case: Case) -> float:
    return float(theory.si(case.tokens, case.latency, case.floats[0], case.depth))


def depth_beyond_the_text(case: Case) -> float:
    """Drafts whole trees at the end of a text, too."""
    longer = tree_theory.si(case.tokens + case.depth, case.latency, case.floats, case.size, case.depth)
    return longer - tree_theory.si(case.depth, case.latency, case.floats, case.size, case.depth)


def one_choice_for_all(case: Case) -> float:
    """As if the chance to go on were that of any choice, at every node: trees have leaves."""
    return float(theory.si(case.tokens, case.latency, sum(case.floats), case.depth))


@pytest.mark.parametrize("fault", [no_walk_to_siblings, depth_beyond_the_text, one_choice_for_all])
def test_enumeration_catches_planted_faults(fault: Callable[[Case], float]) -> None:
    truth = SHORT.expected(SHORT.si())
    assert tree_theory.si(5, SHORT.latency, SHORT.floats, 6, 3) == pytest.approx(truth, rel=1e-12)
    assert fault(SHORT) != pytest.approx(truth, rel=1e-3)


def test_enumeration_catches_a_tree_that_is_too_small_for_dsi() -> None:
    assert tree_theory.places(SHORT.latency, 2) == 32
    exact = tree_theory.dsi(5, SHORT.latency, SHORT.floats)
    assert SHORT.expected(SHORT.dsi(32), sp=8) == pytest.approx(exact, rel=1e-12)
    assert SHORT.expected(SHORT.dsi(2), sp=8) > 1.01 * exact


@pytest.mark.parametrize("p", [0.05, 0.5, 0.93, 1.0])
@pytest.mark.parametrize(("tokens", "lookahead"), [(1, 3), (2, 1), (7, 3), (60, 8), (12, 40)])
def test_si_with_one_choice_is_si_with_a_chain(p: float, tokens: int, lookahead: int) -> None:
    latency = LatencyModel(20, 3, 50, 7)
    chain = float(theory.si(tokens, latency, p, lookahead))
    assert tree_theory.si(tokens, latency, (p,), lookahead, lookahead) == pytest.approx(chain, rel=1e-12)
    assert tree_theory.dsi(tokens, latency, (p,)) == pytest.approx(float(theory.dsi(tokens, latency, p, 1)), rel=1e-12)


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (7, 3), (31, 6), (63, 12)])
def test_best_round_adds_up(size: int, depth: int) -> None:
    drafted = tree_theory.best_round(CHANCES, size, depth)
    assert (drafted.nodes, drafted.levels) == (size, max(len(path) for path, _ in best_paths(CHANCES, size, depth)))
    assert drafted.chances.sum() == pytest.approx(1)
    assert drafted.accepted == pytest.approx(num_accepted(CHANCES, size, depth))
    assert (drafted.chances >= 0).all()


def test_best_round_of_choices_that_are_never_right_has_one_draft_token() -> None:
    case = replace(SHORT, chances=(Fraction(0), Fraction(0)), tokens=3)
    exact = tree_theory.si(3, case.latency, case.floats, 6, 3)
    assert exact == pytest.approx(case.expected(case.si()), rel=1e-12) == 2 * 1.25 + 1


def test_si_per_token_is_the_limit_of_long_texts() -> None:
    latency = LatencyModel(4.52, 0.115, by_width=H200_7B)
    limit = tree_theory.si_per_token(latency, CHANCES, 63, 6)
    assert tree_theory.si(3000, latency, CHANCES, 63, 6) / 3000 == pytest.approx(limit, rel=1e-3)
    chain = min(tree_theory.si_per_token(latency, CHANCES[:1], k, k) for k in range(1, 20))
    assert 1.7 < chain / min(tree_theory.si_per_token(latency, CHANCES, 127, depth) for depth in range(1, 13)) < 1.8


def simulated(config: SimulationConfig, algorithm: str, seeds: int) -> list[float]:
    return [config.run(algorithm, seed).ms for seed in range(seeds)]


@pytest.mark.parametrize(("p", "size", "depth"), [(0.63, 16, 4), (0.8, 31, 8), (0.4, 8, 3)])
def test_si_agrees_within_sampling_error_with_simulation_of_long_texts(p: float, size: int, depth: int) -> None:
    latency = LatencyModel(4.52, 0.2, 9.0, 0.5, by_width=H200_7B)
    chances = rank_chances(p, 0.5, 3)
    spec = SpecConfig(lookahead=depth, tree=size, chances=chances)
    times = simulated(SimulationConfig(latency, p, 1, 40, spec, runner_up_acceptance=0.5), "si", 40)
    exact = tree_theory.si(40, latency, chances, size, depth)
    assert abs(fmean(times) - exact) < 4 * stdev(times) / sqrt(len(times))


def test_dsi_with_trees_is_far_below_proposition_1_for_a_chain() -> None:
    """Simulated, 20 and 1 ms: no chain can be this fast, however many targets there are."""
    latency, tokens = LatencyModel(20, 1), 40
    spec = SpecConfig(lookahead=1, tree=32, chances=CHANCES)
    times = simulated(SimulationConfig(latency, 0.63, 24, tokens, spec, runner_up_acceptance=0.5), "dsi", 3)
    bound = tokens - 1 - 0.63 * (tokens - 1) + 1 + 0.63 * (tokens - 1) / 20  # Proposition 1, in target forwards
    assert 20 * bound == pytest.approx(float(theory.dsi(tokens, latency, 0.63, 1)))
    assert fmean(times) + 2 * stdev(times) / sqrt(len(times)) < 20 * bound / 1.5
    assert tree_theory.dsi(tokens, latency, CHANCES) < fmean(times)


def continue_paths(alternates: int, branches: int, most: int) -> Policy:
    """Continue all paths with so many unverified alternates, and verify whatever is new."""

    def policy(g: Generation) -> None:
        unverified: list[Node] = []
        leaves: list[tuple[Node, int]] = []
        live = [(g.root, 0)]
        while live:
            node, count = live.pop()
            first = node.drafted_by.get(DRAFTER)
            live += [(child, count + (token != first)) for token, child in node.children.items()]
            unverified += [node] if node.verifier is None else []
            if not node.children and count <= alternates and g.room(node):
                leaves.append((node, branches))
        if unverified:
            g.verify_tree(unverified)
        if leaves and not g.jobs.drafting(DRAFTER):
            assert len(leaves) <= most
            g.draft_tree(leaves, DRAFTER, SpecConfig(chances=(0.5, 0.25, 0.125)[:branches]))

    return policy


@pytest.mark.parametrize(("branches", "tokens"), [(2, 6), (3, 5)])
def test_dsi_with_alternates_agrees_with_every_course_of_short_texts(branches: int, tokens: int) -> None:
    """A verification ends just before a draft does: of two events at once the simulator takes the draft first."""
    chances = (Fraction(5, 10), Fraction(3, 10), Fraction(1, 10))[:branches]
    latency = LatencyModel(1 - Fraction(1, 10**9), Fraction(1, 3))
    case = Case(tokens, 1, 1, chances, latency)
    exact = float(tree_theory.dsi_with_alternates(tokens, latency, case.floats, 1))
    policy = continue_paths(1, branches, tree_theory.paths(latency, branches, 1))
    assert exact == pytest.approx(case.expected(policy, sp=30), rel=1e-8)
    assert exact > 1.005 * tree_theory.dsi(tokens, latency, case.floats)  # without the waits it would be wrong


@pytest.mark.parametrize("alternates", [1, 2])
def test_dsi_with_alternates_agrees_within_sampling_error_with_simulation(alternates: int) -> None:
    latency, chances, tokens = LatencyModel(8 - 1e-6, 1), (0.6, 0.3), 30
    policy = continue_paths(alternates, 2, tree_theory.paths(latency, 2, alternates))
    config = SimulationConfig(latency, 0.6, 20, tokens, runner_up_acceptance=0.75)
    times = [config.run(lambda *_: policy, seed).ms for seed in range(12)]
    exact = float(tree_theory.dsi_with_alternates(tokens, latency, chances, alternates))
    assert abs(fmean(times) - exact) < 3 * stdev(times) / sqrt(len(times)) < 0.15 * exact


def test_dsi_with_alternates_of_every_path_is_dsi() -> None:
    rates = np.array([0.0, 0.3, 0.63, 1.0])
    chances, latency = rank_chances(rates, 0.5, 3), LatencyModel(4, 1)  # type: ignore[arg-type]
    unlimited = tree_theory.dsi(12, latency, chances)
    times = [tree_theory.dsi_with_alternates(12, latency, chances, alternates) for alternates in (1, 2, 6)]
    assert times[-1] == pytest.approx(unlimited, rel=1e-12)
    assert (times[0] >= times[1] - 1e-12).all()
    assert (times[0] <= theory.dsi(12, latency, rates, 1) + 1e-12).all()
    assert (times[0] > unlimited + 0.1).tolist() == [True, True, True, False]
    alone = float(tree_theory.dsi_with_alternates(12, latency, CHANCES, 1))
    assert alone == pytest.approx(times[0][2], rel=1e-12)


def test_dsi_with_one_alternate_is_far_below_proposition_1_for_a_chain() -> None:
    """Exact, with 43 nodes a draft and 129 a verification: 4.38 against 8.03 ms a token of a long text."""
    latency = LatencyModel(20, 1)
    more = [float(tree_theory.dsi_with_alternates(tokens, latency, CHANCES, 1)) for tokens in (300, 400)]
    assert (more[1] - more[0]) / 100 == pytest.approx(4.383, abs=1e-3)
    assert (tree_theory.paths(latency, 3, 1), tree_theory.places(latency, 3)) == (43, 3**21)


def test_dsi_with_alternates_refuses_prefills_and_no_alternates() -> None:
    for latency, alternates in ((LatencyModel(20, 1, 30), 1), (LatencyModel(20, 1), 0)):
        with pytest.raises(ValueError, match=rf"{alternates} alternates, prefills of .*: must be at least 1, and none"):
            tree_theory.dsi_with_alternates(5, latency, CHANCES, alternates)


def test_si_refuses_a_drafter_slower_than_its_target() -> None:
    with pytest.raises(ValueError, match=r"the drafter takes 2: must not be more than the target's 1"):
        tree_theory.si(5, LatencyModel(1, 2), CHANCES, 8, 2)
