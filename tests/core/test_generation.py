"""One request as a scenario of events."""

import pytest

from dsi.core.generation import PREFILL_EVERY, Generation, Policy
from dsi.core.jobs import MAX_FAILURES
from dsi.core.messages import (
    DRAFTER,
    Draft,
    Drafted,
    Event,
    Failed,
    Job,
    Prefill,
    Prefilled,
    Sampling,
    Step,
    Verified,
    Verify,
)
from dsi.core.policies import Load, autoregressive, distributed, speculative, streamed

Brief = tuple[str, tuple[int, ...], int]


def brief(step: Step) -> list[Brief]:
    """The jobs of a step as (kind, text, count or width), without prefills."""
    return [summary(job) for job in step.start if not isinstance(job, Prefill)]


def summary(job: Job) -> Brief:
    if isinstance(job, Draft):
        return job.model, tuple(job.context), job.count
    assert isinstance(job, Verify)
    return "verify", tuple(job.context), job.width


class Scenario:
    """A generation, and the ids of its open jobs by what they ask."""

    def __init__(self, policy: Policy, tokens: int = 9, **options: object) -> None:
        self.g = Generation((7,), tokens, policy, **options)  # type: ignore[arg-type]
        self.started = brief(self.g.start())

    def id(self, *wanted: object) -> int:
        [id] = [job.id for job in self.g.jobs.open.values() if not isinstance(job, Prefill) and summary(job) == wanted]
        return id

    def drafting(self, model: str = DRAFTER) -> int:
        [id] = [job.id for job in self.g.jobs.open.values() if isinstance(job, Draft) and job.model == model]
        return id

    def handle(self, event: Event) -> tuple[tuple[int, ...], list[Brief]]:
        step = self.g.handle(event)
        return step.emit, brief(step)


def test_autoregressive_verifies_one_token_at_a_time() -> None:
    scenario = Scenario(autoregressive(), tokens=2)
    assert scenario.started == [("verify", (7,), 1)]
    assert scenario.handle(Verified(scenario.id("verify", (7,), 1), (3,))) == ((3,), [("verify", (7, 3), 1)])
    assert scenario.handle(Verified(scenario.id("verify", (7, 3), 1), (4,))) == ((4,), [])
    assert (scenario.g.done, scenario.g.finish_reason, scenario.g.jobs.open) == (True, "length", {})


def test_speculative_alternates_and_emits_the_targets_token() -> None:
    scenario = Scenario(speculative(2))
    assert scenario.started == [(DRAFTER, (7,), 2)]
    scenario.handle(Drafted(scenario.drafting(), 1))
    assert scenario.handle(Drafted(scenario.drafting(), 2)) == ((), [("verify", (7, 1, 2), 3)])
    verdict = Verified(scenario.id("verify", (7, 1, 2), 3), (1, 2, 3))
    assert scenario.handle(verdict) == ((1, 2, 3), [(DRAFTER, (7, 1, 2, 3), 2)])


def test_speculative_keeps_accepted_tokens_and_the_correction() -> None:
    scenario = Scenario(speculative(2))
    for token in (1, 2):
        scenario.handle(Drafted(scenario.drafting(), token))
    verdict = Verified(scenario.id("verify", (7, 1, 2), 3), (1, 9, 3))
    assert scenario.handle(verdict) == ((1, 9), [(DRAFTER, (7, 1, 9), 2)])
    assert (scenario.g.tally.drafted, scenario.g.tally.accepted, scenario.g.tally.exposed) == (2, 1, 1)


def test_generation_counts_the_correction_of_a_cut_block_as_corrected() -> None:
    scenario = Scenario(speculative(3), sampling=Sampling(1.0, rule="block"))
    for token in (1, 2, 3):
        scenario.handle(Drafted(scenario.drafting(), token))
    verdict = Verified(scenario.id("verify", (7, 1, 2, 3), 4), (1, 9))
    assert scenario.handle(verdict) == ((1, 9), [(DRAFTER, (7, 1, 9), 3)])
    assert (scenario.g.tally.drafted, scenario.g.tally.accepted, scenario.g.tally.exposed) == (3, 1, 1)


def test_distributed_drafts_during_verification() -> None:
    scenario = Scenario(distributed(2))
    assert scenario.started == [("verify", (7,), 1), (DRAFTER, (7,), 8)]
    assert scenario.handle(Drafted(scenario.drafting(), 1)) == ((), [])
    assert scenario.handle(Drafted(scenario.drafting(), 2)) == ((), [("verify", (7, 1, 2), 2)])
    assert scenario.handle(Drafted(scenario.drafting(), 3)) == ((), [])
    # The second verification answers first: its tokens wait until the root arrives.
    assert scenario.handle(Verified(scenario.id("verify", (7, 1, 2), 2), (2, 3))) == ((), [])
    assert scenario.handle(Verified(scenario.id("verify", (7,), 1), (1,))) == (
        (1, 2, 3),
        [("verify", (7, 1, 2, 3), 1)],
    )
    assert (scenario.g.tally.useful, scenario.g.tally.exposed, scenario.g.tally.accepted) == (2, 0, 3)


def test_generation_cancels_jobs_below_a_rejection() -> None:
    scenario = Scenario(distributed(1))
    drafting = scenario.drafting()
    scenario.handle(Drafted(drafting, 1))
    scenario.handle(Drafted(drafting, 2))
    deep = {scenario.id("verify", (7, 1), 1), scenario.id("verify", (7, 1, 2), 1), drafting}
    step = scenario.g.handle(Verified(scenario.id("verify", (7,), 1), (9,)))
    assert step.emit == (9,)
    assert set(step.cancel) == deep
    assert brief(step) == [("verify", (7, 9), 1), (DRAFTER, (7, 9), 7)]
    assert scenario.g.tally.abandoned == 2


def test_generation_ignores_a_late_answer() -> None:
    scenario = Scenario(distributed(1))
    drafting = scenario.drafting()
    scenario.handle(Drafted(drafting, 1))
    late = scenario.id("verify", (7, 1), 1)
    scenario.handle(Verified(scenario.id("verify", (7,), 1), (9,)))
    assert scenario.g.handle(Verified(late, (5,))) == Step()
    assert scenario.g.handle(Drafted(drafting, 5)) == Step()
    assert scenario.g.handle(Failed(late)) == Step()
    assert scenario.g.handle(Verified(10**6, (5,))) == Step()


def test_generation_does_not_wait_for_a_draft_of_a_verified_token() -> None:
    """A drafter slower than the target: the root passes the position it was drafting."""
    scenario = Scenario(distributed(1))
    drafting = scenario.drafting()
    step = scenario.g.handle(Verified(scenario.id("verify", (7,), 1), (1,)))
    assert (step.emit, step.cancel) == ((1,), (drafting,))
    assert brief(step) == [("verify", (7, 1), 1), (DRAFTER, (7, 1), 7)]


def test_generation_promotes_the_verification_of_a_new_root() -> None:
    scenario = Scenario(distributed(1))
    scenario.handle(Drafted(scenario.drafting(), 1))
    job = scenario.g.jobs.open[scenario.id("verify", (7, 1), 1)]
    assert isinstance(job, Verify)
    assert job.lead == 1
    step = scenario.g.handle(Verified(scenario.id("verify", (7,), 1), (1,)))
    assert step.promote == (job.id,)


@pytest.mark.parametrize(("position", "expected"), [(0, (5,)), (1, (1, 5)), (2, (1, 2, 5))])
def test_generation_ends_at_a_stop_token_inside_a_block(position: int, expected: tuple[int, ...]) -> None:
    scenario = Scenario(speculative(3), stop={5})
    target_tokens = [1, 2, 3, 4]
    target_tokens[position] = 5
    for token in (1, 2, 3):
        scenario.handle(Drafted(scenario.drafting(), token))
    assert scenario.handle(Verified(scenario.id("verify", (7, 1, 2, 3), 4), tuple(target_tokens))) == (expected, [])
    assert (scenario.g.done, scenario.g.finish_reason) == (True, "stop")


def test_generation_drafts_nothing_after_a_stop_token() -> None:
    scenario = Scenario(distributed(3), stop={5})
    drafting = scenario.drafting()
    step = scenario.g.handle(Drafted(drafting, 5))
    assert step.cancel == (drafting,)
    assert brief(step) == [("verify", (7, 5), 1)]  # no room for a full block: verified at once


def test_generation_ends_at_max_new_tokens_inside_a_block() -> None:
    scenario = Scenario(speculative(5), tokens=3)
    assert scenario.started == [(DRAFTER, (7,), 2)]  # the last token is always the target's
    for token in (1, 2):
        scenario.handle(Drafted(scenario.drafting(), token))
    assert scenario.handle(Verified(scenario.id("verify", (7, 1, 2), 3), (1, 2, 3))) == ((1, 2, 3), [])
    assert scenario.g.finish_reason == "length"


def test_generation_repeats_a_failed_verification() -> None:
    scenario = Scenario(distributed(2))
    failed = scenario.id("verify", (7,), 1)
    assert scenario.handle(Failed(failed, "its server died")) == ((), [("verify", (7,), 1)])
    assert scenario.id("verify", (7,), 1) != failed


def test_generation_resumes_a_failed_draft() -> None:
    scenario = Scenario(distributed(2))
    scenario.handle(Drafted(scenario.drafting(), 1))
    assert scenario.handle(Failed(scenario.drafting())) == ((), [(DRAFTER, (7, 1), 7)])


@pytest.mark.parametrize("policy", [speculative(2), distributed(2, min_draft=2)])
def test_generation_skips_a_failing_drafter_until_the_root_moves(policy: Policy) -> None:
    scenario = Scenario(policy)
    for _ in range(MAX_FAILURES - 1):
        assert scenario.handle(Failed(scenario.drafting()))[1] == [(DRAFTER, (7,), scenario.started[0][2])]
    assert scenario.handle(Failed(scenario.drafting())) == ((), [("verify", (7,), 1)])
    emitted, started = scenario.handle(Verified(scenario.id("verify", (7,), 1), (3,)))
    assert emitted == (3,)
    assert [kind for kind, *_ in started] == [DRAFTER]


def test_generation_refuses_an_answer_of_the_wrong_length() -> None:
    scenario = Scenario(autoregressive())
    with pytest.raises(ValueError, match="2 tokens in answer to 1 positions"):
        scenario.handle(Verified(scenario.id("verify", (7,), 1), (1, 2)))


def test_generation_stop_cancels_every_job() -> None:
    scenario = Scenario(distributed(1))
    scenario.handle(Drafted(scenario.drafting(), 1))
    open_jobs = set(scenario.g.jobs.open)
    step = scenario.g.stop()
    assert (set(step.cancel), step.start, step.emit) == (open_jobs, (), ())
    assert (scenario.g.done, scenario.g.finish_reason, scenario.g.jobs.open) == (True, "cancelled", {})


def test_generation_prefills_the_verified_text() -> None:
    g = Generation((7,), 100, distributed(1))
    [first] = [job for job in g.start().start if isinstance(job, Prefill)]
    assert tuple(first.context) == (7,)
    assert g.handle(Prefilled(first.id)) == Step()
    prefills = []
    for token in range(PREFILL_EVERY):
        [verification] = [job for job in g.jobs.open.values() if isinstance(job, Verify)]
        step = g.handle(Verified(verification.id, (token,)))
        prefills += [job for job in step.start if isinstance(job, Prefill)]
    assert [(job.id, len(job.context)) for job in prefills] == [(first.id, 1 + PREFILL_EVERY)]


def test_generation_passes_sampling_to_its_jobs() -> None:
    sampling = Sampling(temperature=0.7, seed=3)
    g = Generation((7,), 9, distributed(1), sampling=sampling)
    assert {job.sampling for job in g.start().start if not isinstance(job, Prefill)} == {sampling}


def test_generation_refuses_zero_new_tokens() -> None:
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        Generation((7,), 0, autoregressive())


def test_generation_frees_nodes_behind_the_root() -> None:
    g = Generation((7,), 50, autoregressive())
    g.start()
    for token in range(40):
        [verification] = g.jobs.open
        g.handle(Verified(verification, (token,)))
    assert (g.root.depth, g.root.parent, len(g.jobs.open)) == (40, None, 1)


def test_generation_closes_a_gap_before_covered_positions() -> None:
    scenario = Scenario(distributed(1))
    scenario.handle(Drafted(scenario.drafting(), 1))
    assert scenario.handle(Failed(scenario.id("verify", (7,), 1))) == ((), [("verify", (7,), 1)])
    scenario.handle(Verified(scenario.id("verify", (7, 1), 1), (2,)))
    assert scenario.handle(Verified(scenario.id("verify", (7,), 1), (1,)))[0] == (1, 2)


def test_generation_records_the_origin_of_each_token() -> None:
    scenario = Scenario(distributed(2), tokens=4)
    for token in (1, 2):
        scenario.handle(Drafted(scenario.drafting(), token))
    scenario.handle(Verified(scenario.id("verify", (7,), 1), (1,)))
    scenario.handle(Verified(scenario.id("verify", (7, 1, 2), 2), (5, 9)))  # 2 was wrong; what came after it is gone
    assert scenario.g.origins == ["accepted", "corrected"]
    scenario.handle(Verified(scenario.id("verify", (7, 1, 5), 1), (6,)))
    assert scenario.g.origins == ["accepted", "corrected", "plain"]


def test_generation_aligns_logprobs_with_tokens() -> None:
    scenario = Scenario(distributed(3), tokens=9, sampling=Sampling(logprobs=1))
    first = scenario.id("verify", (7,), 1)
    for token in (1, 2, 3):
        scenario.handle(Drafted(scenario.drafting(), token))
    deep = scenario.id("verify", (7, 1, 2, 3), 3)
    scenario.handle(Verified(deep, (2, 3, 4), (((2, -0.2),), ((3, -0.3),), ((4, -0.4),))))
    scenario.handle(Verified(first, (1,), (((1, -0.1),),)))
    assert scenario.g.top_logprobs == [((1, -0.1),), ((2, -0.2),), ((3, -0.3),), ((4, -0.4),)]


def test_generation_has_no_logprobs_unless_asked() -> None:
    scenario = Scenario(autoregressive())
    scenario.handle(Verified(scenario.id("verify", (7,), 1), (1,)))
    assert scenario.g.top_logprobs == []


def test_generation_aligns_logprobs_where_the_root_has_passed() -> None:
    g = Generation((7,), 9, lambda _: None, sampling=Sampling(logprobs=1))
    g.start()
    g.verify(g.tree.grow(g.root, 1, 1), 2)  # two positions, the first of which another verification covers as well
    wide = max(g.jobs.open)
    g.verify(g.root, 1)
    g.handle(Verified(max(g.jobs.open), (1,), (((1, -0.1),),)))
    assert g.handle(Verified(wide, (1, 5), (((1, -0.1),), ((5, -0.5),)))).emit == (5,)
    assert g.top_logprobs == [((1, -0.1),), ((5, -0.5),)]


def test_generation_room_ends_with_a_drafters_context() -> None:
    """The last token follows a text as long as the context."""
    g = Generation((7, 8, 9), 20, autoregressive(), drafter_contexts={"short": 5, "full": 2, "unlimited": 0})
    assert [g.room(g.root, name) for name in ("short", "full", "unlimited", "other")] == [3, 0, 19, 19]
    assert [g.in_context(name) for name in ("short", "full", "unlimited", "other")] == [True, False, True, True]
    assert g.usable(("full", "short")) == ["short"]
    assert g.usable(("full",)) == ("full",)


def test_autoregressive_streams_where_the_target_can() -> None:
    scenario = Scenario(autoregressive(), tokens=3, streams=True)
    assert scenario.started == [("target", (7,), 3)]
    stream = scenario.drafting("target")
    for token in (4, 5, 6):
        assert scenario.handle(Drafted(stream, token)) == ((token,), [])
    assert scenario.g.done
    assert scenario.g.origins == ["plain"] * 3
    assert (scenario.g.tally.forwards, scenario.g.tally.useful, scenario.g.tally.drafted) == (3, 3, 0)


def test_generation_ends_a_stream_at_a_stop_token() -> None:
    scenario = Scenario(autoregressive(), streams=True, stop={5})
    stream = scenario.drafting("target")
    scenario.handle(Drafted(stream, 4))
    step = scenario.g.handle(Drafted(stream, 5))
    assert (step.emit, step.cancel, scenario.g.finish_reason) == ((5,), (stream,), "stop")
    assert scenario.handle(Drafted(stream, 6)) == ((), [])


def test_generation_streams_again_where_a_stream_has_failed() -> None:
    scenario = Scenario(autoregressive(), streams=True)
    scenario.handle(Drafted(scenario.drafting("target"), 4))
    for _ in range(MAX_FAILURES - 1):
        assert scenario.handle(Failed(scenario.drafting("target"))) == ((), [("target", (7, 4), 8)])
    assert scenario.handle(Failed(scenario.drafting("target"))) == ((), [("verify", (7, 4), 1)])
    verified = Verified(scenario.id("verify", (7, 4), 1), (5,))
    assert scenario.handle(verified) == ((5,), [("target", (7, 4, 5), 7)])


def test_generation_drops_a_stream_that_verifications_have_overtaken() -> None:
    scenario = Scenario(distributed(2), streams=True)
    scenario.g.stream()
    [job] = scenario.g.replan().start
    assert summary(job) == ("target", (7,), 9)
    assert scenario.handle(Verified(scenario.id("verify", (7,), 1), (4,)))[0] == (4,)
    assert scenario.g.job(job.id) is None  # a new root is verified
    assert scenario.handle(Drafted(job.id, 9)) == ((), [])


def test_streamed_lets_targets_take_turns_beside_other_requests() -> None:
    load = Load(targets=1, requests=1)
    scenario = Scenario(streamed(load), streams=True)
    stream = scenario.drafting("target")
    assert scenario.handle(Drafted(stream, 4)) == ((4,), [])
    load.requests = 2
    step = scenario.g.handle(Drafted(stream, 5))
    assert (step.emit, brief(step), step.cancel) == ((5,), [("verify", (7, 4, 5), 1)], (stream,))


def test_generation_learns_from_a_failed_draft_only_where_it_could_stream() -> None:
    for streams in (True, False):
        scenario = Scenario(speculative(2), streams=streams)
        for _ in range(MAX_FAILURES):
            scenario.handle(Failed(scenario.drafting()))
        scenario.handle(Verified(scenario.id("verify", (7,), 1), (4,)))
        assert scenario.g.verified[0][0] == ({DRAFTER: -1} if streams else {})
