"""The search over deployments: on a number of processors, and on given devices."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dsi.core.spec import SpecConfig
from dsi.planning.latency import LatencyModel
from dsi.planning.search import (
    DeploymentPlan,
    PairProfile,
    count_candidates,
    explanation,
    ms_by_processors,
    plan_ms,
    predicted_plans,
    processor_candidates,
    search_devices,
    search_processors,
    sensitivities,
)

LATENCY = LatencyModel(20.0, 1.0, by_width=((1, 20.0), (64, 22.0)), cancel_points=8)
ONE_PROCESSOR = PairProfile({1: LATENCY}, {"match": 0.8})
SPLIT = ONE_PROCESSOR.split(1, 8, 0.8)
SEEDS = range(2000, 2004)


def test_predicted_plans_have_no_overlap_on_one_processor() -> None:
    assert {plan.algorithm for plan in predicted_plans(ONE_PROCESSOR, 1)} == {"nonsi", "si"}


def test_predicted_plans_give_si_every_processor_of_a_target() -> None:
    plans = predicted_plans(SPLIT, 4)
    assert {plan.mp for plan in plans if plan.algorithm == "si"} == {1, 2, 4}
    assert {plan.mp for plan in plans if plan.algorithm == "nonsi"} == {1, 2, 4}


@pytest.mark.slow
def test_search_processors_chooses_more_targets_without_tensor_parallelism() -> None:
    first, *others = search_processors(ONE_PROCESSOR, 8, seeds=SEEDS)
    assert first.algorithm == "dsi"
    assert first.sp > 1
    assert first.processors <= 8
    assert [plan.ms for plan in others] == sorted(plan.ms for plan in others)


@pytest.mark.slow
def test_search_processors_chooses_perfect_tensor_parallelism() -> None:
    """Eight processors make a forward as fast as two drafts: there is little left to hide."""
    assert search_processors(ONE_PROCESSOR.split(1, 8, 1.0), 8, seeds=SEEDS)[0].mp == 8


@pytest.mark.slow
def test_search_processors_leaves_plain_decoding_to_a_useless_drafter() -> None:
    latency = replace(LATENCY, drafter_ms=19.0, contention=0.3)
    [first, *_] = search_processors(PairProfile({1: latency}, {"match": 0.05}), 4, seeds=SEEDS)
    assert first.ms == pytest.approx(20.0, rel=0.01)


def test_processor_candidates_fit() -> None:
    for plan in processor_candidates(replace(SPLIT, drafter_processors=2), 7):
        assert plan.processors <= 7
        assert plan.processors >= plan.sp * plan.mp
    assert count_candidates(SPLIT, 8) == len(list(processor_candidates(SPLIT, 8)))


@pytest.mark.slow
def test_sensitivities_of_a_tree_are_simulated() -> None:
    """The forecast does not know trees: at a lower acceptance a tree loses less than a chain."""
    unsure = replace(ONE_PROCESSOR, acceptance={"match": 0.6}, runner_up_acceptance=0.6)
    plan = DeploymentPlan(SpecConfig("dsi", 1, 0, max_targets=4, tree=16), sp=4, processors=5)
    rows = {row.change: row for row in sensitivities(unsure, plan, 5)}
    lower, higher = rows["acceptance 0.1 lower"], rows["acceptance 0.1 higher"]
    assert plan_ms(plan, unsure) < lower.ms < 1.4 * higher.ms
    assert all(row.best.ms <= row.ms for row in rows.values())


def test_predicted_plans_choose_the_rule_that_accepts_more() -> None:
    both = replace(ONE_PROCESSOR, acceptance={"match": 0.6, "reject": 0.85})
    assert predicted_plans(both, 2)[0].spec.rule == "reject"


@pytest.mark.slow
def test_search_processors_chooses_the_best_drafter_or_both() -> None:
    """Together they take a processor each."""
    weak = replace(ONE_PROCESSOR, drafter="weak", acceptance={"match": 0.4})
    latency = {1: replace(LATENCY, drafter_ms=1.5)}
    strong = replace(ONE_PROCESSOR, drafter="strong", acceptance={"match": 0.7}, by_mp=latency)
    both = replace(strong, drafter="weak+strong", acceptance={"match": 0.95}, drafters=2, drafter_processors=2)
    few, many = (
        search_processors(replace(weak, alternatives=(strong, both)), number, seeds=SEEDS) for number in (2, 6)
    )
    assert few[0].drafter == "strong"
    assert {plan.drafter for plan in few if plan.algorithm == "dsi"} == {"weak", "strong"}
    assert many[0].drafter == "weak+strong"
    assert many[0].processors == many[0].sp + 2


@pytest.mark.slow
def test_sensitivities_follow_acceptance_and_drafter_speed() -> None:
    first = search_processors(ONE_PROCESSOR, 4, seeds=SEEDS)[0]
    lower, higher, fast, slow = sensitivities(ONE_PROCESSOR, first, 4)
    assert lower.ms > first.ms > higher.ms
    assert fast.ms < first.ms < slow.ms
    assert all(change.best.ms <= change.ms * 1.001 for change in (lower, higher, fast, slow))


def test_ms_by_processors_never_rises() -> None:
    lines = ms_by_processors(SPLIT, [1, 2, 4])
    for line in lines.values():
        times = [line[number] for number in sorted(line)]
        assert times == sorted(times, reverse=True)
    assert set(lines["dsi"]) == {2, 4}


def test_explanation_has_the_numbers() -> None:
    reasons = {plan.algorithm: explanation(plan, ONE_PROCESSOR) for plan in predicted_plans(ONE_PROCESSOR, 3)}
    assert reasons["nonsi"] == "a forward of 20.00 ms for each token"
    assert "guesses of 1.00 ms" in reasons["si"]
    assert "in flight" in reasons["dsi"]


@pytest.mark.parametrize(("processors", "sentence"), [(0, "0 processors"), (1001, "1001 processors")])
def test_predicted_plans_refuse_impossible_numbers(processors: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        predicted_plans(ONE_PROCESSOR, processors)


def test_predicted_plans_refuse_a_target_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 processors: one target needs 4"):
        predicted_plans(PairProfile({4: LATENCY}, {"match": 0.8}), 3)


def test_profile_split_scales_a_part_of_each_forward() -> None:
    profile = PairProfile({1: LatencyModel(20.0, 1.0, by_width=((1, 20.0),))}, {"match": 0.8}).split(2, 8, 0.5)
    assert {mp: latency.by_width for mp, latency in profile.by_mp.items()} == {
        2: ((1, 20.0),),
        4: ((1, 15.0),),
        8: ((1, 12.5),),
    }


def on_devices(target: float = 20.0, drafter: float = 1.0, wide: float = 22.0, slowdown: float = 1.0) -> LatencyModel:
    """Measured with up to seven targets, the last of which slow one another down."""
    return LatencyModel.measured(
        {1: target, 64: wide},
        drafter,
        by_busy_targets=((1, target), (7, target * slowdown)),
        cancel_points=6,
        drafter_cancel_points=1,
    )


@pytest.mark.slow
def test_search_devices_puts_dsi_first_without_contention() -> None:
    first, *others = search_devices(on_devices(), 0.8, 7)
    assert first.algorithm == "dsi"
    assert first.sp > 1
    assert [plan.ms for plan in others] == sorted(plan.ms for plan in others)
    assert first.ms < others[0].ms


def test_search_devices_leaves_plain_decoding_to_a_useless_drafter() -> None:
    """Where a wide forward costs as much as many narrow ones, drafting has no use."""
    first, *_ = search_devices(on_devices(drafter=19.0, wide=400.0), 0.05, 2)
    assert first.algorithm in ("nonsi", "dsi")
    assert first.ms == pytest.approx(20.0, rel=0.02)


@pytest.mark.slow
def test_search_devices_chooses_fewer_targets_under_contention() -> None:
    free, slowed = (search_devices(on_devices(slowdown=factor), 0.8, 7, tokens=40) for factor in (1.0, 6.0))
    degrees = [{plan.algorithm: plan for plan in plans}["dsi"].sp for plans in (free, slowed)]
    assert degrees[1] < degrees[0]


@pytest.mark.slow
def test_search_devices_gives_the_same_plans_with_a_pool() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert search_devices(on_devices(), 0.8, 2, map=pool.map) == search_devices(on_devices(), 0.8, 2)
