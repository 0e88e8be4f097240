"""Requests that one forward of the target answers."""

from itertools import count

import pytest

from dsi.core.messages import Failed, Sampling, Verified, Verify
from dsi.core.request import ScoreRequest, VerifyRequest
from dsi.core.sequence import TokenSequence
from dsi.core.single_forward import Scoring, Verification

NOTES = (((2, -0.1),), ((3, -0.2),), ((9, -0.3),))


def scoring(prompt: tuple[int, ...] = (1, 2, 3)) -> Scoring:
    return Scoring(ScoreRequest(prompt, Sampling(logprobs=1)), count(5))


def test_scoring_verifies_every_position_in_one_forward() -> None:
    [job] = scoring().start().start
    assert isinstance(job, Verify)
    assert (job.id, tuple(job.context), job.width, job.lead) == (5, (1, 2, 3), 3, 0)
    assert job.draft_tokens == (((2, None),), ((3, None),), ())


def test_scoring_ends_with_logprobs_of_each_token_but_the_first() -> None:
    at = scoring()
    at.start()
    assert (at.done, at.finish_reason) == (False, None)
    step = at.handle(Verified(5, (2, 3, 9), NOTES))
    assert (step.emit, at.done, at.finish_reason) == ((), True, "length")
    assert at.top_logprobs == list(NOTES[:2])
    assert at.job(5) is None


def test_scoring_repeats_a_failed_forward() -> None:
    at = scoring()
    at.start()
    [again] = at.handle(Failed(5)).start
    assert again.id == 6
    assert at.tally.failed == 1
    assert at.handle(Verified(5, (2, 3, 9), NOTES)).start == ()  # a late word of the first one
    at.handle(Verified(6, (2, 3, 9), NOTES))
    assert at.done


def test_scoring_stop_cancels_its_forward() -> None:
    at = scoring()
    at.start()
    assert at.stop().cancel == (5,)
    assert at.finish_reason == "cancelled"


def test_score_request_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="an empty text"):
        scoring(())


def verification(num_positions: int = 2) -> Verification:
    context = TokenSequence.of((1, 2)).then(3).then(4)
    return Verification(VerifyRequest(context, num_positions, Sampling(seed=7)), count(5))


def test_verification_is_one_job_that_may_share_forwards() -> None:
    [job] = verification().start().start
    assert isinstance(job, Verify)
    assert (tuple(job.context), tuple(job.context.origin), job.width, job.lead) == ((1, 2, 3, 4), (1, 2), 2, 0)
    assert (job.sampling.seed, job.alone) == (7, True)


def test_verification_emits_a_token_for_each_position() -> None:
    at = verification()
    at.start()
    step = at.handle(Verified(5, (4, 9)))
    assert (step.emit, at.done, at.origins) == ((4, 9), True, ["plain", "plain"])


def test_verification_repeats_a_failed_forward_and_can_be_stopped() -> None:
    at = verification()
    at.start()
    [again] = at.handle(Failed(5)).start
    assert at.stop().cancel == (again.id,)
    assert (at.finish_reason, at.handle(Verified(again.id, (4, 9))).emit) == ("cancelled", ())


@pytest.mark.parametrize("num_positions", [0, 5])
def test_verify_request_refuses_positions_that_the_text_does_not_have(num_positions: int) -> None:
    with pytest.raises(ValueError, match=f"num_positions {num_positions}: must be at least 1 and at most 4"):
        verification(num_positions)
