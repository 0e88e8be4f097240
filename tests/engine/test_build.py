"""Models in this process, and the cores of servers."""

import re

import pytest
import torch

from dsi.engine.build_processes import assign_cores, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.models.protocol import ForwardRequest


def test_local_model_has_its_threads_and_an_empty_cache() -> None:
    threads = torch.get_num_threads()
    stages: list[str] = []
    pair = load_model_pair(EngineConfig(threads=1), stages.append)
    names = list(dict.fromkeys(stage.partition(":")[0] for stage in stages))
    assert [name.split(", ")[0] for name in names] == ["loading target builtin", "loading drafter builtin"]
    assert re.fullmatch(r"loading target builtin, 0\.\d GB, float32", names[0])
    first = pair.target.fresh().answer(ForwardRequest([1, 5, 9], 3))
    assert len(pair.target.backend._sequences) == 1
    assert pair.target.fresh().answer(ForwardRequest([1, 5, 9], 3)) == first
    pair.target.fresh()
    assert (pair.target.backend._sequences, torch.get_num_threads(), pair.context) == ([], 1, 512)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"drafter": "ngram"}, "ngram: is no model"),
        ({"target": "nowhere/at/all/"}, "there is no such model folder"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32 or bfloat16"),
        ({"threads": 0}, "threads 0: must be at least 1"),
    ],
)
def test_load_model_pair_refuses_what_cannot_be_loaded(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_model_pair(EngineConfig(**fields))  # type: ignore[arg-type]


def test_assign_cores_gives_each_server_its_own() -> None:
    assert assign_cores(1, ["d"], [0, 1]) == {"target-1": [0], "d": [1]}
    assert assign_cores(2, ["d", "e"], [0, 1, 2, 3, 4]) == {"target-1": [0, 2], "target-2": [1, 3], "d": [4], "e": [4]}
    assert assign_cores(3, ["d"], [0, 1]) == {"target-1": [0], "target-2": [0], "target-3": [0], "d": [1]}
    assert assign_cores(1, ["d"], [7]) == {"target-1": [7], "d": [7]}
