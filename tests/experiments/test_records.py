from collections import Counter
from dataclasses import replace

import pytest

from dsi.core.generation import Tally
from dsi.core.messages import TARGET, Draft, Drafted, DraftedBlock
from dsi.core.request import Completion
from dsi.core.sequence import TokenSequence
from dsi.experiments.records import Block, blocks, record
from dsi.fleets.spans import Span, span
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


PROMPT = TokenSequence.of((1, 2))
DONE = Completion((4, 5, 6, 7, 8), "length", (1, 3, 3, 3, 9), Tally())


def after(*tokens: int) -> TokenSequence:
    context = PROMPT
    for token in tokens:
        context = context.then(token)
    return context


@pytest.mark.parametrize(("model", "kind"), [(TARGET, "verify"), ("drafter", "draft")])
def test_span_of_a_block_covers_all_its_tokens(model: str, kind: str) -> None:
    job, context = Draft(3, PROMPT, 9, model), after(4)
    several = span("server", "role", job, context, 1, 4, DraftedBlock(3, (5, 6, 7)), num_texts=2)
    assert replace(several, context=context) == Span("server", "role", kind, 3, context, 3, 1, 4, token=5, num_texts=2)
    assert (tuple(several.context), several.context.origin) == ((1, 2, 4, 5, 6), PROMPT)
    one = span("server", "role", job, context, 1, 4, Drafted(3, 5))
    assert one == Span("server", "role", kind, 3, context, 1, 1, 4, token=5)
    cancelled = span("server", "role", job, context, 1, 4, None)
    assert cancelled == Span("server", "role", kind, 3, context, 1, 1, 4, stale=True)


def test_blocks_show_a_target_block_as_a_verification_of_its_width() -> None:
    stream = Draft(0, PROMPT, 5, TARGET)
    spans = [
        span("target-1", TARGET, stream, PROMPT, 0, 1, Drafted(0, 4)),
        span("target-1", TARGET, stream, after(4), 1, 3, DraftedBlock(0, (5, 6, 7)), num_texts=8),
        span("target-1", TARGET, stream, after(4, 5, 6, 7), 3, 9, DraftedBlock(0, (8, 9))),
        span("target-1", TARGET, stream, after(4, 5, 6, 7, 8), 9, 10, None),
        span("target-1", TARGET, Draft(1, after(4, 3), 9, TARGET), after(4, 3), 10, 12, DraftedBlock(1, (5, 6))),
    ]
    assert blocks(spans, DONE) == [
        Block("target-1", TARGET, "verify", "verified", 0, 1, place=0, width=1),
        Block("target-1", TARGET, "verify", "verified", 1, 3, place=1, width=3, num_texts=8),
        Block("target-1", TARGET, "verify", "verified", 3, 9, place=4, width=2),
        Block("target-1", TARGET, "verify", "stale", 9, 10, place=5, width=1),  # it was cancelled
        Block("target-1", TARGET, "verify", "stale", 10, 12, place=2, width=2),  # after another text
    ]


def test_blocks_show_a_drafter_block_as_accepted_where_its_first_token_is() -> None:
    draft = Draft(0, after(4), 3)
    events = (DraftedBlock(0, (5, 6, 7)), DraftedBlock(0, (5, 9, 7)), DraftedBlock(0, (9, 6, 7)), DraftedBlock(0, (5,)))
    spans = [span("drafter", "drafter", draft, after(4), i, i + 1, event) for i, event in enumerate(events)]
    assert blocks(spans, DONE) == [
        Block("drafter", "drafter", "draft", "accepted", 0, 1, place=1, width=3),
        Block("drafter", "drafter", "draft", "accepted", 1, 2, place=1, width=3),
        Block("drafter", "drafter", "draft", "rejected", 2, 3, place=1, width=3),
        Block("drafter", "drafter", "draft", "accepted", 3, 4, place=1, width=1),
    ]
