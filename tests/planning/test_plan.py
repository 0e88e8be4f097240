"""Every arrangement of the processors, the fastest first."""

from dataclasses import replace

import pytest

from dsi.planning.plan import Evidence, best, candidates, count, curve, offers, scaled, sensitivity, why

STEPS = ((1, 20.0), (64, 22.0))
LONE = Evidence({1: STEPS}, 1.0, {"match": 0.8})
WIDE = Evidence(scaled(STEPS, 1, 0.8, 8), 1.0, {"match": 0.8})


def test_one_processor_has_no_room_for_overlap() -> None:
    assert {offer.algorithm for offer in offers(LONE, 1)} == {"nonsi", "si"}


def test_where_models_cannot_take_turns_on_several_processors_si_has_one() -> None:
    found = offers(replace(WIDE, turns=False), 4)
    assert {offer.mp for offer in found if offer.algorithm == "si"} == {1}
    assert {offer.mp for offer in found if offer.algorithm == "nonsi"} == {1, 2, 4}


def test_without_tensor_parallelism_more_targets_pay() -> None:
    first, *others = best(LONE, 8)
    assert first.algorithm == "dsi"
    assert first.sp > 1
    assert first.processors <= 8
    assert [each.ms for each in others] == sorted(each.ms for each in others)


def test_perfect_tensor_parallelism_leaves_nothing_to_gain() -> None:
    """Eight processors make a forward as fast as two guesses: there is little left to hide."""
    perfect = replace(WIDE, by_mp=scaled(STEPS, 1, 1.0, 8))
    assert best(perfect, 8)[0].mp == 8


def test_a_useless_drafter_leaves_plain_decoding() -> None:
    [first, *_] = best(Evidence({1: STEPS}, 19.0, {"match": 0.05}, contention=0.3), 4)
    assert first.ms == pytest.approx(20.0, rel=0.01)


def test_no_arrangement_takes_more_than_there_is() -> None:
    for offer in candidates(replace(WIDE, drafter_processors=2), 7):
        assert offer.processors <= 7
        assert offer.processors >= offer.sp * offer.mp
    assert count(WIDE, 8) == len(list(candidates(WIDE, 8)))


def test_second_guesses_are_tried_where_they_may_be_right() -> None:
    doubtful = replace(LONE, rates={"match": 0.6})
    once, twice = best(doubtful, 5), best(replace(doubtful, second_hit=0.6), 5)
    assert all(offer.branches == 1 for offer in once)
    assert twice[0].branches == 2
    assert twice[0].ms < once[0].ms


def test_a_rule_that_accepts_more_is_chosen() -> None:
    both = replace(LONE, rates={"match": 0.6, "reject": 0.85})
    assert offers(both, 2)[0].rule == "reject"


def test_of_several_drafters_the_best_or_both() -> None:
    """Together they take a processor each."""
    weak = replace(LONE, name="weak", rates={"match": 0.4})
    strong = replace(LONE, name="strong", rates={"match": 0.7}, drafter_ms=1.5)
    both = replace(strong, name="weak+strong", rates={"match": 0.95}, drafters=2, drafter_processors=2)
    few, many = (best(replace(weak, others=(strong, both)), number) for number in (2, 6))
    assert few[0].drafter == "strong"
    assert {offer.drafter for offer in few if offer.algorithm == "dsi"} == {"weak", "strong"}
    assert many[0].drafter == "weak+strong"
    assert many[0].processors == many[0].sp + 2


def test_what_would_change_it() -> None:
    first = best(LONE, 4)[0]
    lower, higher, fast, slow = sensitivity(LONE, first, 4)
    assert lower.ms > first.ms > higher.ms
    assert fast.ms < first.ms < slow.ms
    assert all(change.better.ms <= change.ms * 1.001 for change in (lower, higher, fast, slow))


def test_more_processors_are_never_slower() -> None:
    lines = curve(WIDE, [1, 2, 4])
    for line in lines.values():
        times = [line[number] for number in sorted(line)]
        assert times == sorted(times, reverse=True)
    assert set(lines["dsi"]) == {2, 4}


def test_why_has_the_numbers_in_it() -> None:
    said = {offer.algorithm: why(offer, LONE) for offer in offers(LONE, 3)}
    assert said["nonsi"] == "a forward of 20.00 ms for each token"
    assert "guesses of 1.00 ms" in said["si"]
    assert "in flight" in said["dsi"]


@pytest.mark.parametrize(("processors", "sentence"), [(0, "0 processors"), (1001, "1001 processors")])
def test_bad_numbers(processors: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        offers(LONE, processors)


def test_a_target_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 processors: one target needs 4"):
        offers(Evidence({4: STEPS}, 1.0, {"match": 0.8}), 3)


def test_half_of_a_forward_that_scales() -> None:
    assert scaled(((1, 20.0),), 2, 0.5, 8) == {2: ((1, 20.0),), 4: ((1, 15.0),), 8: ((1, 12.5),)}
