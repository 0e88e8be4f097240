from collections import Counter
from dataclasses import replace

import pytest

from dsi.experiments.records import record
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

SETTING = SimulationConfig(LatencyModel(20.0, 2.0), 0.7, sp=4, tokens=30)


@pytest.mark.parametrize("algorithm", ["nonsi", "si", "pearl", "dsi"])
@pytest.mark.parametrize("waited", [False, True])
def test_record_outcomes_add_up_to_the_tally(algorithm: str, waited: bool) -> None:
    drawn = record(SETTING, algorithm, seed=3, real_time=waited)
    counts = Counter(block.outcome for block in drawn.blocks)
    if not waited:  # on threads a cancelled forward may end either way
        tally = SETTING.run(algorithm, seed=3).completion.tally
        assert counts["verified"] == tally.useful
        assert counts["accepted"] == tally.accepted
    assert counts["verified"] >= 1
    assert len(drawn.times_ms) == 30
    assert drawn.label == ("waited" if waited else "simulated")


@pytest.mark.parametrize("algorithm", ["si", "pearl", "dsi"])
def test_record_verified_trees_are_the_useful_ones(algorithm: str) -> None:
    setting = replace(SETTING, runner_up_acceptance=0.5).with_spec(lookahead=2, tree=8)
    verifications = [block for block in record(setting, algorithm, seed=3).blocks if block.kind == "verify"]
    useful = setting.run(algorithm, seed=3).completion.tally.useful
    assert sum(block.outcome == "verified" for block in verifications) == useful
    assert min(block.place for block in verifications) == 0  # never before the text begins


@pytest.mark.parametrize("algorithm", ["si", "pearl", "dsi"])
@pytest.mark.parametrize("waited", [False, True])
def test_record_drafts_of_trees_are_accepted_where_the_text_took_a_token(algorithm: str, waited: bool) -> None:
    setting = replace(SETTING, acceptance=0.5, runner_up_acceptance=0.5).with_spec(lookahead=3, tree=8)
    drafts = [block for block in record(setting, algorithm, seed=3, real_time=waited).blocks if block.kind == "draft"]
    counts = Counter(block.outcome for block in drafts)
    if not waited:  # a level has at most one token of the text; on threads a cancelled forward may end either way
        assert counts["accepted"] == setting.run(algorithm, seed=3).completion.tally.accepted
    assert counts["accepted"] >= 1
    assert counts["rejected"] >= 1


def test_record_drafts_of_trees_are_all_accepted_if_every_first_choice_is_right() -> None:
    setting = replace(SETTING, acceptance=1.0).with_spec(lookahead=4, tree=8)
    drafts = [block for block in record(setting, "si", seed=3).blocks if block.kind == "draft"]
    assert {block.outcome for block in drafts} == {"accepted"}


def test_record_places_each_forward() -> None:
    drawn = record(replace(SETTING, acceptance=1.0).with_spec(lookahead=4), "si", seed=3)
    verifications = [(b.place, b.width) for b in drawn.blocks if b.kind == "verify"]
    assert verifications == [(place, 5) for place in range(0, 30, 5)]
    drafts = [b.place for b in drawn.blocks if b.kind == "draft"]
    assert drafts == [place for place in range(30) if place % 5 != 4]


def test_record_shows_prefills() -> None:
    drawn = record(SETTING.with_latency(target_ttft_ms=100.0), "dsi", seed=3)
    assert Counter(b.server for b in drawn.blocks if b.outcome == "prefilled").keys() == {
        "target-2",
        "target-3",
        "target-4",
    }
