"""What the overlap did, in numbers that can be checked by hand: target 20, drafter 2, whole virtual time."""

from dataclasses import replace

import pytest

from dsi.core.generation import Policy, Tally
from dsi.core.messages import Drafted, DraftedBlock, DraftedLevel, Failed, Prefilled, Sampling, Time, Verified
from dsi.core.policies import autoregressive, distributed, pearl, speculative
from dsi.core.request import Request, ScoreRequest
from dsi.core.spec import SpecConfig
from dsi.core.stats import Overlap, RejectionCost, ServerTime, ServerUsage, num_forwards, overlap
from dsi.fleets.loop import EngineLoop
from dsi.fleets.spans import Span
from dsi.fleets.threads import ThreadFleet
from dsi.planning.latency import LatencyModel
from dsi.planning.simulation import SimulationConfig

# Every draft token is right but those of tokens 5 and 9; there are more targets than DSI can use.
SETTING = SimulationConfig(LatencyModel(20, 2), 1.0, 12, 20, rejected_positions=frozenset({5, 9}))


def done(policy: Policy, setting: SimulationConfig = SETTING) -> Overlap:
    [text] = EngineLoop(setting.simulated(0)).run(Request((1, 2, 3), setting.tokens, policy))
    assert text.overlap is not None
    return text.overlap


def busy(stats: Overlap) -> dict[str, Time]:
    return {each.server: each.busy for each in stats.servers or ()}


def test_overlap_of_autoregressive_is_none() -> None:
    stats = done(autoregressive(), replace(SETTING, sp=2))
    assert (stats.hidden, stats.lead, stats.wasted_drafts, stats.wasted_forwards) == (0, 0, 0, 0)
    assert (stats.target_time, stats.drafter_time, stats.elapsed) == (20, None, 400)
    assert (stats.losses, stats.lost, stats.gap) == ((), 0, 1.0)
    assert busy(stats) == {"target-1": 400, "target-2": 0, "drafter": 0}
    assert [each.idle_share for each in stats.servers or ()] == [0.0, 1.0, 1.0]


def test_overlap_of_distributed_loses_one_forward_less_a_draft_per_rejection() -> None:
    """Tokens at 20, 22, ... 30; the sixth is put right, so the next comes at 50; likewise the tenth."""
    stats = done(distributed(1))
    assert stats.losses == (RejectionCost(5, 30, 18), RejectionCost(9, 56, 18))
    assert (stats.target_time, stats.drafter_time) == (20, 2)
    assert (stats.elapsed, stats.ideal, stats.gap) == (94, 17 * 2 + 3 * 20, 1.0)
    assert stats.hidden == 17 / 20  # one forward for each token, and three tokens that nobody had drafted


def test_overlap_min_draft_adds_to_the_cost_of_a_rejection() -> None:
    stats = done(distributed(1, min_draft=3))
    assert [loss.lost for loss in stats.losses] == [18 + 3 * 2] * 2
    assert stats.lost == 48


def test_overlap_of_speculative_is_none() -> None:
    """Blocks of 26: three draft tokens and a forward; the last has room for one draft token."""
    stats = done(speculative(3))
    assert (stats.hidden, stats.lead, stats.wasted_drafts, stats.wasted_forwards) == (0, 0, 2, 0)
    assert stats.losses == (RejectionCost(5, 52, 26 - 2),)  # token 9 is the target's own, after a block
    assert busy(stats)["target-1"] == 6 * 20
    assert busy(stats)["drafter"] == 16 * 2
    assert (stats.elapsed, stats.ideal) == (5 * 26 + 22, 14 * 2 + 6 * 20)
    assert stats.gap == 152 / 148


def test_overlap_of_pearl_is_in_between() -> None:
    stats = done(pearl(10))
    assert 0 < stats.hidden < done(distributed(1)).hidden
    assert stats.gap == 120 / 94
    assert stats.lost == 2 * 18


def test_overlap_lead_counts_draft_tokens_ahead() -> None:
    """All right, and a target ten times as slow: at 20 there are 10 draft tokens, of which one is verified now."""
    setting = replace(SETTING, rejected_positions=frozenset(), tokens=12)
    assert done(distributed(1), setting).lead == (9 + sum(range(10))) / 11  # 9, 9, 8, ... 0
    assert done(distributed(1, max_lead=4), setting).lead < 4


@pytest.mark.parametrize("policy", [autoregressive(), speculative(3), pearl(10), distributed(1), distributed(4)])
@pytest.mark.parametrize("pieces", [0, 4])
def test_overlap_busy_time_is_that_of_forwards(policy: Policy, pieces: int) -> None:
    log: list[Span] = []
    fleet = replace(SETTING, sp=4).with_latency(cancel_points=pieces).simulated(0, log)
    [text] = EngineLoop(fleet).run(Request((1, 2, 3), 20, policy))
    assert text.overlap is not None
    fleet.close()  # so that what it was at is written down
    for each in text.overlap.servers or ():
        assert each.busy + each.idle == text.elapsed
        mine = [span for span in log if span.server == each.server]
        assert each.busy == sum(min(span.end, text.elapsed) - span.start for span in mine)


def test_overlap_counts_no_forward_twice() -> None:
    """Forwards that cannot be stopped go on after the end of the request that wanted them."""
    fleet = replace(SETTING, sp=4).with_latency(cancel_points=1).simulated(0)
    loop = EngineLoop(fleet)
    stats = [loop.run(Request((1, 2, i), 20, distributed(1)))[0].overlap for i in range(3)]
    assert all(each is not None and each.servers is not None for each in stats)
    total = {name: sum(busy(each)[name] for each in stats if each) for name in fleet.busy}
    fleet.close()
    assert total == fleet.busy


def test_overlap_counts_a_prefill_only_with_an_answer() -> None:
    """The first target answers at 50; the second reads the prompt meanwhile, and is never asked."""
    setting = SimulationConfig(LatencyModel(20, 2, target_ttft_ms=50), 1.0, 2, 4, spec=SpecConfig(lookahead=5))
    [text] = EngineLoop(setting.simulated(0)).run(Request((1, 2, 3), 4, distributed(5)))
    assert text.overlap is not None
    assert busy(text.overlap)["target-2"] == 30 + 20
    assert text.overlap.target_time == (50 + 20) / 2


def test_overlap_has_no_server_times_where_requests_share() -> None:
    loop = EngineLoop(SETTING.simulated(0))
    together = [each.overlap for each in loop.run(*(Request((1, i), 20, distributed(2)) for i in range(2)))]
    assert [each and each.servers for each in together] == [None, None]
    assert [each and each.json(1)["idle_share"] for each in together] == [None, None]
    [after] = loop.run(Request((1, 5), 20, distributed(2)))
    assert after.overlap is not None
    assert after.overlap.servers is not None


def test_overlap_of_a_score_request_has_no_ideal() -> None:
    [text] = EngineLoop(SETTING.simulated(0)).run(ScoreRequest((1, 2, 3), Sampling(logprobs=1)))
    assert text.overlap is not None
    assert (text.overlap.ideal, text.overlap.gap, text.overlap.lead) == (None, None, 0)


def test_overlap_of_a_cancelled_request_ends_there() -> None:
    loop = EngineLoop(SETTING.simulated(0))
    run = loop.submit(Request((1, 2, 3), 1000, autoregressive()))
    while len(run.tokens) < 5:
        loop.step()
    assert run.overlap.elapsed == 100
    loop.step()
    loop.cancel(run)
    stats = run.completion().overlap
    assert stats is not None
    assert (stats.elapsed, busy(stats)["target-1"]) == (120, 120)


def test_overlap_is_measured_on_threads() -> None:
    fleet = ThreadFleet(replace(SETTING, sp=2, tokens=8).servers(0, 1000))
    try:
        [text] = EngineLoop(fleet).run(Request((1, 2, 3), 8, speculative(3)))
    finally:
        fleet.close()
    stats = text.overlap
    assert stats is not None
    assert (stats.target_time or 0) >= 0.019
    assert (stats.drafter_time or 0) >= 0.0019
    assert busy(stats)["target-2"] == 0
    assert 0 < busy(stats)["target-1"] < text.elapsed


def test_overlap_json_is_in_milliseconds() -> None:
    figures = done(distributed(1), replace(SETTING, sp=11)).json(1)
    assert figures.pop("idle_share").keys() == {*(f"target-{i}" for i in range(1, 12)), "drafter"}
    assert figures == {
        "hidden_share": 0.85,
        "drafter_lead": pytest.approx(5.684, abs=1e-3),
        "wasted_drafts": 20,
        "wasted_forwards": 20,
        "target_ms": 20.0,
        "drafter_ms": 2.0,
        "rejections": 2,
        "lost_to_rejections_ms": 36.0,
        "lost_per_rejection_ms": 18.0,
        "ideal_ms": 94.0,
        "time_over_ideal": 1.0,
    }
    assert done(autoregressive()).json()["ideal_ms"] == 400_000


def of(
    times: tuple[Time, ...], origins: tuple[str, ...], took: Time, **tolls: tuple[ServerUsage, ServerUsage]
) -> Overlap:
    before = {name: first for name, (first, _) in tolls.items()}
    after = {name: last for name, (_, last) in tolls.items()}
    return overlap(times, origins, Tally(), (), before, after, took, alone=True)


def test_overlap_counts_only_usage_in_between() -> None:
    stats = of(
        (10, 16),
        ("plain", "accepted"),
        20,
        target=(ServerUsage("target", 100, 9, 90), ServerUsage("target", 115, 11, 104)),
        other=(ServerUsage("drafter", 5, 2, 5), ServerUsage("drafter", 13, 6, 11)),
    )
    assert (stats.target_time, stats.drafter_time) == (7, 1.5)
    assert stats.servers == (ServerTime("target", "target", 15, 5), ServerTime("other", "drafter", 8, 12))
    assert stats.ideal == 8.5


def test_overlap_of_a_server_added_later() -> None:
    stats = overlap((), (), Tally(), (), {}, {"new": ServerUsage("target", 4, 1, 4)}, 10, alone=True)
    assert stats.servers == (ServerTime("new", "target", 4, 6),)


def test_overlap_ideal_needs_measured_latencies() -> None:
    assert of((10,), ("accepted",), 10).ideal is None
    assert of((10,), ("plain",), 10).ideal is None


def test_overlap_rejection_with_a_known_next_token_costs_nothing() -> None:
    drafts = ServerUsage("drafter"), ServerUsage("drafter", 4, 2, 4)
    stats = of((10, 10, 30), ("corrected", "accepted", "corrected"), 30, drafter=drafts)
    assert [loss.lost for loss in stats.losses] == [0, 0]


@pytest.mark.parametrize(
    ("times", "origins", "took", "sentence"),
    [
        ((1, 2), ("plain",), 5, "2 times and 1 origins: each token has one of both"),
        ((1, 7), ("plain", "plain"), 5, "a last token at 7 of 5: must be within"),
        ((), (), -1, "a last token at 0 of -1: must be within"),
    ],
)
def test_overlap_refuses_impossible_times(
    times: tuple[Time, ...], origins: tuple[str, ...], took: Time, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        of(times, origins, took)


def test_num_forwards_is_one_for_each_token_of_a_block() -> None:
    blocks = DraftedBlock(0, (4,)), DraftedBlock(0, (4, 5, 6))
    assert [num_forwards(event) for event in (Drafted(0, 4), *blocks, DraftedLevel(0, ((4, 5), (6,))))] == [1, 1, 3, 1]
    assert [num_forwards(event) for event in (Verified(0, (4, 5)), Prefilled(0), Failed(0), None)] == [1, 0, 0, 0]


def test_server_usage_counts_the_forwards_of_a_block() -> None:
    usage = ServerUsage("target")
    usage.end(10, 20, Verified(0, (3, 4)))
    usage.end(20, 50, DraftedBlock(1, (5, 6, 7)))
    usage.end(50, 55, None)
    assert usage == ServerUsage("target", busy=45, forwards=4, answer_time=40, since=55)
    stats = of((10, 40), ("plain", "plain"), 45, target=(ServerUsage("target"), usage))
    assert stats.target_time == 10
