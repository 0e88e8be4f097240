"""Models that stand alone."""

import pytest
import torch

from dsi.engine.build import load_apart
from dsi.models.protocol import ForwardRequest


def test_a_model_alone_has_its_threads_and_remembers_nothing() -> None:
    threads = torch.get_num_threads()
    pair = load_apart("builtin", "builtin", threads=1)
    first = pair.target.fresh().answer(ForwardRequest([1, 5, 9], 3))
    assert len(pair.target.backend._slots) == 1
    assert pair.target.fresh().answer(ForwardRequest([1, 5, 9], 3)) == first
    pair.target.fresh()
    assert (pair.target.backend._slots, torch.get_num_threads(), pair.context) == ([], 1, 512)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafter": "ngram"}, "ngram: is no model"),
        ({"target": "nowhere/at/all/"}, "there is no such model folder"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32 or bfloat16"),
        ({"threads": 0}, "threads 0: must be at least 1"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_apart(**{"target": "builtin", "drafter": "builtin"} | options)  # type: ignore[arg-type]
