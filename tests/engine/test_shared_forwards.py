"""Requests that share forwards in an engine with real models: each has the text that it has alone."""

from dataclasses import replace
from typing import Any

import pytest

from dsi.core.messages import Sampling
from dsi.core.request import Completion
from dsi.core.spec import SpecConfig
from dsi.engine.engine import Engine

pytestmark = pytest.mark.slow

PROMPTS = [f"{opening} {word}" for opening in ("Once upon a time, a", "One day the", "The") for word in ("cat", "king")]
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, top_p=0.9, top_k=40, seed=5, logprobs=2),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
)
SPECS = ("auto", "nonsi", "si", "pearl", "dsi")


def requests(engine: Engine) -> list[Any]:
    """Every algorithm and sampling, on texts some of which are equal, and one prompt that is read in chunks."""
    texts = [engine.tokenizer.encode(prompt) for prompt in (*PROMPTS, *PROMPTS[:3], " ".join(PROMPTS * 12))]
    return [
        engine.make_request(text, 40, replace(engine.spec, algorithm=SPECS[i % 5]), SAMPLINGS[i % 4])
        for i, text in enumerate(texts * 2)
    ]


def essence(done: Completion) -> tuple[Any, ...]:
    rounded = [[(token, round(logprob, 6)) for token, logprob in row] for row in done.top_logprobs]
    return done.tokens, done.finish_reason, rounded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_requests_at_once_are_those_alone(dtype: str) -> None:
    with Engine.load(dtype=dtype) as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        alone = [essence(engine.loop.run(request)[0]) for request in requests(engine)]
        assert [essence(done) for done in engine.loop.run(*requests(engine))] == alone


def test_engine_shares_forwards_of_requests_that_run_at_once() -> None:
    with Engine.load(spec=SpecConfig("nonsi")) as engine:
        if not engine.deployment.shares_forwards:
            pytest.skip("forwards of several threads are no faster here")
        fleet = engine.deployment.fleet
        before = fleet.server_usage()["target-1"].forwards
        fleet.log = []
        texts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        engine.loop.run(*(engine.make_request(text, 20, engine.spec, Sampling()) for text in texts))
        assert fleet.server_usage()["target-1"].forwards - before == 20 * len(PROMPTS)
        assert len({span.start for span in fleet.log}) <= 24  # forwards, for all of them
