"""What a target thinks of a text that is given."""

from itertools import count

import pytest

from dsi.core.messages import Failed, Sampling, Verified, Verify
from dsi.core.request import ScoreRequest
from dsi.core.scoring import Scoring

NOTES = (((2, -0.1),), ((3, -0.2),), ((9, -0.3),))


def scoring(prompt: tuple[int, ...] = (1, 2, 3)) -> Scoring:
    return Scoring(ScoreRequest(prompt, Sampling(logprobs=1)), count(5))


def test_one_forward_asks_about_every_place_and_names_the_token_that_stands_there() -> None:
    [job] = scoring().start().start
    assert isinstance(job, Verify)
    assert (job.id, tuple(job.context), job.width, job.lead) == (5, (1, 2, 3), 3, 0)
    assert job.draft_tokens == (((2, None),), ((3, None),), ())


def test_it_is_done_with_a_note_on_each_token_but_the_first() -> None:
    at = scoring()
    at.start()
    assert (at.done, at.finish_reason) == (False, None)
    step = at.handle(Verified(5, (2, 3, 9), NOTES))
    assert (step.emit, at.done, at.finish_reason) == ((), True, "length")
    assert at.top_logprobs == list(NOTES[:2])
    assert at.job(5) is None


def test_a_forward_that_fails_is_asked_for_again() -> None:
    at = scoring()
    at.start()
    [again] = at.handle(Failed(5)).start
    assert again.id == 6
    assert at.tally.failed == 1
    assert at.handle(Verified(5, (2, 3, 9), NOTES)).start == ()  # a late word of the first one
    at.handle(Verified(6, (2, 3, 9), NOTES))
    assert at.done


def test_stopping_it_cancels_its_forward() -> None:
    at = scoring()
    at.start()
    assert at.stop().cancel == (5,)
    assert at.finish_reason == "cancelled"


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty text"):
        scoring(())
