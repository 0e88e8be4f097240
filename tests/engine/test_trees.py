"""Draft trees with real models: the text is non-SI's, in every number format, on every number of targets."""

import pytest

from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "def add(a, b):")
SPECS = (
    SpecConfig("si", 3, tree=6),
    SpecConfig("si", 5, tree=14),
    SpecConfig("pearl", 3, tree=6),
    SpecConfig("dsi", 2, tree=8),
    SpecConfig("dsi", 3, 3, tree=12),
)


@pytest.mark.parametrize(("dtype", "sp"), [("float32", 3), ("bfloat16", 1)])
def test_trees_write_the_text_of_nonsi(dtype: str, sp: int) -> None:
    with Engine.load(dtype=dtype, sp=sp) as engine:
        if dtype == "bfloat16" and not engine.deployment.exact:
            pytest.skip("forwards here depend on how many tokens they compute")
        for temperature in (0.0, 0.8):
            options = {"max_new_tokens": 32, "temperature": temperature, "seed": 4}
            for prompt in PROMPTS:
                plain = engine.generate(prompt, spec=SpecConfig("nonsi"), **options)
                for spec in SPECS:
                    done = engine.generate(prompt, spec=spec, **options)
                    assert done.tokens == plain.tokens
                    assert done.tally.accepted > 0


def test_trees_log_probabilities_are_those_of_nonsi() -> None:
    with Engine.load() as engine:
        texts = [
            engine.generate("The cat", max_new_tokens=24, logprobs=2, spec=spec)
            for spec in (SpecConfig("nonsi"), SpecConfig("si", 4, tree=8))
        ]
        rows = [[[token for token, _ in row] for row in done.top_logprobs] for done in texts]
        assert rows[0] == rows[1]


def test_trees_are_refused_where_models_compute_chains() -> None:
    refused = pytest.raises(ValueError, match="tree 8: these models compute a chain of draft tokens; leave it out")
    with Engine.load(drafter="ngram") as engine, refused:
        engine.generate("The cat", max_new_tokens=4, spec=SpecConfig("si", 4, tree=8))
