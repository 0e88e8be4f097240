"""Models in this process, and the cores of servers."""

import re

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dsi.engine.build_processes import assign_cores, load_model_pair
from dsi.engine.config import EngineConfig
from dsi.engine.engine import Engine
from dsi.models.names import model_path
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
    assert (pair.target.backend._sequences, torch.get_num_threads(), pair.context) == ({}, 1, 512)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"drafter": "ngram"}, "ngram: is no model"),
        ({"target": "nowhere/at/all/"}, "there is no such model folder"),
        ({"dtype": "int4"}, "dtype 'int4': must be float32, bfloat16 or int8"),
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


def test_engine_on_compiled_forwards_is_exact() -> None:
    with Engine.load(dtype="bfloat16", exact=True) as engine:
        assert (engine.deployment.exact, engine.deployment.warnings) == (True, ())


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose forwards are not compiled as a whole."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin", "target"))
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_engine_on_other_forwards_says_that_texts_may_part(gpt2_folder: str) -> None:
    sentence = f"{gpt2_folder}: its forwards here depend on how many tokens they compute"
    parting = "texts may part where two scores nearly tie"
    for options, expected in (
        ({"dtype": "bfloat16"}, (f"{sentence}; in bfloat16 {parting}",)),
        ({"dtype": "bfloat16", "exact": False}, ()),
        ({}, ()),
    ):
        with Engine.load(gpt2_folder, drafter="ngram", **options) as engine:
            assert (engine.deployment.exact, engine.deployment.warnings) == (False, expected)
    with pytest.raises(ValueError, match=r"exact: .*leave it out"):
        Engine.load(gpt2_folder, drafter="ngram", exact=True)


def test_engine_on_devices_is_exact_if_asked() -> None:
    placed = {"target_devices": "cpu,cpu,cpu", "dtype": "bfloat16", "sp": 2}
    with Engine.load(**placed) as engine:  # type: ignore[arg-type]
        [warning] = engine.deployment.warnings
        assert re.fullmatch(r"in bfloat16 texts may part .* with --exact .* takes \d+% longer", warning)
    with Engine.load(**placed, exact=True) as engine:  # type: ignore[arg-type]
        assert (engine.deployment.exact, engine.deployment.warnings) == (True, ())
        texts = {
            engine.generate("Once upon a time", max_new_tokens=24, temperature=0.8, algorithm=algorithm).tokens
            for algorithm in ("nonsi", "si", "dsi")
        }
        assert len(texts) == 1


def test_ray_refuses_to_be_exact() -> None:
    with pytest.raises(ValueError, match="exact: machines on ray may round differently"):
        EngineConfig(fleet="ray", exact=True)
