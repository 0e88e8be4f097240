"""Penalties, biases, bans and ends of a request through an engine: transformers' texts, under every algorithm."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dsi.core.messages import RULES, Sampling
from dsi.engine.engine import Engine
from dsi.models.names import model_path
from dsi.planning.search import DeploymentPlan

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
ALGORITHMS = ("nonsi", "si", "pearl", "dsi", "auto")
TOGETHER: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 30,
    "logit_bias": {5: -4.0, 17: 1.5},
    "bad_words": ["Lily", "little girl", "park"],
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(sp=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path("builtin", "target"), dtype="float32").eval()


def transformers_text(target: Any, prompt: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    done = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    return tuple(done[0, len(prompt) :].tolist())


def words(engine: Engine, *words: str) -> list[list[int]]:
    return [list(tokens) for word in words for tokens in engine.tokenizer.encode_word(word)]


@pytest.mark.parametrize("algorithm", ["nonsi", "dsi"])
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {13: 3.0, 40: -50.0}}, {"sequence_bias": [[[13], 3.0], [[40], -50.0]]}),
        ({"bad_words": ["Lily", "girl"]}, {"bad_words_ids": ("Lily", "girl")}),
        ({"min_tokens": 60}, {"min_new_tokens": 60}),
    ],
)
def test_engine_writes_what_transformers_writes(
    engine: Engine, target: Any, options: dict[str, Any], theirs: dict[str, Any], algorithm: str
) -> None:
    prompt = engine.tokenizer.encode(STORY)
    if "bad_words_ids" in theirs:
        theirs = {"bad_words_ids": words(engine, *theirs["bad_words_ids"])}
    done = engine.generate(STORY, max_new_tokens=60, algorithm=algorithm, **options)
    ends = sorted(engine.tokenizer.eos_token_ids)
    assert done.tokens == transformers_text(target, prompt, max_new_tokens=60, eos_token_id=ends, **theirs)
    assert done.tokens != engine.generate(STORY, max_new_tokens=60).tokens or "min_tokens" in options


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_is_lossless_with_penalties_under_every_algorithm(engine: Engine, temperature: float) -> None:
    options: dict[str, Any] = {**TOGETHER, "max_new_tokens": 40, "temperature": temperature, "top_p": 0.95, "seed": 4}
    expected = engine.generate(STORY, algorithm="nonsi", **options)
    assert len(expected.tokens) == 40
    assert expected.tokens != engine.generate(STORY, max_new_tokens=40, temperature=temperature, seed=4).tokens
    for algorithm in ALGORITHMS:
        for lookahead in (None,) if algorithm in ("nonsi", "auto") else (2, 5):
            done = engine.generate(STORY, algorithm=algorithm, lookahead=lookahead, **options)
            assert done.tokens == expected.tokens, (algorithm, lookahead)


@pytest.mark.parametrize("rule", RULES)
def test_engine_is_lossless_with_penalties_under_every_rule(engine: Engine, rule: str) -> None:
    """A greedy text is one under every rule; a sampled one is each algorithm's own, the same every time."""
    options: dict[str, Any] = {**TOGETHER, "max_new_tokens": 30, "rule": rule, "lookahead": 4}
    expected = engine.generate(STORY, algorithm="nonsi", max_new_tokens=30, **TOGETHER).tokens
    assert [engine.generate(STORY, algorithm=name, **options).tokens for name in ("si", "dsi")] == [expected] * 2
    options |= {"temperature": 0.9, "seed": 2}
    first, second = (engine.generate(STORY, algorithm="si", **options) for _ in range(2))
    assert first.tokens == second.tokens
    banned = words(engine, *TOGETHER["bad_words"])
    assert not any(list(first.tokens[i : i + len(word)]) == word for word in banned for i in range(30))


def test_drafter_processes_its_logits_as_the_target_does(engine: Engine) -> None:
    """Else nearly all of its tokens would be rejected."""
    allowed = sorted({token for token in engine.generate(STORY, max_new_tokens=60).tokens if token % 2})
    options: dict[str, Any] = {"allowed_token_ids": allowed, "algorithm": "si", "lookahead": 4, "ignore_eos": True}
    done = engine.generate(STORY, max_new_tokens=40, **options)
    assert set(done.tokens) <= set(allowed)
    assert done.tally.accepted > 10


def test_engine_ends_at_a_stop_token_id(engine: Engine) -> None:
    plain = engine.generate(STORY, max_new_tokens=40)
    end = plain.tokens[12]
    first = plain.tokens.index(end)
    for algorithm in ALGORITHMS:
        done = engine.generate(STORY, max_new_tokens=40, stop_token_ids=[end], algorithm=algorithm)
        assert (done.tokens, done.finish_reason) == (plain.tokens[: first + 1], "stop")
        assert done.text == engine.tokenizer.decode((*done.prompt, *plain.tokens[:first]))[len(STORY) :]
    assert len(engine.generate(STORY, max_new_tokens=40, stop_token_ids=[end], min_tokens=30).tokens) > first + 1


def test_engine_ignores_the_end_token(engine: Engine) -> None:
    plain = engine.generate(STORY, max_new_tokens=400)
    assert plain.finish_reason == "stop"
    assert len(plain.tokens) < 395
    done = engine.generate(STORY, max_new_tokens=len(plain.tokens) + 5, ignore_eos=True)
    assert (done.tokens[: len(plain.tokens)], len(done.tokens)) == (plain.tokens, len(plain.tokens) + 5)
    assert done.finish_reason == "length"


def test_stop_strings_do_not_count_before_min_tokens(engine: Engine) -> None:
    plain = engine.generate(STORY, max_new_tokens=40, min_tokens=20)
    stop = engine.tokenizer.decode(plain.tokens[:6]).split()[-1]
    early = engine.generate(STORY, max_new_tokens=40, stop=stop)
    assert len(early.tokens) <= 8
    assert len(engine.generate(STORY, max_new_tokens=40, stop=stop, min_tokens=20).tokens) > 20


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9: there are 8 new tokens at most"),
        ({"logit_bias": {4096: 1.0}}, "token 4096: the target's tokens are 0 to 4095"),
        ({"allowed_token_ids": [-1]}, "token -1: the target's tokens are 0 to 4095"),
        ({"stop_token_ids": [5000]}, "token 5000: the target's tokens are 0 to 4095"),
        ({"allowed_token_ids": []}, "allowed_token_ids: there must be at least 1"),
    ],
)
def test_engine_refuses_what_it_cannot_honour(engine: Engine, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine.generate(STORY, **options)


def test_deployment_on_devices_refuses_penalties_by_name(engine: Engine) -> None:
    plan: Any = DeploymentPlan.__new__(DeploymentPlan)
    on_devices = replace(engine.deployment, plans={"dsi": plan})
    on_devices.check_request((5,), Sampling())
    with pytest.raises(ValueError, match="presence_penalty: is not supported on devices; leave it out"):
        on_devices.check_request((5,), Sampling(presence_penalty=0.5))
