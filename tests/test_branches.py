"""Runner-ups: spare targets verify what follows them, in case the first choice is rejected."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from statistics import fmean

import pytest

from dsi.core.generation import Generation
from dsi.core.messages import DRAFTER, Draft, Drafted, Failed, Job, Sampling, Verified, Verify
from dsi.core.policies import distributed
from dsi.core.scheduler import Scheduler
from dsi.core.spec import SpecConfig
from dsi.paper.claims import bound
from dsi.planning.equation_1 import servers_needed
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

TARGET_MS, DRAFTER_MS, TOKENS = Fraction(10), Fraction(1), 60


def verifications(jobs: tuple[Job, ...]) -> list[tuple[tuple[int, ...], int, bool]]:
    return [(tuple(job.context), job.width, job.is_alternate) for job in jobs if isinstance(job, Verify)]


def open_draft(g: Generation) -> int:
    [id] = [job.id for job in g.jobs.open.values() if isinstance(job, Draft)]
    return id


def open_verification(g: Generation, *context: int) -> int:
    [id] = [job.id for job in g.jobs.open.values() if isinstance(job, Verify) and tuple(job.context) == context]
    return id


def drafted(g: Generation, token: int, *others: int) -> list[tuple[tuple[int, ...], int, bool]]:
    return verifications(g.handle(Drafted(open_draft(g), token, alternates=others)).start)


def test_alternates_verify_what_follows_an_accepted_runner_up() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=1))
    assert verifications(g.start().start) == [((7,), 1, False)]
    assert drafted(g, 1, 2) == [((7, 1), 1, False), ((7, 2), 1, True)]
    assert g.handle(Verified(open_verification(g, 7, 2), (5,))).emit == ()
    step = g.handle(Verified(open_verification(g, 7), (2,)))
    assert step.emit == (2, 5)
    assert verifications(step.start) == [((7, 2, 5), 1, False)]


def test_alternates_runner_up_that_became_the_root_is_verified_once() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=1))
    g.start()
    drafted(g, 1, 2)
    alternate = open_verification(g, 7, 2)
    step = g.handle(Verified(open_verification(g, 7), (2,)))
    assert (step.emit, step.promote, verifications(step.start)) == ((2,), (alternate,), [])
    assert drafted(g, 3, 4) == [((7, 2, 3), 1, False), ((7, 2, 4), 1, True)]


def test_alternates_use_no_more_than_the_spare_targets() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=1))
    g.start()
    assert drafted(g, 1, 2) == [((7, 1), 1, False), ((7, 2), 1, True)]
    assert drafted(g, 3, 4) == [((7, 1, 3), 1, False)]
    fallen = open_verification(g, 7, 2)
    step = g.handle(Verified(open_verification(g, 7), (1,)))
    assert fallen in step.cancel
    assert verifications(step.start) == [((7, 1, 4), 1, True)]


def test_alternates_come_after_the_block_they_belong_to() -> None:
    g = Generation((7,), 20, distributed(3, branches=2, spare_targets=9))
    g.start()
    assert drafted(g, 1, 2) == [((7, 2), 1, True)]  # the root is being verified
    assert drafted(g, 3, 4) == []
    block = ((7, 1, 3, 5), 3, False)
    assert drafted(g, 5, 6) == [block, ((7, 1, 4), 1, True), ((7, 1, 3, 6), 1, True)]


def test_alternates_repeat_a_failed_verification() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=1))
    g.start()
    drafted(g, 1, 2)
    assert verifications(g.handle(Failed(open_verification(g, 7, 2))).start) == [((7, 2), 1, True)]


def test_alternates_verify_nothing_after_a_stop_token() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=9), stop={2})
    g.start()
    assert drafted(g, 1, 2) == [((7, 1), 1, False)]


def test_alternates_run_last_until_promoted() -> None:
    g = Generation((7,), 20, distributed(1, branches=2, spare_targets=9))
    scheduler = Scheduler({"t": "target"})
    for step in (g.start(), g.handle(Drafted(open_draft(g), 1, alternates=(2,)))):
        for job in step.start:
            scheduler.enqueue(job)
    for job in g.handle(Drafted(open_draft(g), 3)).start:
        scheduler.enqueue(job)
    order = []
    for _ in range(4):
        order += [tuple(job.context) for _, job in scheduler.assign() if isinstance(job, Verify)]
        scheduler.release("t")
    assert order == [(7,), (7, 1), (7, 1, 3), (7, 2)]


def setting(
    acceptance: float, spare_targets: int, second_hit: float, lookahead: int, branches: int = 2
) -> SimulationConfig:
    """As many targets as one chain can ever want, and some to spare."""
    needed = servers_needed(TARGET_MS, DRAFTER_MS, lookahead) + 1
    return SimulationConfig(
        LatencyModel(TARGET_MS, DRAFTER_MS),
        acceptance,
        needed + spare_targets,
        TOKENS,
        runner_up_acceptance=second_hit,
        spec=SpecConfig(lookahead=lookahead, branches=branches, spare_targets=spare_targets),
    )


@cache
def times(what: SimulationConfig, seeds: int = 10) -> list[float]:
    return [what.run("dsi", seed).ms for seed in range(seeds)]


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("acceptance", [0.3, 0.63, 0.9])
def test_alternates_that_are_never_accepted_cost_no_time(acceptance: float, lookahead: int) -> None:
    chain = times(setting(acceptance, 0, 0.0, lookahead, branches=1))
    for spare_targets in (1, 4):
        assert times(setting(acceptance, spare_targets, 0.0, lookahead)) == chain


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("acceptance", [0.3, 0.63, 0.9])
def test_alternates_save_more_time_with_more_spare_targets(acceptance: float, lookahead: int) -> None:
    chain = times(setting(acceptance, 0, 0.0, lookahead, branches=1))
    few, many = (times(setting(acceptance, spare_targets, 1.0, lookahead)) for spare_targets in (1, 11))
    assert all(mine <= theirs for mine, theirs in zip(many, chain))  # on every path, not only on average
    assert fmean(many) < fmean(few) < fmean(chain)


@pytest.mark.slow
def test_alternates_beat_the_bound_of_proposition_1() -> None:
    """The bound has each rejection cost a target forward."""
    most = float(TARGET_MS) * bound(DRAFTER_MS / TARGET_MS, TOKENS, 0.5)
    chain, branched = (fmean(times(setting(0.5, 11, 1.0, 1, n), 50)) for n in (1, 2))
    assert chain == pytest.approx(most, rel=0.05)
    assert branched < 0.85 * most


def test_alternates_never_delay_a_root_verification() -> None:
    """Blocks queue for two targets all the time: alternates come after them."""
    scarce = SimulationConfig(
        LatencyModel(TARGET_MS, DRAFTER_MS), 1.0, 2, TOKENS, spec=SpecConfig(lookahead=1, branches=2, spare_targets=1)
    )
    assert times(scarce, 3) == times(scarce.with_spec(branches=1), 3)


@pytest.mark.parametrize("rule", ["reject", "block", "specinfer"])
def test_alternates_are_refused_by_rules_that_need_drafts(rule: str) -> None:
    g = Generation((7,), 20, distributed(1, branches=2), sampling=Sampling(1.0, rule=rule))
    with pytest.raises(ValueError, match=f"rule {rule} with 2 branches: .* use 1 branch, or the rule match"):
        g.start()
    Generation((7,), 20, distributed(1, branches=2), sampling=Sampling(0.0, rule=rule)).start()


def test_branches_refuse_impossible_numbers() -> None:
    for branches, spare_targets in ((0, 1), (2, -1)):
        with pytest.raises(ValueError, match="must be at least"):
            distributed(1, branches=branches, spare=spare_targets)
    possible = SimulationConfig(
        LatencyModel(10, 1), 0.5, 3, 9, runner_up_acceptance=0.5, spec=SpecConfig(branches=2, spare_targets=2)
    )
    for spec in ({"spare_targets": 3}, {"branches": 0}):
        with pytest.raises(ValueError, match="must be"):
            possible.with_spec(**spec)
    for rates in ({"runner_up_acceptance": 1.5}, {"no_runner_up_rate": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            replace(possible, **rates)  # type: ignore[arg-type]


def test_branches_ask_for_runner_ups_only_if_wanted() -> None:
    for branches in (1, 2):
        g = Generation((7,), 20, distributed(1, branches=branches, min_ratio=0.3))
        [job] = [job for job in g.start().start if isinstance(job, Draft)]
        assert (job.model, job.branches, job.min_ratio) == (DRAFTER, branches, 0.3)
