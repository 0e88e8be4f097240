"""Penalties, biases and bans of a request, beside transformers' processors and vLLM's formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dsi.core.messages import PENALTIES, Sampling
from dsi.models.protocol import ForwardRequest, SamplingModel
from dsi.sampling.penalties import apply_penalties

SIZE, PROMPT = 12, 3
TEXT = [3, 5, 7, 3, 5, 5, 9]
FIELDS: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "min_tokens": 2,
    "end_token_ids": (11,),
    "logit_bias": ((4, 2.5), (5, -100.0)),
    "bad_words": ((8,), (5, 9)),
    "allowed_token_ids": (1, 4, 5, 8, 9, 11),
}


def rows(start: int, text: list[int] = TEXT) -> np.ndarray:
    count = len(text) + 1 - start
    return np.random.default_rng(start).normal(size=(count, SIZE)).astype(np.float32)


def processed(start: int, **fields: Any) -> np.ndarray:
    return np.asarray(apply_penalties(rows(start), Sampling(**fields), TEXT, start, PROMPT))


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6)),
        ({"bad_words": ((8,), (9, 4), (5, 9))}, NoBadWordsLogitsProcessor([[8], [9, 4], [5, 9]])),
        ({"logit_bias": ((4, 2.5), (5, -100.0))}, SequenceBiasLogitsProcessor([[[4], 2.5], [[5], -100.0]])),
        (
            {"min_tokens": 2, "end_token_ids": (2, 11)},
            MinNewTokensLengthLogitsProcessor(PROMPT, 2, torch.tensor([2, 11])),
        ),
    ],
    ids=["repetition", "repetition below 1", "bad words", "logit bias", "min tokens"],
)
def test_penalties_are_transformers_processors(fields: dict[str, Any], processor: LogitsProcessor) -> None:
    found, logits = processed(PROMPT, **fields), rows(PROMPT)
    for i, row in enumerate(found, PROMPT):
        expected = processor(torch.tensor([TEXT[:i]]), torch.tensor(logits[i - PROMPT])[None].clone())
        assert row.tolist() == expected[0].tolist()


def test_presence_and_frequency_penalties_count_the_output() -> None:
    found = processed(PROMPT, presence_penalty=0.5, frequency_penalty=1.5)
    for i, (row, logits) in enumerate(zip(found, rows(PROMPT)), PROMPT):
        counts = np.bincount(TEXT[PROMPT:i], minlength=SIZE)
        assert row == pytest.approx(logits - 1.5 * counts - 0.5 * (counts > 0), abs=1e-6)
    assert found[0].tolist() == rows(PROMPT)[0].tolist()  # nothing was generated


def test_allowed_token_ids_leave_the_others_out() -> None:
    for row, logits in zip(processed(PROMPT, allowed_token_ids=(1, 9)), rows(PROMPT)):
        assert np.flatnonzero(row > -np.inf).tolist() == [1, 9]
        assert (row[[1, 9]] == logits[[1, 9]]).all()


def test_bad_words_look_at_the_output_only() -> None:
    """As in vLLM: a word that begins in the prompt is not the text's."""
    assert processed(PROMPT, bad_words=((7, 4),))[0].tolist() == rows(PROMPT)[0].tolist()


@given(st.integers(1, len(TEXT)), st.sets(st.sampled_from(PENALTIES)))
def test_each_row_depends_on_the_text_before_it_alone(start: int, names: set[str]) -> None:
    fields = {name: FIELDS[name] for name in names} | {"end_token_ids": (11,)}
    whole, logits = processed(start, **fields), rows(start)
    for i, row in enumerate(whole, start):
        alone = apply_penalties(logits[i - start : i - start + 1], Sampling(**fields), TEXT[:i], i, PROMPT)
        assert alone[0].tolist() == row.tolist()
    tensors = apply_penalties(torch.tensor(logits), Sampling(**fields), TEXT, start, PROMPT)
    np.testing.assert_allclose(tensors.numpy(), whole, atol=1e-6)
    assert (rows(start) == logits).all()  # the model's own are not written to


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"allowed_token_ids": (4,), "bad_words": ((4,),)}, [4]),
        ({"allowed_token_ids": (4, 6), "bad_words": ((4,),), "min_tokens": 9, "end_token_ids": (6,)}, [6]),
        ({"bad_words": tuple((i,) for i in range(SIZE))}, list(range(SIZE))),
        ({"allowed_token_ids": (SIZE + 1,)}, list(range(SIZE))),  # a drafter's vocabulary may be smaller
    ],
)
def test_ban_that_would_leave_no_token_is_not_applied(fields: dict[str, Any], left: list[int]) -> None:
    assert np.flatnonzero(processed(len(TEXT), **fields)[0] > -np.inf).tolist() == left


def test_tokens_beyond_a_smaller_vocabulary_are_skipped() -> None:
    sampling = Sampling(
        **{**FIELDS, "logit_bias": ((4, 1.0), (99, 1.0)), "bad_words": ((99,),), "end_token_ids": (99,)}
    )
    text = [*TEXT, 99]
    found = apply_penalties(rows(len(text), text), sampling, text, len(text), PROMPT)
    assert found.shape == (1, SIZE)


class Backend:
    def forward(self, tokens: Any, start: int, _: Any = None) -> Any:
        with torch.inference_mode():
            return torch.tensor(rows(start, list(tokens)))


def test_sampling_model_processes_what_it_samples_but_not_the_logprobs() -> None:
    sampling = Sampling(logprobs=SIZE, **FIELDS)
    request = ForwardRequest(TEXT, PROMPT, sampling=sampling, prompt_length=PROMPT)
    tokens, logprobs = SamplingModel(Backend()).answer_with_logprobs(request)
    expected = apply_penalties(rows(PROMPT), sampling, TEXT, PROMPT, PROMPT)
    assert tokens == tuple(expected.argmax(-1).tolist()) == SamplingModel(Backend()).answer(request)
    assert [top[0][0] for top in logprobs] == rows(PROMPT).argmax(-1).tolist()


def test_neutral_sampling_is_not_processed() -> None:
    sampling = Sampling(0.7, 5, 0.9, 0.1, 3, logprobs=2, end_token_ids=(1,))
    assert not sampling.has_penalties
    assert sampling.penalties == []
    for name in PENALTIES:
        changed = Sampling(**{name: FIELDS[name]})
        assert changed.has_penalties
        assert changed.penalties == [name]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty 0: must be a number above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5: must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty nan: must be between -2 and 2"),
        ({"min_tokens": -1}, "min_tokens -1: must be at least 0"),
        ({"logit_bias": ((7, 101.0),)}, "logit_bias 101.0 of token 7: must be between -100 and 100"),
        ({"bad_words": ((),)}, "bad_words: one of them has no token"),
        ({"allowed_token_ids": ()}, "allowed_token_ids: there must be at least 1"),
    ],
)
def test_sampling_refuses_values_out_of_bounds(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**fields)
