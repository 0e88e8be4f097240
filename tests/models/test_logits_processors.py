"""Logits processors of transformers on the logits of a backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from dsi.core.messages import Sampling
from dsi.models.hf import Transformer
from dsi.models.logits_processors import LogitsProcessors, check_stateless, with_processing
from dsi.models.ngram import NGram
from dsi.models.protocol import ForwardRequest, SamplingModel
from sample_tokenizers import llama

TEXT = [3, 5, 7, 3, 5]


class Backend:
    """Rows of logits that a model in inference mode might give."""

    def forward(self, tokens: Any, start: int, _: Any = None) -> Tensor:
        with torch.inference_mode():
            return torch.stack([torch.arange(9.0) * (i % 3 + 1) for i in range(start, len(tokens) + 1)])


class InPlace(LogitsProcessor):  # type: ignore[misc]
    """Repeats the last token of the text, by writing to the logits."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 8] = -float("inf")
        scores[:, input_ids[0, -1]] = 100.0
        return scores


class Counting(LogitsProcessor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Noisy(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class Memoising(LogitsProcessor):  # type: ignore[misc]
    """Keeps what it has computed, which changes nothing for a text it has seen."""

    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = self.seen.setdefault(tuple(input_ids[0].tolist()), int(input_ids[0, -1]))
        scores[:, last] = 0.0
        return scores


def test_processors_see_each_row_with_the_text_before_it() -> None:
    processors = [RepetitionPenaltyLogitsProcessor(2.0), NoRepeatNGramLogitsProcessor(2)]
    logits = Backend().forward(TEXT, 2)
    rows = LogitsProcessors(processors)(logits, TEXT, 2)
    for i, row in enumerate(rows):
        alone = LogitsProcessors(processors)(logits[i : i + 1], TEXT[: 2 + i], 2 + i)
        assert torch.equal(alone[0], row)
    assert rows[-1][7] == -float("inf")  # 5 7 has been there
    assert rows[0][7] == logits[0][7]


def test_processors_see_the_padding_before_a_text() -> None:
    rows = LogitsProcessors([RepetitionPenaltyLogitsProcessor(2.0)], (1, 1))(torch.ones(1, 9), [3], 1)
    assert rows.tolist() == [[1, 0.5, 1, 0.5, 1, 1, 1, 1, 1]]


def test_processors_may_write_to_the_logits() -> None:
    logits = Backend().forward(TEXT, 4)
    assert SamplingModel(Backend(), LogitsProcessors([InPlace()])).answer(ForwardRequest(TEXT, 4)) == (3, 5)
    assert torch.equal(Backend().forward(TEXT, 4), logits)


def test_sampling_model_reports_the_logprobs_of_the_model_itself() -> None:
    request = ForwardRequest([3, 5], 2, sampling=Sampling(logprobs=2))
    tokens, logprobs = SamplingModel(Backend(), LogitsProcessors([InPlace()])).answer_with_logprobs(request)
    assert tokens == (5,)
    assert [token for token, _ in logprobs[0]] == [8, 7, 5]


def test_sampling_model_prefills_without_processors() -> None:
    model = SamplingModel(Transformer(llama("characters")), LogitsProcessors([InPlace()]))
    assert model.answer(ForwardRequest([3, 5], 3)) == ()


def test_with_processing_leaves_a_lookup_alone() -> None:
    process = LogitsProcessors([InPlace()])
    assert with_processing(NGram(), process) == NGram()
    assert with_processing(SamplingModel(Backend()), process).process is process  # type: ignore[attr-defined]


def counting_function() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def process(_: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return scores

    return process


@pytest.mark.parametrize(
    ("processor", "name"), [(Counting(), "Counting"), (Noisy(), "Noisy"), (counting_function(), "process")]
)
def test_check_stateless_refuses_what_does_not_depend_on_the_text_alone(processor: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"the logits processor {name} keeps a state"):
        check_stateless([processor], torch.tensor([TEXT]), 9)


def test_check_stateless_accepts_functions_of_the_text() -> None:
    processors = [InPlace(), Memoising(), lambda _, scores: scores * 2, RepetitionPenaltyLogitsProcessor(2.0)]
    check_stateless(processors, torch.tensor([TEXT]), 9)
